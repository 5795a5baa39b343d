"""The events that agents, workers and users send to the job, each with one line of meaning.

They come over the network, so their fields have bounds and unknown fields are refused. The events
that the driver posts itself are in `job.events`; the decisions that follow, in `job.decisions`.
All are frozen. Times are not in them: `Job.handle(event, now)` gets the time, in monotonic seconds.

A thread that stands still is placed by the file of its innermost Python frame: the worker asks for
its own training thread, the agent for a thread that py-spy sees from outside. Pure.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from elastic_driver import contract
from elastic_driver.kernel.machine import InWords
from elastic_driver.words import counted
from elastic_driver.words.orders import Count, Host, LongText, Seconds, Text, WorkerId
from elastic_driver.words.progress import MAX_DIGEST_CHARS, Bytes, Marks

MAX_STACK_CHARS = 60_000  # below the bound of a report's texts

# Parts of paths: code in these files waits for peers (torch, and our own exchanges).
_WAITS_IN = (
    "/torch/distributed/",
    "/torch/nn/parallel/",
    "/torch/autograd/",
    *("/torch/accelerator/", "/torch/cuda/", "/torch/xpu/", "/torch_npu/"),
    "/elastic_driver/worker/",
)

# The agent's answers for a worker that does not answer itself.
SEEN_WAITING = "in a collective, seen by py-spy"
SEEN_ELSEWHERE = "outside of collectives, seen by py-spy"


def waits_for_peers(filename: str) -> bool:
    """Return whether a thread whose innermost frame is in this file waits for peers.

    A script that calls `wait()` of a torch work object itself seems to wait elsewhere.
    """
    return any(part in filename for part in _WAITS_IN)


def shorten(stack: str, limit: int = MAX_STACK_CHARS) -> str:
    """Return the innermost part of a stack, at most `limit` characters; it says what is cut."""
    if len(stack) <= limit:
        return stack
    note = f"  (more than {len(stack) - limit} characters of outer frames were cut)\n"
    return note + stack[len(note) - limit :]


MAX_WORKERS = 4096  # of one agent
MAX_LEAVES = 4096  # of one state that is described
MAX_UNFIT_CHARS = 1000
MAX_LAST_LEAVES = 64  # of one that is described in short
MAX_LEAF_NAME_CHARS = 300
MAX_LEAF_TEXT_CHARS = 200
Port = Annotated[int, Meta(ge=0, le=65535)]
Reason = Annotated[str, Meta(min_length=1, max_length=500)]
ASKED = "a user asked for it"


class StaleEvent(Exception):
    """An event that changes nothing, because it is late, repeated or out of order."""


class Event(InWords, frozen=True):
    """An event for the job. A part of the job takes it in: `takes` in `job.events`."""

    @property
    def machine(self) -> Literal["job", "check"]:
        """The machine that the event is for: the job, or the node check."""
        return "job"


class AgentEvent(Event, frozen=True):
    """An event about one agent, of the job or of a node check."""

    host: Host
    incarnation: Count

    @property
    def machine(self) -> Literal["job", "check"]:
        """The machine that has started the agent."""
        return "check" if self.incarnation >= contract.FIRST_OF_CHECKS else "job"


class WorkerEvent(Event, frozen=True):
    """An event about one worker, of the job or of a node check."""

    worker: WorkerId

    @property
    def machine(self) -> Literal["job", "check"]:
        """The machine that has started the worker."""
        return "check" if contract.is_of_check(self.worker) else "job"


class WorkerReport(WorkerEvent, frozen=True):
    """A report that the job ignores if the worker's process is gone."""


# ---- events from agents and workers (these may come over the network) ---------------------


class AgentUp(AgentEvent, frozen=True):
    """An agent takes orders; `ports` are free ports for a torch store there.

    `slot_ports`: more free ports, for servers of the workers, if the job asks for any.
    `probe_port`: where the agent answers a probe; 0: it answers none. `cpus` and `memory` (bytes)
    are what its processes may use; 0: not known. `machine_id`: the same for all names of one
    machine; empty: not known.
    """

    pid: Count
    address: Host
    ports: Annotated[tuple[Port, ...], Meta(max_length=64)]
    slot_ports: Annotated[tuple[Port, ...], Meta(max_length=1024)] = ()
    probe_port: Port = 0
    cpus: Count = 0
    memory: Count = 0
    machine_id: Annotated[str, Meta(max_length=64)] = ""


