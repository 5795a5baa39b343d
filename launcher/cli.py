"""The `elasticrun` command: from argv to an exit status, never a traceback for a user's mistake.

The console script calls `main`. What is asked for is worked out and carried out in
`launcher.job`; here is only the outermost edge, where errors become a line and a status.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run `elasticrun` with these arguments (default: the process's); returns the exit status."""
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # before a job has begun; a running one has its own handlers
        return 130
    except BrokenPipeError:
        # Whoever read our output (`elasticrun --help | head`) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _main(argv: Sequence[str]) -> int:
    from launcher import own_packages  # noqa: PLC0415 - see pin: nothing of ours before it

    own_packages.pin()
    from elastic_driver.errors import ElasticError, ExitCode  # noqa: PLC0415
    from launcher.job import run  # noqa: PLC0415

    try:
        return run(argv)
    except ElasticError as error:
        print(f"elasticrun: {error}", file=sys.stderr)
        return int(error.exit_code)
    except BrokenPipeError:
        raise
    except Exception:
        traceback.print_exc()
        print(
            "elasticrun: this is a bug of elasticrun, not of your script; please report it with "
            "the lines above",
            file=sys.stderr,
        )
        return int(ExitCode.BUG)


if __name__ == "__main__":
    sys.exit(main())
