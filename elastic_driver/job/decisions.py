"""Every decision that the job takes, each with its reason.

All are frozen. `Job.handle(event, now)` returns them in the order in which they are to be
carried out; `runtime.executor` does so.
"""

from typing import Any, TypeAlias

from elastic_driver.kernel.log import LogEvent
from elastic_driver.kernel.machine import CausedDecision
from elastic_driver.words.findings import Failure
from elastic_driver.words.log_lines import LogLine
from elastic_driver.words.orders import Order, SaveRequest, World
from elastic_driver.words.world import SlotInfo


class StartAgent(CausedDecision, frozen=True, tag="start_agent"):
    """Start this host's agent, its n-th incarnation."""

    host: str
    incarnation: int
    slots: int
    reason: str


class StopAgent(CausedDecision, frozen=True, tag="stop_agent"):
    """Tell this host's agent to stop its workers and exit."""

    host: str
    incarnation: int
    grace: float
    reason: str


class KillAgent(CausedDecision, frozen=True, tag="kill_agent"):
    """End this agent and everything it started, at once, and refuse its later requests."""

    host: str
    incarnation: int
    reason: str


class ProbeAgent(CausedDecision, frozen=True, tag="probe_agent"):
    """Ask an agent for a sign of life, for at most `patience` seconds.

    The answer is `AgentProbed` with the same `number`.
    """

    host: str
    incarnation: int
    address: str
    port: int
    patience: float
    number: int
    reason: str


class ProbeHosts(CausedDecision, frozen=True, tag="probe_hosts"):
    """Connect to each host's address once, for at most `patience` seconds.

    `HostProbed` with the same `number` follows for each host that answers or cannot be probed.
    """

    hosts: tuple[str, ...]
    patience: float
    number: int
    reason: str


class GiveOrder(CausedDecision, frozen=True, tag="give_order"):
    """Hand an order to the host's agent; `repeated`: an earlier driver gave it, perhaps in vain."""

    host: str
    incarnation: int
    order: Order
    reason: str
    repeated: bool = False


class AwaitHeartbeats(CausedDecision, frozen=True, tag="await_heartbeats"):
    """Begin these workers' leases as if each had sent a heartbeat just now; `seconds`: a lease.

    The workers that an earlier driver heard from have no lease in the store of this one yet.
    """

    workers: tuple[str, ...]
    seconds: float
    reason: str


class PublishWorld(CausedDecision, frozen=True, tag="publish_world"):
    """A round is complete: give every worker its rank and its peers."""

    world: World
    reason: str


class AskProgress(CausedDecision, frozen=True, tag="ask_progress"):
    """Ask these members of a round for their progress; the answer is `ProgressReported`."""

    number: int  # of the question; the answer repeats it
    round: int
    workers: tuple[str, ...]
    reason: str


class PublishNotice(CausedDecision, frozen=True, tag="publish_notice"):
    """Tell the members to leave the round: after this step, or (None) at once."""

    round: int
    after_step: int | None
    reason: str
    silent: bool = False  # see `documents.Notice`


class PublishPlace(CausedDecision, frozen=True, tag="publish_place"):
    """Tell a worker that boots another place than that of its order; `hvd.init()` reads it."""

    worker: str
    place: SlotInfo
    reason: str


class PublishSave(CausedDecision, frozen=True, tag="publish_save"):
    """Ask the workers that leave last to write the state to disk; the answer is `WorkerSaved`."""

    request: SaveRequest
    reason: str


class SealRound(CausedDecision, frozen=True, tag="seal_round"):
    """The round is over: delete its keys and refuse later writes to them."""

    round: int
    reason: str


class CheckHosts(CausedDecision, frozen=True, tag="check_hosts"):
    """Check these hosts, (host, slots), beside the job; the answer is `HostsChecked`."""

    hosts: tuple[tuple[str, int], ...]
    reason: str
    number: int  # from 1


class AskStacks(CausedDecision, frozen=True, tag="ask_stacks"):
    """Ask every worker for the stack of its training thread; the answers are `WorkerStack`."""

    number: int
    reason: str


class Announce(CausedDecision, frozen=True, tag="announce"):
    """A line for the event log: what has happened, why, and where."""

    what: LogEvent
    reason: str
    round: int | None = None
    host: str | None = None
    slot: int | None = None
    rank: int | None = None
    pid: int | None = None
    worker: str | None = None

    @property
    def event(self) -> str:
        """Return the event's name in the log."""
        return self.what.name

    def facts(self) -> dict[str, Any]:
        """Return the fields of its line that are known, without number and time, in their order."""
        places = ((name, getattr(self, name)) for name in _PLACES)
        return {name: value for name, value in places if value is not None} | self.what.facts()

    def line(self, t: float) -> LogLine:
        """Return the line as its readers know it; `t`: unix seconds."""
        place = (self.host, self.slot, self.rank, self.pid, self.worker)
        return LogLine(t, self.event, self.reason, self.round, *place, self.what)


_PLACES = ("round", "host", "slot", "rank", "pid", "worker", "reason")  # in the order of a line


class EndJob(CausedDecision, frozen=True, tag="end_job"):
    """The job is over: stop everything, exit with `exit_code`."""

    exit_code: int
    reason: str
    failure: Failure | None = None


Decision: TypeAlias = (
    StartAgent | StopAgent | KillAgent | ProbeAgent | ProbeHosts | GiveOrder | CheckHosts
    | AwaitHeartbeats | PublishWorld
    | PublishNotice | PublishPlace | PublishSave | SealRound | AskProgress | AskStacks
    | Announce | EndJob
)  # fmt: skip
