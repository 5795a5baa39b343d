"""The documents that driver, agents and workers write to keys for each other, and agents' orders.

Pure data (JSON by msgspec). The core makes worlds, notices, save requests and orders; workers
write their progress; the launcher writes the job's specification. The keys are named in
`elastic_driver.contract`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from elastic_driver.core.measured import Numbers, StepTimes
from elastic_driver.core.members import Member as Member  # noqa: PLC0414 - for importers
from elastic_driver.core.members import Members, Roster, roster_of
from elastic_driver.core.members import SlotInfo as SlotInfo  # noqa: PLC0414
from elastic_driver.options import (
    FLAG,
    NUMBERS,
    STREAMS,
    Heading,
    names,
    option,
    text,
    whole,
    whole_or,
)
from rendezvous.wire import UNREADABLE

Host = Annotated[str, Meta(min_length=1, max_length=253)]
WorkerId = Annotated[str, Meta(min_length=1, max_length=300)]
Text = Annotated[str, Meta(max_length=65536)]
LongText = Annotated[str, Meta(max_length=1 << 20)]  # its reader keeps a part
Count = Annotated[int, Meta(ge=0, le=2**53)]


class DriverTerm(Struct, frozen=True):
    """The driver of the run: its term (1 for the first one), and the URL of its rendezvous."""

    term: Annotated[int, Meta(ge=1, le=2**20)]
    url: Annotated[str, Meta(min_length=1, max_length=1000)]


class World(Struct, frozen=True):
    """A complete round: its members, ordered by rank. It travels as a `WorldDocument`."""

    round: int
    members: Sequence[Member]
    reason: str

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.members)

    def member(self, worker: str) -> Member | None:
        """Return the entry of one worker, or None if it does not take part."""
        if isinstance(self.members, Members):
            return self.members.named(worker)
        return next((m for m in self.members if m.worker == worker), None)


class WorldDocument(Struct, frozen=True):
    """A `World` as it goes to each of its members."""

    round: int
    reason: str
    roster: Roster


def encode_world(world: World) -> bytes:
    """Return the bytes of `job/world`."""
    return encode(WorldDocument(world.round, world.reason, roster_of(world.members)))


# Made now: threads that use a type for the first time together crash in msgspec.
_decode_world = msgspec.json.Decoder(WorldDocument).decode


def decode_world(data: bytes) -> World:
    """Return the world in these bytes; raises `ValueError` if they hold none."""
    document = _decode_world(data)
    return World(document.round, Members(document.roster), document.reason)


class Notice(Struct, frozen=True):
    """Leave round `round`: at once (`after_step` None) or after committed step `after_step`.

    `silent`: a host answers no more, so no collective with it fails by itself.
    """

    round: int
    after_step: int | None
    reason: str
    silent: bool = False


class SaveRequest(Struct, frozen=True):
    """Write the state after `step` committed steps to disk: all workers that hold it have to leave.

    `members` write together, each the part for its position in this list. `number` tells requests
    apart.
    """

    number: int
    step: int
    members: tuple[str, ...]
    seconds: float  # the time left for writing
    reason: str


MAX_SAMPLES = 64  # of measured steps in one message
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Share = Annotated[int, Meta(ge=0, le=2**31)]


class Sample(Struct, frozen=True, array_like=True):
    """A rank's time for a committed step, without waiting for other ranks.

    If steps are short, it is the mean of all steps since the last sample. `compute` is the time of
    all computing; of several forward-backward passes, only one is counted. `one_pass` is the time
    of that pass alone. `exchange` is not in `compute`: it is the processor time of exchanging the
    gradients, because the clock also counts waiting.
    """

    step: Count
    compute: Seconds
    one_pass: Seconds
    exchange: Seconds = 0.0


class Division(Struct, frozen=True, array_like=True):
    """A rank's part of a fixed batch: `share` of a step's `virtual_workers`."""

    virtual_workers: Share
    share: Share


MAX_LINKS = 16  # in one message


class LinkUse(Struct, frozen=True, array_like=True):
    """The use of the connections to one peer's address since the round began.

    `seconds`: the time in which data was on its way. `carried`: bytes that arrived.
    """

    peer: Host
    seconds: Seconds
    carried: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Links(Struct, frozen=True, array_like=True):
    """The connections of a rank to other hosts; `address` is its own."""

    address: Host
    uses: Annotated[tuple[LinkUse, ...], Meta(max_length=MAX_LINKS)]


class GradientNorms(Struct, frozen=True, array_like=True):
    """The squared norms of a rank's own gradient, and of the mean over all ranks."""

    own: Annotated[float, Meta(ge=0.0)]
    mean: Annotated[float, Meta(ge=0.0)]


