"""What workers and agents report while the job trains: progress, measurements, printed lines.

A worker writes its `Progress` with each heartbeat. The watch over slow ranks, the job machine and
the search for the best size judge by it, and `/v1/status` shows it. Its `StepTimes` are a part of
it. An agent writes the `Usage` of its host. `Measured` and `History` are what the driver shows of
both; None: not known.

`OutputLines` are for the terminal of a driver that did not start the agent; `WorkerLines` are kept
in the run's folder, for `elasticctl logs`. Pure data; times are seconds, sizes bytes.
"""

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from elastic_driver.words.orders import Count, Host, Seconds, Text, WorkerId
from rendezvous.wire import UNREADABLE

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


class LogsTaken(Struct, frozen=True):
    """The answer to `WorkerLines`: seconds until the agent may send more."""

    wait: Seconds


MAX_NUMBERS = 8  # that a script reports
MAX_NAME_CHARS = 64  # of such a number
MAX_WORKERS = 4096  # of one agent
MAX_GPUS = 64  # of one host

Amount = Annotated[float, Meta(ge=0.0, le=1e15)]
Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Numbers = Annotated[
    dict[Annotated[str, Meta(max_length=MAX_NAME_CHARS)], float], Meta(max_length=MAX_NUMBERS)
]


class StepTimes(Struct, frozen=True):
    """The parts of a worker's last step that are known.

    `data`: waiting for the next batch; `compute`: forward, backward and the optimizer, with `data`
    where that is not known; `exchange`: from the gradients to the optimizer, waiting for other
    ranks included; `commit`: in `commit()`.
    """

    data: Amount | None = None
    compute: Amount | None = None
    exchange: Amount | None = None
    commit: Amount | None = None


class GpuUsage(Struct, frozen=True):
    """The usage of one GPU; `used` is the share of time in which it computed, 0 to 1."""

    index: Annotated[int, Meta(ge=0, le=2**31)]
    name: Annotated[str, Meta(max_length=256)]
    used: Amount
    memory_used: Bytes
    memory_total: Bytes


class WorkerUsage(Struct, frozen=True):
    """The usage of one worker's process, without its children.

    `cpu` is in cores. `memory` is resident now, `memory_peak` the most there ever was. `io_read`
    and `io_write` are bytes a second from and to storage.
    """

    cpu: Amount
    memory: Bytes
    memory_peak: Bytes | None = None
    io_read: Amount | None = None
    io_write: Amount | None = None


class Pressure(Struct, frozen=True):
    """The share of the last ten seconds in which a process waited for each, 0 to 1.

    As the kernel says it in `/proc/pressure`.
    """

    cpu: Amount | None = None
    memory: Amount | None = None
    io: Amount | None = None


class HostUsage(Struct, frozen=True, kw_only=True):
    """The usage of one host.

    `cpu` is the share of all its cores that worked, 0 to 1. Memory is that of the container, if it
    has a limit. The disk is that of `/`. `net_in` and `net_out` are bytes per second of all
    interfaces but loopback, `disk_read` and `disk_write` those of all disks.
    """

    cpu: Amount
    memory_used: Bytes
    memory_total: Bytes
    disk_used: Bytes
    disk_total: Bytes
    net_in: Amount | None = None
    net_out: Amount | None = None
    disk_read: Amount | None = None
    disk_write: Amount | None = None
    pressure: Pressure = Pressure()
    gpus: Annotated[tuple[GpuUsage, ...], Meta(max_length=MAX_GPUS)] = ()


class Usage(Struct, frozen=True):
    """The usage of a host, and of the workers of one agent on it, by their names."""

    host: HostUsage
    workers: Annotated[
        dict[Annotated[str, Meta(min_length=1, max_length=300)], WorkerUsage],
        Meta(max_length=MAX_WORKERS),
    ] = {}


