"""The `elasticrun` command: from argv to an exit status; and the same as a function.

The console script calls `main`, Python programs call `elasticrun`; `launcher.run_job` carries the
command line out.
"""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.edge import run_command

if TYPE_CHECKING:
    from elastic_driver.runtime.results import JobResult


def main(argv: Sequence[str] | None = None) -> int:
    """Run `elasticrun` with these arguments (default: the process's); return the exit status."""

    def act() -> int:
        from launcher.run_job import run  # noqa: PLC0415 - `run_command` finds our packages first

        return run(sys.argv[1:] if argv is None else argv)

    return run_command("elasticrun", act, ends=argv is None)


def elasticrun(*argv: str) -> "JobResult":
    """Run a job with these arguments of the command; return its result, with every worker's.

    In the main thread it handles signals while the job runs; in another one they stay the
    program's. Raises `ElasticError` if the job cannot be started.
    """
    from elastic_driver.runtime.results import JobResult  # noqa: PLC0415 - see `main`
    from launcher.run_job import carry_out  # noqa: PLC0415

    done = carry_out(argv)
    if isinstance(done, JobResult):
        return done
    return JobResult(exit_code=done, reason="no job was run by this process", ended=time.time())


if __name__ == "__main__":
    sys.exit(main())