class Progress(Struct, frozen=True):
    """A worker's progress: `step` committed steps in all, seconds for one, in round `round`.

    `samples` are its last measured steps, oldest first; each is sent several times. `division`: its
    part of a fixed batch, if the driver gives the shares. `links`: its connections to other hosts,
    if it has any.

    The other fields are only shown (`core.measured`). `at`: the time of the last step by the
    worker's own clock. `steps_done`, `samples_done`: of this process since it started. `numbers`,
    `total`: what `report_progress` got last, and the number of all steps. `reported`: the step that
    it named last, in a round without commits. `micro_batches`: those of a step of a `FixedBatch`,
    and `batch` its samples. `parameters`: of the models of the state.
    `gradients`: measured in the last steps, where `--auto-scale` needs them.
    """

    round: Count
    step: Annotated[int, Meta(ge=-1, le=2**53)]  # −1: nothing trained yet
    step_time: Seconds
    samples: Annotated[tuple[Sample, ...], Meta(max_length=MAX_SAMPLES)] = ()
    division: Division | None = None
    links: Links | None = None
    at: Seconds = 0.0
    steps_done: Count = 0
    samples_done: Count = 0
    numbers: Numbers = {}
    total: Count | None = None
    times: StepTimes | None = None
    reported: Count | None = None
    micro_batches: Count | None = None
    batch: Count | None = None
    parameters: Count | None = None
    gradients: GradientNorms | None = None


class Allocation(Struct, frozen=True):
    """The micro-batches of each rank of round `round`, from the step on which the ranks agree."""

    round: int
    shares: tuple[int, ...]
    reason: str


# fmt: off
@dataclass(frozen=True)
class JobSpec:
    """The command that every worker of the job runs, and its settings; no secrets."""

    run_id: str
    command: tuple[str, ...]  # argv of a worker
    cwd: str
    env: dict[str, str]  # added to the agent's own environment
    heartbeat_timeout: float  # seconds
    max_restarts: int  # shown to workers as TORCHELASTIC_MAX_RESTARTS
    heartbeat_interval: float = 0.0  # seconds between an agent's heartbeats; 0: it sends none
    hang_timeout: float | None = None  # seconds without progress; None: adapts, 0: never
    grace_period: float = 0.0  # seconds; the time to leave a host that is about to go; 0: none
    driver_timeout: float = 0.0  # seconds to wait for the next driver; 0: end with this one
    log_dir: str | None = option(Heading.OUTPUT, text("DIR"), None,
        "Also write each worker's output to files below DIR.", aliases=("--output-filename",))
    tee: str = option(Heading.OUTPUT, STREAMS, "3",
        "With --log-dir: streams that go both to the terminal and to files.", aliases=("-t",))
    redirects: str = option(Heading.OUTPUT, STREAMS, "0",
        "With --log-dir: streams that go to files only. 0 none, 1 stdout, 2 stderr, 3 both; per "
        "local rank as 0:3,1:1.", aliases=("-r",))
    local_ranks_filter: tuple[int, ...] | None = option(Heading.OUTPUT, NUMBERS, None,
        "Show only these local ranks of each host on the terminal.")
    timestamp: bool = option(Heading.OUTPUT, FLAG, False,
        "Put the time in front of every line of the workers.",
        flag="prefix-output-with-timestamp", aliases=("--prefix-timestamp", "-prefix-timestamp"))
    horovod: bool = option(Heading.HOROVOD, FLAG, False,
        "Run a script that says 'import horovod.torch' as it is: the name then means "
        "elastic_driver.horovod.torch (docs/horovod.md).")
    keep_output: int = option(Heading.OUTPUT, whole("MIB"), 64,
        "MiB of the workers' output that the run's folder keeps for elasticctl logs; 0: none.")
    preload: tuple[str, ...] = option(Heading.START, names("MODULES"), ("torch",),
        "Modules that a warm process has imported before a worker is forked from it, with commas "
        "between them (docs/warm-workers.md).")
    warm: int | None = option(Heading.START, whole_or("auto"), None,
        "Processes kept warm on each host for new workers; 0: every worker starts as a new "
        "process.",
        shown="auto: one, if the command is Python and imports more than the standard library; "
        "none with --tf-config")
    virtual_local_rank: bool = option(Heading.START, FLAG, False,
        "Each worker sees only the GPU of its slot, and its LOCAL_RANK is 0 (as in torchrun).")
    rehearse: bool = True  # a warm parent takes a tiny training step
    slot_ports: int = 0  # free ports that each agent offers for its workers' servers
# fmt: on


MAX_PEERS = 16
STOPPING_S = 5.0  # the last part of a notice, for ending processes that are still there


def time_to_leave(deadline: float) -> float:
    """Return the seconds of a notice in which workers leave by themselves; then they are ended.

    The agents and the driver use the same rule, so that no worker is stopped while others count
    on it.
    """
    return deadline - min(STOPPING_S, deadline / 2)


class StartWorkerOrder(Struct, frozen=True, tag="start_worker"):
    """Start a process for `worker` with these ranks in its environment."""

    worker: str
    place: SlotInfo  # for an elastic newcomer: the place it would have in a round now
    round: int
    restart_count: int
    master_addr: str
    master_port: int
    tf_config: str | None = None  # the worker's TF_CONFIG, if the job uses it
    elastic: bool = False  # the job is known to be elastic: the worker is a newcomer


