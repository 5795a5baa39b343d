"""The `elasticrun` command: from argv to an exit status.

The console script calls `main`; `launcher.job` carries the command line out.
"""

import sys
from collections.abc import Sequence

from launcher.edge import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run `elasticrun` with these arguments (default: the process's); return the exit status."""

    def act() -> int:
        from launcher.job import run  # noqa: PLC0415 - `run_command` finds our packages first

        return run(sys.argv[1:] if argv is None else argv)

    return run_command("elasticrun", act)


if __name__ == "__main__":
    sys.exit(main())
