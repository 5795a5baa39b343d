"""The measurements of hosts, workers and the job, as they travel and as `/v1/status` shows them.

A worker's `StepTimes` are part of its `Progress`, and an agent writes the `Usage` of its host.
`Measured` and `History` are what the driver shows of them. None: not known. Pure data; times are
seconds, sizes bytes.
"""

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

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
