"""The errors of elastic-driver and the exit status each one means.

Every message says what was needed, what was found and what to try. The command line turns
an `ElasticError` into one line and its `exit_code`; any other exception is our bug (70).
"""

from enum import IntEnum
from typing import NoReturn

from rendezvous import errors as rendezvous_errors

ElasticError = rendezvous_errors.ElasticError
RendezvousError = rendezvous_errors.RendezvousError


class ExitCode(IntEnum):
    """Exit statuses of `elasticrun` (names of sysexits.h, if it has one)."""

    OK = 0
    USAGE = 64  # EX_USAGE
    STATES_DIFFER = 65  # EX_DATAERR: the ranks hold different states
    BUG = 70  # EX_SOFTWARE
    UNAVAILABLE = 75  # EX_TEMPFAIL: the same command may succeed later
    INTERRUPTED = 130
    TERMINATED = 143


class UsageError(ElasticError):
    """The command, a file or a setting is wrong; nothing was started."""

    exit_code = ExitCode.USAGE


class ClusterError(ElasticError):
    """Hosts, slots or the rendezvous were not available in time."""

    exit_code = ExitCode.UNAVAILABLE


class NotEnoughSlotsError(ClusterError):
    """Too few slots stayed available until the deadline.

    `began`: the job has trained before. `booting`: the workers that were not ready yet, in words.
    """

    def __init__(
        self, *, needed: int, available: int, waited: float, began: bool = False, booting: str = ""
    ) -> None:
        hint = "lower -np or --min-np, raise --start-timeout"
        if began:
            hint = "lower --min-np, raise --elastic-timeout"
        where = "check the hosts" if available else "check why no host can be used"
        slots = "1 slot" if needed == 1 else f"{needed} slots"
        super().__init__(
            f"need {slots}, found {available} after {waited:.0f} s"
            f"{booting and f' ({booting})'}; {hint}, or {where} (elasticctl events)"
        )
        self.needed, self.available = needed, available


class TakenOverError(ClusterError):
    """Another driver goes on with the job, or has to: this one must decide nothing any more."""


class HostsUpdatedInterrupt(ElasticError, RuntimeError):
    """The membership changes at this step boundary; `run` catches it and rejoins.

    Raised by `State.commit()` and `State.check_host_updates()`, at the same place on every rank
    (name and role as in Horovod elastic).

    `skip_sync`: Horovod's mark that hosts were only removed; here the states are compared anyway.
    """

    def __init__(self, reason: object = "", *, skip_sync: bool = False) -> None:
        only = isinstance(reason, bool)  # Horovod's one argument
        super().__init__("" if only else reason)
        self.skip_sync = bool(reason) if only else skip_sync


class WorldBrokenError(ElasticError):
    """A collective failed because a peer, a link or the group is gone; `run` rejoins."""


class SwallowedError(BaseException):
    """The script has caught the error of a broken world, or of a change, and has gone on.

    No `except Exception` stops it on its way to `run`, which rejoins. Its cause is the error that
    was caught.
    """


def assert_never(value: NoReturn) -> NoReturn:
    """Mark a case as impossible: mypy reports each type that can still come here."""
    raise AssertionError(f"unexpected {value!r}")
