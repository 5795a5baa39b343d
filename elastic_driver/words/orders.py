"""What the driver writes for workers and agents: documents, orders, and the job's specification.

The job machine makes worlds, notices, save requests and orders; the driver's process writes them to
keys, which are named in `elastic_driver.contract`. The launcher writes `JobSpec`, and agents run
workers by it. The types of fields that several kinds of messages have, with their bounds, are here,
too. Pure data (JSON by msgspec).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from elastic_driver.options import (
    BIND,
    FLAG,
    NUMBERS,
    PORTS,
    STREAMS,
    Heading,
    names,
    option,
    text,
    whole,
    whole_or,
)
from elastic_driver.words.world import Member, Members, Roster, SlotInfo, roster_of
from rendezvous.wire import UNREADABLE

Host = Annotated[str, Meta(min_length=1, max_length=253)]
WorkerId = Annotated[str, Meta(min_length=1, max_length=300)]
Text = Annotated[str, Meta(max_length=65536)]
LongText = Annotated[str, Meta(max_length=1 << 20)]  # its reader keeps a part
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]


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
    tee: str | None = option(Heading.OUTPUT, STREAMS, None,
        "With --log-dir: streams that go both to the terminal and to files.", aliases=("-t",),
        shown="those that are not redirected")
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
    ports: tuple[int, int] | None = option(Heading.START, PORTS, None,
        "Listen at these ports only, on all hosts: rendezvous, probes, torch's stores, gloo, "
        "TensorFlow. 64 are enough for hosts of 8 workers (docs/firewalls.md).",
        shown="any free ports")
    bind: str = option(Heading.START, BIND, "none",
        "Bind each worker to processors. numa: those of the NUMA node of its GPU, or its part of "
        "the nodes; core: cores of its own there (docs/binding.md).",
        aliases=("--numa-binding", "--bind-to", "-bind-to"))
    virtual_local_rank: bool = option(Heading.START, FLAG, False,
        "Each worker sees only the GPU of its slot, and its LOCAL_RANK is 0 (as in torchrun).")
    verify_state: bool = option(Heading.POLICY, FLAG, True,
        "Compare what the ranks keep after every change of the world, and every so many commits "
        "(docs/verify-state.md), or do not.", shown="on")
    rehearse: bool = True  # a warm parent takes a tiny training step
    devices_of_a_worker: int = 1  # with virtual_local_rank
    slot_ports: int = 0  # free ports that each agent offers for its workers' servers
# fmt: on


class DriverTerm(Struct, frozen=True):
    """The driver of the run: its term (1 for the first one), and the URL of its rendezvous."""

    term: Annotated[int, Meta(ge=1, le=2**20)]
    url: Annotated[str, Meta(min_length=1, max_length=1000)]


class World(Struct, frozen=True):
    """A complete round: its members, ordered by rank. It travels as a `WorldDocument`.

    `repair`: the ranks held different states, so all take over that of rank 0. `gone`: the steps,
    about, that were committed in a state that no member holds, 0 if there is none; `anew`: training
    may begin anew then.
    """

    round: int
    members: Sequence[Member]
    reason: str
    repair: bool = False
    gone: int = 0
    anew: bool = False

    @property
    def size(self) -> int:
        """The number of workers."""
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
    repair: bool = False
    gone: int = 0
    anew: bool = False


def encode_world(world: World) -> bytes:
    """Return the bytes of `job/world`."""
    roster = roster_of(world.members)
    facts = world.repair, world.gone, world.anew
    return encode(WorldDocument(world.round, world.reason, roster, *facts))


# Made now: threads that use a type for the first time together crash in msgspec.
_decode_world = msgspec.json.Decoder(WorldDocument).decode


def decode_world(data: bytes) -> World:
    """Return the world in these bytes; raises `ValueError` if they hold none."""
    document = _decode_world(data)
    members = Members(document.roster)
    facts = document.repair, document.gone, document.anew
    return World(document.round, members, document.reason, *facts)


_decode_place = msgspec.json.Decoder(SlotInfo).decode


def decode_place(data: bytes) -> SlotInfo:
    """Return the place in these bytes; raises `ValueError` if they hold none."""
    return _decode_place(data)


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


class Allocation(Struct, frozen=True):
    """The micro-batches of each rank of round `round`, from the step on which the ranks agree."""

    round: int
    shares: tuple[int, ...]
    reason: str


class StateQuestion(Struct, frozen=True):
    """Describe every leaf of your state after `step`, a marked step of round `round`.

    The ranks hold different states, and these `workers` hold one of them each. The answer is
    `events.StateDescribed`.
    """

    round: int
    step: int
    workers: tuple[str, ...]


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
    slots: int = 0  # of the host, whose processors they share; 0: not known


class StopWorkerOrder(Struct, frozen=True, tag="stop_worker"):
    """Send SIGTERM to the worker's whole group, and SIGKILL after `grace` seconds (0: at once)."""

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
    """Stop every worker as StopWorkerOrder does, report their exits, then exit 0.

    `interrupt`: they get SIGINT first, as from a terminal.
    """

    grace: float
    reason: str
    interrupt: bool = False


class StacksOrder(Struct, frozen=True, tag="stacks"):
    """Report the stack of every worker of this host, as seen from outside (`job.hangs`)."""

    number: int  # of the question; the answer repeats it


Order = StartWorkerOrder | StopWorkerOrder | RanksOrder | ShutdownOrder | StacksOrder


class LoginCode(Struct, frozen=True):
    """A code with which one browser may log in, within `seconds` from now."""

    code: str
    seconds: float


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
decode_question = msgspec.json.Decoder(StateQuestion).decode
decode_number: Callable[[bytes], int] = msgspec.json.Decoder(Count).decode


def decode(kind: type[T], data: bytes) -> T:
    """Return the document in `data`; raises `msgspec.ValidationError` for anything else."""
    return msgspec.json.decode(data, type=kind)


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
