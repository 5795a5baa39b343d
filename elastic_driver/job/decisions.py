"""The decisions of the job, each with its reason.

All are frozen. `Job.handle(event, now)` returns them in the order in which they are to be carried
out; `runtime.executor` does so. One that only writes a document under a key needs no handler of its
own (`Publish`).
"""

from typing import Any, ClassVar

from elastic_driver import contract
from elastic_driver.kernel.log import LogEvent
from elastic_driver.kernel.machine import CausedDecision
from elastic_driver.words import counted
from elastic_driver.words.findings import Failure
from elastic_driver.words.log_events import RoundCompleted
from elastic_driver.words.log_lines import LogLine, sentence
from elastic_driver.words.orders import (
    Notice,
    Order,
    SaveRequest,
    StartWorkerOrder,
    StopWorkerOrder,
    World,
    encode,
)
from elastic_driver.words.world import SlotInfo


class Decision(CausedDecision, frozen=True):
    """A decision of the job; each kind is a class below this one, and has a field `reason`."""

    @property
    def reason(self) -> str:
        """Return why the job has decided it."""
        raise NotImplementedError


class Publish(Decision, frozen=True):
    """Write a document under a key of the store."""

    def entry(self) -> tuple[str, bytes]:
        """Return the key and the document."""
        raise NotImplementedError


class StartAgent(Decision, frozen=True, tag="start_agent"):
    """Start this host's agent, its n-th incarnation."""

    says: ClassVar[str] = "an agent is started on {e.host}: {e.reason}"

    host: str
    incarnation: int
    slots: int
    reason: str


class StopAgent(Decision, frozen=True, tag="stop_agent"):
    """Tell this host's agent to stop its workers and exit."""

    says: ClassVar[str] = "the agent of {e.host} is stopped: {e.reason}"

    host: str
    incarnation: int
    grace: float
    reason: str


class KillAgent(Decision, frozen=True, tag="kill_agent"):
    """End this agent and everything it started, at once, and refuse its later requests."""

    says: ClassVar[str] = "the agent of {e.host} is killed: {e.reason}"

    host: str
    incarnation: int
    reason: str


class ProbeAgent(Decision, frozen=True, tag="probe_agent"):
    """Ask an agent for a sign of life, for at most `patience` seconds.

    The answer is `AgentProbed` with the same `number`.
    """

    says: ClassVar[str] = "the agent of {e.host} is probed: {e.reason}"

    host: str
    incarnation: int
    address: str
    port: int
    patience: float
    number: int
    reason: str


class ProbeHosts(Decision, frozen=True, tag="probe_hosts"):
    """Connect to each host's address once, for at most `patience` seconds.

    `HostProbed` with the same `number` follows for each host that answers or cannot be probed.
    """

    says: ClassVar[str] = "hosts are probed: {e.reason}"

    hosts: tuple[str, ...]
    patience: float
    number: int
    reason: str


class GiveOrder(Decision, frozen=True, tag="give_order"):
    """Hand an order to the host's agent; `repeated`: an earlier driver gave it, perhaps in vain."""

    host: str
    incarnation: int
    order: Order
    reason: str
    repeated: bool = False

    def in_words(self) -> str:
        """See `InWords.in_words`; "" for an order that says nothing to people."""
        match self.order:
            case StartWorkerOrder(worker=worker):
                return f"{worker} is started: {self.reason}"
            case StopWorkerOrder(worker=worker):
                return f"{worker} is stopped: {self.reason}"
        return ""


class AwaitHeartbeats(Decision, frozen=True, tag="await_heartbeats"):
    """Begin these workers' leases as if each had sent a heartbeat just now; `seconds`: a lease.

    The workers that an earlier driver heard from have no lease in the store of this one yet.
    """

    says: ClassVar[str] = "the workers have {e.seconds:g} s to send a heartbeat: {e.reason}"

    workers: tuple[str, ...]
    seconds: float
    reason: str


