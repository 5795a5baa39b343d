"""The `elasticrun` command: from argv to an exit status.

The console script calls `main`. What is asked for is worked out and carried out in
`launcher.job`.
"""

import sys
from collections.abc import Sequence

from launcher.edge import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run `elasticrun` with these arguments (default: the process's); return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    return run_command("elasticrun", lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    from launcher.job import run  # noqa: PLC0415 - it imports what `run_command` finds first

    return run(words)


if __name__ == "__main__":
    sys.exit(main())