class AgentReady(AgentUp, frozen=True, tag="agent_ready", forbid_unknown_fields=True):
    """An agent is up for the first time."""

    says: ClassVar[str] = "the agent {e.host}.{e.incarnation} is up"


class RunningWorker(Struct, frozen=True):
    """A worker that an agent runs; `pid` 0: it was ordered and is not started yet."""

    worker: WorkerId
    pid: Count


class AgentReturned(
    AgentUp, frozen=True, kw_only=True, tag="agent_returned", forbid_unknown_fields=True
):
    """An agent that an earlier driver started reports to this one, and says what it runs.

    Workers that have ended were reported before. `term`: of the driver that it reports to.
    """

    says: ClassVar[str] = (
        "the agent {e.host}.{e.incarnation} reports to the driver of term {e.term}"
    )

    term: Count
    workers: Annotated[tuple[RunningWorker, ...], Meta(max_length=MAX_WORKERS)]


class WorkerStarted(WorkerReport, frozen=True, tag="worker_started", forbid_unknown_fields=True):
    """An agent has started a worker's process; `cpus`: those it is bound to, as `0-3,8`."""

    says: ClassVar[str] = "the process of {e.worker} is up"

    pid: Count
    cpus: Annotated[str, Meta(max_length=1000)] = ""


class WorkerReady(WorkerReport, frozen=True, tag="worker_ready", forbid_unknown_fields=True):
    """A worker is in no group and waits for the next round (`round`: the one it left, 0 none).

    `version` is the number of committed steps in its state (−1: nothing trained yet), `clean` means
    that its tensors are exactly those. `reason` says why it left. `bound`: it uses the device of
    the slot that it was started for, so a spare can take no other one. `undone`: seconds since
    its last commit, if it goes back to that. `phase`: the number of the training function's call
    in its script. `told`: the rank that its script was told before it is in a round; −1: none.
    """

    round: Count
    version: Annotated[int, Meta(ge=-1, le=2**53)]
    clean: bool
    reason: Text
    bound: bool = False
    undone: Seconds = 0.0
    phase: Count = 0
    told: Annotated[int, Meta(ge=-1, le=2**53)] = -1

    def in_words(self) -> str:
        """See `InWords.in_words`."""
        steps = counted(max(self.version, 0), "committed step")
        return f"{self.worker} waits for a round ({steps}): {self.reason}"


class WorkerStepped(WorkerReport, frozen=True, tag="worker_stepped", forbid_unknown_fields=True):
    """A worker has committed its first step of this round: the step of this number.

    Sent once a round. `seconds`: since all ranks had the same state.
    """

    says: ClassVar[str] = "{e.worker} has finished step {e.step}, its first in round {e.round}"

    round: Count
    step: Count
    seconds: Seconds = 0.0


class WorkerStalled(WorkerReport, frozen=True, tag="worker_stalled", forbid_unknown_fields=True):
    """A worker lives, but its training thread has made no progress for longer than its limit.

    Sent when the limit passes, and again each time `seconds` has doubled. `where` is the place of
    the thread: "collective" means that it waits for peers. `stack`: its stack, innermost last.
    `first`: `seconds` of the first report of this stall, which a driver may not have got; 0: this
    is the first one. `collectives`: those of the whole world that it has begun in this round.
    """

    says: ClassVar[str] = "{e.worker} has made no progress for {e.seconds:.1f} s"

    round: Count
    seconds: Seconds
    where: Literal["collective", "elsewhere"]
    stack: LongText
    first: Seconds = 0.0
    collectives: Count = 0

    def __post_init__(self) -> None:
        force_setattr(self, "stack", shorten(self.stack))


class WorkerResumed(WorkerReport, frozen=True, tag="worker_resumed", forbid_unknown_fields=True):
    """A worker that reported a stall makes progress again."""

    says: ClassVar[str] = "{e.worker} makes progress again"

    round: Count


class WorkerStack(WorkerEvent, frozen=True, tag="worker_stack", forbid_unknown_fields=True):
    """A worker's stack: the answer to `AskStacks`, by its number.

    `where`: collective, elsewhere, or what its agent sees in words (`own` False), because the
    worker may be unable to answer. `stack`: of its training thread, innermost last.
    """

    says: ClassVar[str] = "{e.worker} was asked for its stack: {e.where}"

    number: Count
    where: Annotated[str, Meta(max_length=200)]
    stack: LongText
    own: bool = True

    def __post_init__(self) -> None:
        force_setattr(self, "stack", shorten(self.stack))