class PublishWorld(Decision, frozen=True, tag="publish_world"):
    """A round is complete: give every worker its rank and its peers."""

    world: World
    reason: str

    def in_words(self) -> str:
        """See `InWords.in_words`."""
        size = counted(self.world.size, "worker")
        return f"round {self.world.round} begins with {size}: {self.reason}"


class AskProgress(Decision, frozen=True, tag="ask_progress"):
    """Ask these members of a round for their progress; the answer is `ProgressReported`."""

    says: ClassVar[str] = "the members of round {e.round} are asked for their steps: {e.reason}"

    number: int  # of the question; the answer repeats it
    round: int
    workers: tuple[str, ...]
    reason: str


class PublishNotice(Publish, frozen=True, tag="publish_notice"):
    """Tell the members to leave the round: after this step, or (None) at once."""

    says: ClassVar[str] = "the members leave round {e.round}: {e.reason}"

    round: int
    after_step: int | None
    reason: str
    silent: bool = False  # see `words.orders.Notice`

    def entry(self) -> tuple[str, bytes]:
        """See `Publish.entry`."""
        notice = Notice(self.round, self.after_step, self.reason, self.silent)
        return contract.JOB_NOTICE, encode(notice)


class PublishPlace(Publish, frozen=True, tag="publish_place"):
    """Tell a worker that boots another place than that of its order; `hvd.init()` reads it."""

    says: ClassVar[str] = "{e.worker} is told rank {e.place.rank} of {e.place.size}: {e.reason}"

    worker: str
    place: SlotInfo
    reason: str

    def entry(self) -> tuple[str, bytes]:
        """See `Publish.entry`."""
        return contract.worker_place(self.worker), encode(self.place)


class PublishSave(Publish, frozen=True, tag="publish_save"):
    """Ask the workers that leave last to write the state to disk; the answer is `WorkerSaved`."""

    says: ClassVar[str] = "the last members are asked to write the state to disk: {e.reason}"

    request: SaveRequest
    reason: str

    def entry(self) -> tuple[str, bytes]:
        """See `Publish.entry`."""
        return contract.JOB_SAVE, encode(self.request)


class SealRound(Decision, frozen=True, tag="seal_round"):
    """The round is over: delete its keys and refuse later writes to them."""

    says: ClassVar[str] = "round {e.round} is over: {e.reason}"

    round: int
    reason: str


class CheckHosts(Decision, frozen=True, tag="check_hosts"):
    """Check these hosts, (host, slots), beside the job; the answer is `HostsChecked`."""

    says: ClassVar[str] = "hosts are checked: {e.reason}"

    hosts: tuple[tuple[str, int], ...]
    reason: str
    number: int  # from 1


class AskStacks(Publish, frozen=True, tag="ask_stacks"):
    """Ask every worker for the stack of its training thread; the answers are `WorkerStack`."""

    says: ClassVar[str] = "the workers are asked for their stacks: {e.reason}"

    number: int
    reason: str

    def entry(self) -> tuple[str, bytes]:
        """See `Publish.entry`."""
        return contract.JOB_STACKS, str(self.number).encode()


class Announce(Decision, frozen=True, tag="announce"):
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

    def in_words(self) -> str:
        """See `InWords.in_words`."""
        reason = self.reason
        if isinstance(self.what, RoundCompleted):  # its size is in the sentence already
            reason = reason.partition(": ")[2] or reason
        return sentence(self.event, reason, self.facts())

    def line(self, t: float) -> LogLine:
        """Return the line as its readers know it; `t`: unix seconds."""
        place = (self.host, self.slot, self.rank, self.pid, self.worker)
        return LogLine(t, self.event, self.reason, self.round, *place, self.what)


_PLACES = ("round", "host", "slot", "rank", "pid", "worker", "reason")  # in the order of a line


class EndJob(Decision, frozen=True, tag="end_job"):
    """The job is over: stop everything, exit with `exit_code`."""

    says: ClassVar[str] = "the job ends with status {e.exit_code}: {e.reason}"

    exit_code: int
    reason: str
    failure: Failure | None = None
