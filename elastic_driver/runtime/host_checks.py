"""Checks of hosts, as the driver and the launcher know them; a feature makes them.

The chapter `command` of that feature is a `CheckCommand`. Reports are the feature's own: they have
`nodes`, `excluded`, `summary` and `render`. Times are seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from elastic_driver.contract import PortRange
from elastic_driver.errors import UsageError
from elastic_driver.features import chapters
from elastic_driver.job.decisions import CheckHosts
from elastic_driver.runtime.backend import Backend, MakeBackend
from elastic_driver.runtime.discovery import Hosts
from elastic_driver.runtime.driver_parts import DriverPart
from elastic_driver.runtime.run_dir import RunDir
from rendezvous.server import RendezvousServer

Report = Any
Say = Callable[[str], None]  # shows the user a line
CheckAnswer = Callable[[Report | Exception], None]


@dataclass(frozen=True, kw_only=True)
class CheckOrder:
    """The user's options for the checks of a run."""

    timeout: float  # of the task of one round
    start_timeout: float  # of an agent
    heartbeat_timeout: float
    exclude_slow: bool  # keep slow nodes out of the job
    every_slot: bool  # a process for each slot; otherwise one for each host
    measures_network: bool  # also bandwidth and latency
    trains: bool  # also a small model
    ports: PortRange | None
    env: Mapping[str, str]  # added to the agents' environment


class HostChecks(Protocol):
    """The checks of one run."""

    report: Report | None  # of all checks
    say: Say

    @property
    def backend(self) -> Backend | None:
        """The backend that starts the agents of the present check; None: there is none."""

    def open(self, server: RendezvousServer, token: str) -> None:
        """Take the rendezvous that the agents of all checks use."""

    def begin_term(self, term: int) -> None:
        """Number checks anew: agents of an earlier driver's checks may still live."""

    def stop(self) -> None:
        """End a check that is going on, and everything it started; no other begins. Idempotent."""

    def excluded(self, report: Report | None) -> dict[str, str]:
        """Return the hosts that the job does not use after this check, with the reasons."""

    def begin_with(self, report: Report) -> None:
        """Take the report of the check before the job, and keep it in the run's folder."""

    def go_on(self) -> None:
        """Read the report of the check with which the run began, if there is a usable one."""

    def remember(self, report: Report) -> Report:
        """Keep a report beyond this run; return it with earlier findings."""


class CheckCommand(Protocol):
    """The feature, as `elasticrun` and `elasticctl check` use it."""

    def make_checks(
        self,
        order: CheckOrder,
        *,
        starter: MakeBackend,
        run_dir: RunDir,
        state_dir: Path,
        say: Say,
        quiet: bool,
    ) -> HostChecks:
        """Return the checks of a run; `quiet`: they show problems alone."""

    def history(self, state_dir: Path, names: Sequence[str], say: Say, *, as_json: bool) -> str:
        """Return the results of earlier checks of these hosts, or of all, as text."""


def check_command() -> CheckCommand:
    """Return the feature that checks hosts; raises UsageError if it is not installed."""
    for chapter in chapters("command"):
        found: CheckCommand = chapter
        return found
    raise UsageError("node checks are not installed; start without --network-check")


class Checking(DriverPart):
    """The part of a driver that checks hosts; this one is asked for no check."""

    def check(self, _hosts: Hosts, _answer: CheckAnswer) -> None:
        """Check hosts; any thread may later call `answer` with the report, or with an error."""
        raise AssertionError("hosts are checked only in jobs that began with a check")

    def check_for_job(self, asked: CheckHosts) -> None:
        """Check hosts for the job, and tell it the results."""
        self.check(asked.hosts, lambda _found: None)