class StopWorkerOrder(Struct, frozen=True, tag="stop_worker"):
    """SIGTERM, then SIGKILL after `grace` seconds (0: SIGKILL at once), to its whole group."""

    worker: str
    grace: float
    reason: str


class RanksOrder(Struct, frozen=True, tag="ranks"):
    """A round is complete: prefix output with these ranks from now on, add by-rank links.

    `peers`: address and probe port of other agents in the round, at most `MAX_PEERS`, spread
    evenly. An agent asks them when the driver's host does not answer.
    """

    round: int
    ranks: dict[str, int]  # worker → rank, this host's workers only
    peers: tuple[tuple[str, int], ...] = ()


class ShutdownOrder(Struct, frozen=True, tag="shutdown"):
    """Stop every worker as StopWorkerOrder does, report their exits, then exit 0."""

    grace: float
    reason: str


class StacksOrder(Struct, frozen=True, tag="stacks"):
    """Report the stack of every worker of this host, as seen from outside (`core.rules.hangs`)."""

    number: int  # of the question; the answer repeats it


Order = StartWorkerOrder | StopWorkerOrder | RanksOrder | ShutdownOrder | StacksOrder


# ---- output of an agent and its workers whose console is gone -----------------------------

MAX_OUTPUT_LINES = 4096  # in one message


class OutputLine(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One line for elasticrun's stdout (`stream` 1) or stderr (2), without its newline."""

    stream: Literal[1, 2]
    text: Text


class OutputLines(Struct, frozen=True, forbid_unknown_fields=True):
    """Lines in the order in which they were written: the body of `POST /v1/output`.

    `first` is the number of the first line; an agent numbers its lines from 1. Lines that were
    taken already may come again, with the same numbers.
    """

    host: Host
    incarnation: Annotated[int, Meta(ge=0, le=2**53)]
    first: Annotated[int, Meta(ge=1, le=2**53)]
    lines: Annotated[tuple[OutputLine, ...], Meta(min_length=1, max_length=MAX_OUTPUT_LINES)]


class WorkerLine(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One line of a worker's stdout (`stream` 1) or stderr (2), without its newline."""

    t: Annotated[float, Meta(ge=0)]  # unix seconds
    worker: WorkerId
    rank: Annotated[int, Meta(ge=-1, le=10**6)]  # that the worker had then; −1: a spare
    stream: Literal[1, 2]
    text: Text


class WorkerLines(Struct, frozen=True, forbid_unknown_fields=True):
    """Lines of the workers of one host: the body of `POST /v1/logs`.

    `first` is the number of the first line; an agent numbers its lines from 1. `dropped`: how many
    it has left out before them.
    """

    host: Host
    incarnation: Count
    first: Annotated[int, Meta(ge=1, le=2**53)]
    lines: Annotated[tuple[WorkerLine, ...], Meta(min_length=1, max_length=MAX_OUTPUT_LINES)]
    dropped: Count = 0


class LoginCode(Struct, frozen=True):
    """A code with which one browser may log in, within so many seconds."""

    code: str
    seconds: float


class LogsTaken(Struct, frozen=True):
    """The answer to `WorkerLines`: seconds until the agent may send more."""

    wait: Seconds


class Failure(Struct, frozen=True):
    """The failure that decides a job's exit status: the first of its round."""

    worker: str
    rank: int
    host: str
    pid: int
    exit_code: int  # as subprocess gives it: negative for a signal
    log_tail: str = ""


T = TypeVar("T")
# Return any document or order here as JSON.
encode: Callable[[Struct | JobSpec], bytes] = msgspec.json.Encoder().encode
# Return an agent's order; raises `msgspec.ValidationError` for anything else.
decode_order: Callable[[bytes], Order] = msgspec.json.Decoder(Order).decode
# The same for other documents of the driver.
decode_term = msgspec.json.Decoder(DriverTerm).decode
decode_notice = msgspec.json.Decoder(Notice).decode
decode_save = msgspec.json.Decoder(SaveRequest).decode
decode_allocation = msgspec.json.Decoder(Allocation).decode
decode_number: Callable[[bytes], int] = msgspec.json.Decoder(Count).decode


def decode(kind: type[T], data: bytes) -> T:
    """Return the document in `data`; raises `msgspec.ValidationError` for anything else."""
    return msgspec.json.decode(data, type=kind)


_decode_progress = msgspec.json.Decoder(Progress).decode


def decode_progress(data: bytes) -> Progress | None:
    """Return a worker's progress; None if it wrote something else."""
    try:
        return _decode_progress(data)
    except UNREADABLE:
        return None


class Reader:
    """Reads what keys of the driver hold, and passes over what is no document.

    A thread that waits for the driver's next word must not end because of a wrong one. `say` shows
    a sentence, once for each key.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()

    def read(self, decode: Callable[[bytes], T], key: str, data: bytes) -> T | None:
        """Return the document that a key holds; None if it is something else."""
        try:
            return decode(data)
        except UNREADABLE as error:
            if key not in self._said:
                self._said.add(key)
                self._say(f"passed over what is in {key}: it is not from our driver ({error})")
            return None
