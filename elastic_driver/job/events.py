"""The events for the job that the driver's own process posts, and how a part takes events in.

What the driver itself has seen never crosses a network, so its fields have no bounds; the events of
agents, workers and users are in `words.wire_events`. All are in the journal, each by its tag.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import ClassVar, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from msgspec import Struct

from elastic_driver import contract
from elastic_driver.words import counted
from elastic_driver.words import wire_events as events
from elastic_driver.words.findings import StateValue
from elastic_driver.words.wire_events import AgentEvent, Event, Reason, WorkerEvent

# The observation that raises the suspicion that an agent is lost; "peers": a worker of another host
# saw its connections to that host break.
Evidence: TypeAlias = Literal["silent", "disconnected", "backend", "peers"]


# ---- who takes in an event -------------------------------------------------------------------


class Turn(IntEnum):
    """The turn of a part among those that take in an event; equal turns: in the order of parts."""

    FIRST = 0  # before the part that the event is for
    OWNER = 1  # the part that the event is for: there is one
    AFTER = 2  # once that part knows


class Taken(NamedTuple):
    """The kinds that a method takes in; `spare`: only from workers that are spares."""

    kinds: tuple[type[Event], ...]
    turn: Turn
    spare: bool


_Method = TypeVar("_Method", bound=Callable[..., None])


def takes(
    *kinds: type[Event], turn: Turn = Turn.OWNER, spare: bool = False
) -> Callable[[_Method], _Method]:
    """Have a method of a part take in events of these kinds; nothing else names the two together.

    The method has the parameter `event`; and, where it needs them, `now`, and for a `WorkerReport`
    `worker`, the one that the report is of. It changes the part's own state, or raises
    `StaleEvent` for an event that came late or twice.
    """

    def mark(method: _Method) -> _Method:
        for kind in kinds:
            if not issubclass(kind, method.__annotations__["event"]):
                raise TypeError(f"{method.__qualname__} cannot take in {kind.__name__}")
        vars(method)["taken"] = Taken(kinds, turn, spare)
        return method

    return mark


# ---- events of the driver's process ----------------------------------------------------------


class DriverResumed(Event, frozen=True, tag="driver_resumed"):
    """This driver goes on with the job of one that has died; its first event.

    `moved`: it is on another host, so it is not known yet which agents it can reach.
    """

    says: ClassVar[str] = "a driver goes on with the job, in term {e.term}: {e.reason}"

    term: int
    reason: str
    moved: bool = False


class StopRequested(Event, frozen=True, tag="stop_requested"):
    """End the job now, with this exit status (Ctrl-C, `elasticctl stop`)."""

    says: ClassVar[str] = "the end of the job was requested: {e.reason}"

    reason: str
    exit_code: int


class JobLeaving(Event, frozen=True, tag="job_leaving"):
    """The whole job has to be gone in `deadline` seconds (SIGTERM to `elasticrun`)."""

    says: ClassVar[str] = "all workers have to leave in {e.deadline:g} s: {e.reason}"

    reason: str
    deadline: float


class HostsDiscovered(Event, frozen=True, tag="hosts_discovered"):
    """The hosts there are now: (host, slots) in the order of the source, without repeats."""

    hosts: tuple[tuple[str, int], ...]

    def in_words(self) -> str:
        """See `InWords.in_words`."""
        hosts = ", ".join(f"{host}:{slots}" for host, slots in self.hosts)
        return f"there are the hosts {hosts or '(none)'}"


class HostsGranted(Event, frozen=True, tag="hosts_granted"):
    """The Brain lets the job use these slots of hosts, and no others; no hosts: it has to wait.

    Each grant has a higher `number` than those before it, which it replaces. `began`: by which the
    Brain tells this run from others of its name, for the drivers that go on with it. `too_small`:
    the largest of the Brain's hosts with its idle memory in bytes ("" and 0: not known), if they
    have the memory for too few workers. `receipt`: what the Brain wants back with reports.
    """

    number: int
    hosts: tuple[tuple[str, int], ...]
    reason: str
    began: float = 0.0
    too_small: tuple[str, int] | None = None
    receipt: str = ""

    def in_words(self) -> str:
        """See `InWords.in_words`."""
        slots = sum(slots for _, slots in self.hosts)
        return f"the Brain granted {counted(slots, 'slot')} (grant {self.number}): {self.reason}"


class DiscoveryFailed(Event, frozen=True, tag="discovery_failed"):
    """Discovery gave no usable answer; the last known hosts stay."""

    says: ClassVar[str] = "discovery failed: {e.reason}"

    reason: str


class HostsMeasured(Event, frozen=True, tag="hosts_measured"):
    """The idle memory of hosts in bytes, as their agents have measured it last.

    It comes before the `WorkerExited` of a worker that ran out of memory.
    """

    says: ClassVar[str] = "the agents have told the idle memory of their hosts"

    idle: tuple[tuple[str, int], ...]


class HostProbed(Event, frozen=True, tag="host_probed"):
    """The answer to `ProbeHosts` about one host that was not reachable.

    `answered` False: no probe can find out whether it is back, so the start of an agent is tried.
    """

    says: ClassVar[str] = "host {e.host} was probed; it answered: {e.answered}"

    host: str
    number: int
    answered: bool


class AgentLost(AgentEvent, frozen=True, tag="agent_lost"):
    """An agent's process has ended or could not be started; its workers end with it.

    `unreachable`: because its host cannot be reached, or is silent. `refused`: because its host
    refuses us or lacks something, which somebody has to mend.
    """

    says: ClassVar[str] = "the agent {e.host}.{e.incarnation} is gone: {e.reason}"

    reason: str
    unreachable: bool = False
    refused: bool = False


class AgentSuspected(AgentEvent, frozen=True, tag="agent_suspected"):
    """There is evidence that an agent is lost. One piece of evidence proves nothing.

    `evidence`: it sent no heartbeat for longer than its heartbeats promised ("silent"); it closed
    its connection to the driver and opened no other one ("disconnected"); the backend's connection
    to its host closed ("backend").
    """

    says: ClassVar[str] = "the agent {e.host}.{e.incarnation} may be lost: {e.reason}"

    evidence: Evidence
    reason: str


class AgentHeard(AgentEvent, frozen=True, tag="agent_heard"):
    """An agent has sent a heartbeat: the first one, or the first after it was suspected."""

    says: ClassVar[str] = "the agent {e.host}.{e.incarnation} has sent a heartbeat"


class AgentProbed(AgentEvent, frozen=True, tag="agent_probed"):
    """The answer to `ProbeAgent`, by its number, after `seconds`.

    `result`: the agent answered; its host answered that no process listens there ("refused");
    nothing answered in time, or the agent accepted the connection and sent nothing ("silent").
    """

    says: ClassVar[str] = (
        "a probe of agent {e.host}.{e.incarnation}: {e.result} in {e.seconds:.3f} s"
    )

    number: int
    result: Literal["answered", "refused", "silent"]
    seconds: float


class LeaseExpired(Event, frozen=True, tag="lease_expired"):
    """An agent or a worker has not renewed its lease in the store.

    `kind`: the lease of an agent, of a worker, or the one of a worker that is half as long.
    `owner`: `<host>.<incarnation>` of the agent, or the worker's name. `timeout`: seconds of a
    whole lease.
    """

    says: ClassVar[str] = "{e.owner} is silent: {e.reason}"

    kind: Literal["agent", "worker", "half"]
    owner: str
    timeout: float

    @property
    def machine(self) -> Literal["job", "check"]:
        """The machine that has started the agent or the worker."""
        return "check" if contract.is_of_check(self.owner) else "job"

    @property
    def agent(self) -> tuple[str, int]:
        """Host and incarnation of the agent that owns the lease."""
        return contract.agent_named(self.owner)

    @property
    def reason(self) -> str:
        """The reason in words, for the log."""
        if self.kind == "half":
            return f"it has not been heard from for {self.timeout / 2:g} s"
        return f"not heard from for {self.timeout:g} s (--heartbeat-timeout)"


class ProgressReading(Struct, frozen=True):
    """A worker's last progress: the number of its last commit or check, and the seconds for one.

    `step_time` 0: not known yet. `answered`: it was written after the question. `since`: seconds
    since that commit or check, or since the start of the round.
    """

    step: int
    step_time: float
    answered: bool
    since: float = 0.0


class ProgressReported(Event, frozen=True, tag="progress_reported"):
    """The answer to `AskProgress`: the readable progress of the workers in this round."""

    says: ClassVar[str] = "the members have told their steps"

    number: int
    readings: tuple[ProgressReading, ...]


class Tick(Event, frozen=True, tag="tick"):
    """Only time has passed; sent when `Job.deadline()` is reached."""

    says: ClassVar[str] = "time has passed"


# ---- events from machines beside the job ----------------------------------------------------


class SizeProposed(Event, frozen=True, tag="size_proposed"):
    """`--auto-scale` wants another number of workers; what a user has asked for outranks it."""

    says: ClassVar[str] = "a size of {e.num_proc} is proposed: {e.reason}"

    num_proc: int
    reason: Reason


class MemoryExpected(Event, frozen=True, tag="memory_expected"):
    """A worker probably needs `need` bytes, as those of similar jobs did; 0: not known."""

    says: ClassVar[str] = "a worker is expected to need {e.need} bytes: {e.reason}"

    need: int
    reason: Reason


class HostStarved(Event, frozen=True, tag="host_starved"):
    """Workers wait for a host's processors; it is to have at most `workers`."""

    says: ClassVar[str] = "a size of {e.workers} at most is proposed for {e.host}: {e.reason}"

    host: str
    workers: int
    reason: Reason


