"""Runs our commands: errors become a line and an exit status.

A traceback is shown for a bug of ours only. `launcher.cli` and `launcher.ctl` call `run_command`
with what they do.
"""

import os
import sys
import traceback
from collections.abc import Callable

from launcher import own_packages


def run_command(name: str, act: Callable[[], int]) -> int:
    """Run the command `name`, which is `act`; return its exit status."""
    try:
        return _run(name, act)
    except KeyboardInterrupt:  # before a job has begun; a running one has its own handlers
        return 130
    except BrokenPipeError:
        # Whoever read our output (`elasticrun --help | head`) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(name: str, act: Callable[[], int]) -> int:
    own_packages.pin()
    from elastic_driver.errors import ElasticError, ExitCode  # noqa: PLC0415 - see pin

    try:
        return act()
    except ElasticError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return int(error.exit_code)
    except BrokenPipeError:
        raise
    except Exception:
        traceback.print_exc()
        print(
            f"{name}: this is a bug of {name}, not of your script; please report it with the lines "
            "above",
            file=sys.stderr,
        )
        return int(ExitCode.BUG)