class WorkerMeasured(Struct, frozen=True, kw_only=True):
    """The measurements of one worker; see `StepTimes` and `WorkerUsage`."""

    step: int  # −1: none yet
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    memory: int | None = None
    memory_peak: int | None = None
    cpu: float | None = None
    io_read: float | None = None
    io_write: float | None = None
    times: StepTimes | None = None


class Measured(Struct, frozen=True, kw_only=True):
    """The present measurements: the entry `measured` of `/v1/status`.

    `step` is the furthest step, and `total` the steps in all if the script said so. `samples` are
    those of all workers, also of steps that were done again. `numbers` are what rank 0 has
    reported.
    """

    step: int = 0
    total: int | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    samples: int = 0
    numbers: dict[str, float] = {}
    workers: dict[str, WorkerMeasured] = {}
    hosts: dict[str, HostUsage] = {}


class History(Struct, frozen=True, kw_only=True):
    """The last hour, oldest first; the n-th entries of all lists belong to one moment.

    `t` is in unix seconds, `step_time` the seconds of a step.
    """

    t: list[float] = []
    step: list[int] = []
    steps_per_s: list[float | None] = []
    samples_per_s: list[float | None] = []
    world_size: list[int] = []
    step_time: list[float | None] = []


# Return an agent's usage; raises `msgspec.ValidationError` for anything else.
decode_usage: Callable[[bytes], Usage] = msgspec.json.Decoder(Usage).decode


MAX_SAMPLES = 64  # of measured steps in one message
MAX_LINKS = 16  # in one message
MAX_MARKS = 16  # in one message
MAX_DIGEST_CHARS = 32
MAX_BUFFERS = 64  # groups of buffers that are compared
BUFFERS_DIGEST_CHARS = 8
BUFFERS_OF = "buffers of "  # begins the names of their leaves
ODD_STEPS = 8  # of an optimizer without a commit, before anything is said
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


class StateMark(Struct, frozen=True, array_like=True):
    """A rank's state after `step` committed steps, as a `digest` (hex) of everything it keeps.

    All ranks mark the same steps, and ranks that hold the same state have the same digest.
    `buffers`: one behind the other, the digests of groups of floating-point buffers, of which
    nobody knows whether all ranks have them alike.
    """

    step: Count
    digest: Annotated[str, Meta(min_length=1, max_length=MAX_DIGEST_CHARS)]
    buffers: Annotated[str, Meta(max_length=MAX_BUFFERS * BUFFERS_DIGEST_CHARS)] = ""


Marks = Annotated[tuple[StateMark, ...], Meta(max_length=MAX_MARKS)]


class Progress(Struct, frozen=True):
    """A worker's progress: `step` committed steps in all, seconds for one, in round `round`.

    `samples` are its last measured steps, oldest first; each is sent several times. `division`: its
    part of a fixed batch, if the driver gives the shares. `links`: its connections to other hosts,
    if it has any. `marks`: the newest ones of this round, oldest first; each is sent several times.
    `commits` and `optimizer_steps`: of this process in this round.

    The other fields are only shown (`words.progress`). `at`: the time of the last step by the
    worker's own clock. `steps_done`, `samples_done`: of this process since it started. `numbers`,
    `total`: what `report_progress` got last, and the number of all steps. `reported`: the step that
    it named last, or the steps of its optimizers, in a round without commits. `micro_batches`:
    those of a step of a `FixedBatch`, and `batch` its samples. `parameters`: of the models of the
    state. `gradients`: measured in the last steps, where `--auto-scale` needs them.

    `checks`: of changes of the hosts, in this round. `boundary_time`: seconds from a commit or
    check to the next one, 0 if that is not known yet; `since`: seconds since the last one.
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
    marks: Marks = ()
    commits: Count = 0
    optimizer_steps: Count = 0
    checks: Count = 0
    boundary_time: Seconds = 0.0
    since: Seconds = 0.0


_decode_progress = msgspec.json.Decoder(Progress).decode


def decode_progress(data: bytes) -> Progress | None:
    """Return a worker's progress; None if it wrote something else."""
    try:
        return _decode_progress(data)
    except UNREADABLE:
        return None