class RankSlow(WorkerEvent, frozen=True, tag="rank_slow"):
    """A member of this round computes slowly: `ratio` times the usual time."""

    says: ClassVar[str] = "{e.worker} is slow: {e.ratio:.1f} times the usual time"

    round: int
    ratio: float


class RankRecovered(WorkerEvent, frozen=True, tag="rank_recovered"):
    """A member of this round that was slow is no longer slow."""

    says: ClassVar[str] = "{e.worker} is no longer slow"

    round: int


class StatesEqual(Event, frozen=True, tag="states_equal"):
    """All ranks of a round hold the same state after `step`; sent once a round."""

    says: ClassVar[str] = "all ranks of round {e.round} hold the same state after step {e.step}"

    round: int
    step: int


class StatesDiffer(Event, frozen=True, tag="states_differ"):
    """Ranks of a round hold different states after `step`.

    `leaf`: the first part of the state that differs, in the order in which it is walked; "": that
    is not known. `values`: what the ranks hold there. `reason`: the difference in words.
    """

    says: ClassVar[str] = "the ranks hold different states after step {e.step}: {e.reason}"

    round: int
    step: int
    leaf: str
    values: tuple[StateValue, ...]
    reason: str


class HostResult(Struct, frozen=True):
    """The result of a host's check: whether it may get workers, and the verdict in words."""

    host: str
    passed: bool
    reason: str


class HostsChecked(Event, frozen=True, tag="hosts_checked"):
    """The check that `CheckHosts` asked for is over."""

    results: tuple[HostResult, ...]
    number: int  # of the CheckHosts that this answers

    def in_words(self) -> str:
        """See `InWords.in_words`."""
        good = sum(result.passed for result in self.results)
        return f"the check of {counted(len(self.results), 'host')} is over; {good} may be used"


Together: TypeAlias = events.ManyReports | AgentLost | AgentSuspected | AgentHeard | AgentProbed
# Events that come from all workers or hosts at about the same time.
TOGETHER: tuple[type[Together], ...] = get_args(Together)


class EventBatch(events.Event, frozen=True, tag="event_batch"):
    """Events of kinds in `TOGETHER`, handled as one, because re-evaluation is O(workers)."""

    events: tuple[Together, ...]