class OutOfMemory(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's end because memory was short, as its agent saw it.

    `peak`: the most memory that it had, in bytes; `idle`: what was idle on its host when it was
    gone. None: not known. `of_device`: the memory of a GPU was short, not that of the host.
    """

    peak: Bytes | None = None
    idle: Bytes | None = None
    of_device: bool = False


class WorkerExited(WorkerReport, frozen=True, tag="worker_exited", forbid_unknown_fields=True):
    """A worker's process is gone, its whole group with it; negative codes are signals.

    `victim`: its last output says that it failed because a peer was lost (a broken collective).
    """

    says: ClassVar[str] = "{e.worker} has ended with status {e.exit_code}"

    exit_code: Annotated[int, Meta(ge=-128, le=255)]
    log_tail: Text
    victim: bool = False
    out_of_memory: OutOfMemory | None = None


class LeafMark(Struct, frozen=True, array_like=True):
    """One leaf of a state: its name, the digest of its value (hex), and the value in short."""

    name: Annotated[str, Meta(max_length=MAX_LEAF_NAME_CHARS)]
    digest: Annotated[str, Meta(max_length=MAX_DIGEST_CHARS)]
    text: Annotated[str, Meta(max_length=MAX_LEAF_TEXT_CHARS)]


class WorkerEnding(WorkerReport, frozen=True, tag="worker_ending", forbid_unknown_fields=True):
    """A worker's script is over, and it has left its world for good; `WorkerExited` follows.

    An interpreter that has imported torch takes a second to end, or longer. `round`: the one that
    the worker was in; 0: none. `failed`: an exception that no lost peer has caused ended it.
    `marks`: of its state, as in `Progress`; no heartbeat follows. `leaves`: the state after the
    newest mark; in a large state, all leaves of an object together. `unfit`: why this worker could
    not take over the state of the others: it has built another one, or they cannot send theirs.
    `step`: the committed steps of the whole job; 0: none in this round.
    """

    says: ClassVar[str] = "the script of {e.worker} is over; its process is about to end"

    round: Count
    failed: bool = False
    marks: Marks = ()
    leaves: Annotated[tuple[LeafMark, ...], Meta(max_length=MAX_LAST_LEAVES)] = ()
    unfit: Annotated[str, Meta(max_length=MAX_UNFIT_CHARS)] = ""
    step: Count = 0


class WorkerSaved(WorkerEvent, frozen=True, tag="worker_saved", forbid_unknown_fields=True):
    """The result of a `SaveRequest`, from its first member; any member may report a problem.

    `folder` of the complete checkpoint, or the `problem`; neither: there is no `checkpoint_dir`.
    """

    number: Count
    folder: Annotated[str, Meta(max_length=4096)] = ""
    problem: Annotated[str, Meta(max_length=1000)] = ""

    def in_words(self) -> str:
        """See `InWords.in_words`."""
        if self.folder:
            return f"{self.worker} has written the state to disk: {self.folder}"
        why = self.problem or "it has no checkpoint_dir"
        return f"{self.worker} has not written the state to disk: {why}"


class HostLeaving(AgentEvent, frozen=True, tag="host_leaving", forbid_unknown_fields=True):
    """An agent got a preemption notice: its host goes away in `deadline` seconds."""

    says: ClassVar[str] = "host {e.host} goes away in {e.deadline:g} s: {e.reason}"

    deadline: Seconds
    reason: Text


class ConnectionUnanswered(
    AgentEvent, frozen=True, tag="connection_unanswered", forbid_unknown_fields=True
):
    """A worker of this agent tries to connect to an address, and nothing answers.

    `seconds`: for how long. It is sent again as long as that lasts.
    """

    says: ClassVar[str] = "{e.worker} on {e.host} gets no answer from {e.address}:{e.port}"

    worker: WorkerId
    address: Host
    port: Port
    seconds: Seconds


class WorkerLeaving(WorkerEvent, frozen=True, tag="worker_leaving", forbid_unknown_fields=True):
    """A worker got a signal or a preemption notice: it has to leave in `deadline` seconds."""

    says: ClassVar[str] = "{e.worker} has to leave in {e.deadline:g} s: {e.reason}"

    deadline: Seconds
    reason: Text


class StateDescribed(Struct, frozen=True, tag="state_described", forbid_unknown_fields=True):
    """A worker's state after `step`, leaf by leaf: the answer to a `StateQuestion`.

    `leaves`: in the order in which the state is walked, the first `MAX_LEAVES` of them. `missing`:
    the worker has kept no description of that step. It is for the watch, not for the job.
    """

    machine: ClassVar[Literal["stragglers"]] = "stragglers"

    worker: WorkerId
    round: Count
    step: Count
    leaves: Annotated[tuple[LeafMark, ...], Meta(max_length=MAX_LEAVES)] = ()
    missing: bool = False


ManyReports: TypeAlias = AgentReady | AgentReturned | WorkerStarted | WorkerReady | WorkerStepped
# Events that `POST /v1/events` takes.
WireEvent: TypeAlias = (
    ManyReports | WorkerStalled | WorkerResumed | WorkerStack | WorkerEnding | WorkerExited
    | WorkerSaved | HostLeaving | WorkerLeaving | ConnectionUnanswered
)  # fmt: skip

# ---- requests of users: the bodies of the driver's routes ---------------------------------


class ScaleRequested(Event, frozen=True, tag="scale_requested", forbid_unknown_fields=True):
    """A user wants another number of workers, within min and max.

    None: the user leaves the number to the job again, which is --max-np or what --auto-scale finds.
    """

    says: ClassVar[str] = "the number of workers was requested: {e.num_proc}"

    num_proc: Annotated[int, Meta(ge=1, le=10**6)] | None


_Workers = Annotated[int, Meta(ge=1, le=10**6)]


class PlanApplied(Event, frozen=True, tag="plan_applied", forbid_unknown_fields=True, kw_only=True):
    """A user's plan for the running job; it replaces the one before.

    It is carried out if its number is higher than those before. `workers` is a number that holds;
    `min` and `max` are limits within which the job decides. Each host gets at most `slots_per_host`
    workers, and no more than its processors and its memory (bytes) are enough for. None: the plan
    does not say.
    """

    says: ClassVar[str] = "the user applied {e}"

    number: Annotated[int, Meta(ge=1, le=2**53)]
    workers: _Workers | None = None
    min: _Workers | None = None
    max: _Workers | None = None
    slots_per_host: _Workers | None = None
    cpu_per_worker: Annotated[float, Meta(gt=0.0, le=1e6)] | None = None
    memory_per_worker: Annotated[int, Meta(ge=1, le=2**60)] | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and (self.min is not None or self.max is not None):
            raise ValueError("a plan has workers, or min and max, not both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min is {self.min}, more than max, which is {self.max}")

    def __str__(self) -> str:
        parts = (f"{name} {value:.8g}" for name, value in self._said() if value is not None)
        return f"plan {self.number}: {', '.join(parts) or 'no limits'}"

    @property
    def limits_hosts(self) -> bool:
        """True if hosts may have fewer workers than slots."""
        found = self.slots_per_host, self.cpu_per_worker, self.memory_per_worker
        return any(each is not None for each in found)

    def _said(self) -> Iterator[tuple[str, float | None]]:
        yield "workers", self.workers
        yield "min", self.min
        yield "max", self.max
        yield "slots per host", self.slots_per_host
        yield "CPUs per worker", self.cpu_per_worker
        memory = self.memory_per_worker
        yield "MiB per worker", None if memory is None else memory / 2**20


class DrainRequested(Event, frozen=True, tag="drain_requested", forbid_unknown_fields=True):
    """A user wants no worker on this host until the drain is cancelled.

    `deadline`: seconds in which it has to be empty; None: there is no hurry.
    """

    says: ClassVar[str] = "a drain of {e.host} was requested: {e.reason}"

    host: str
    reason: Reason = ASKED
    deadline: Seconds | None = None


class DrainCancelled(Event, frozen=True, tag="drain_cancelled", forbid_unknown_fields=True):
    """A user lets workers run again on a host that was drained."""

    says: ClassVar[str] = "the drain of {e.host} was cancelled: {e.reason}"

    host: str
    reason: Reason = ASKED


class StacksRequested(Event, frozen=True, tag="stacks_requested", forbid_unknown_fields=True):
    """A user wants the stacks of all workers."""

    says: ClassVar[str] = "the stacks were requested: {e.reason}"

    reason: Reason = ASKED
