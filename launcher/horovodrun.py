"""`python -m launcher.horovodrun`: what `horovodrun` is for scripts that nobody wants to change.

It is `elasticrun --horovod` with the same arguments. `--install` puts a command of that name beside
`elasticrun`, unless there is one: a package that brought it would overwrite Horovod's own, and be
overwritten by it.
"""

import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from launcher.edge import run_command

_MARK = "launcher.horovodrun"
_SCRIPT = "#!{python}\nimport sys\n\nfrom launcher.horovodrun import main\n\nsys.exit(main())\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `elasticrun --horovod` with these arguments (default: the process's)."""
    given = list(sys.argv[1:] if argv is None else argv)

    def act() -> int:
        from launcher.run_job import run  # noqa: PLC0415 - `run_command` finds our packages first

        if given == ["--install"]:
            return install(Path(sys.executable).parent)
        return run(["--horovod", *given])

    return run_command("horovodrun", act, ends=argv is None)


def install(folder: Path) -> int:
    """Write the command `horovodrun` into a folder; raises `UsageError` where another one is."""
    from elastic_driver.errors import UsageError  # noqa: PLC0415 - see `main`

    path = folder / "horovodrun"
    found = path if path.exists() else shutil.which("horovodrun")
    if found and _MARK not in Path(found).read_text(encoding="utf-8", errors="replace"):
        raise UsageError(f"there is another horovodrun: {found}; use elasticrun --horovod")
    if _is_there("horovod"):
        raise UsageError("Horovod is installed here; use elasticrun --horovod")
    path.write_text(_SCRIPT.format(python=sys.executable), encoding="utf-8")
    path.chmod(0o755)
    sys.stdout.write(f"{path} is `elasticrun --horovod`\n")
    return 0


def _is_there(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
