"""What an algorithm of the Brain gets, and what it returns.

An algorithm is a function that takes a `View` and returns a `Plan`, named by an entry point of the
group `elastic_driver.algorithms`. It is pure: it reads no clock, file or network, and the same view
gives the same plan. It runs in a process of its own, which is killed when it takes too long.

A host may have as many workers of a job as its memory, its processors and a user's plan allow. The
plan is a firm limit, and so is the memory for a job of which a worker has run out of it. A host
with less memory than similar jobs took, or with too few processors for more workers, is only to be
spared: such a wish does not count if the job could not train else.

Pure. Times are unix seconds, durations seconds, memory is bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from elastic_driver.arithmetic import lowered
from elastic_driver.words import counted

GROUP = "elastic_driver.algorithms"  # of the entry points
BUILT_IN = "fair"  # the name of the algorithm that is used if no other is named
LIMIT_S = 5.0  # for one plan
MEMORY = 4 * 2**30  # bytes of the process of an algorithm


class SpeedAt(Struct, frozen=True, kw_only=True):
    """The measured speed of a job with `size` workers on `hosts` hosts.

    `step_time`: seconds of a step. `error`: the confidence interval on each side, as a share of it.
    """

    size: int
    hosts: int
    step_time: float
    error: float = 0.0


class JobView(Struct, frozen=True, kw_only=True):
    """A job that is not over.

    `size` is the present number of workers (0: it waits), `at` says where they are. `least`,
    `most`: the limits of its size; None: no limit. `held`: the size that a user asked for, which
    outranks everything. `changes`: how often its size was changed; `change_cost`: the seconds that
    one such change costs. `micro_batches`: into which a step of a fixed batch is divided; None:
    each worker brings a batch of its own, so a step of twice the workers does twice the work, less
    what a sample of a larger batch teaches by `noise` (`features.sizes.search`; None: not known).
    `measured`: whether the speed at the present size and place is among `speeds`.
    `unchanged_for`: the seconds since its size was changed.
    `memory`: the bytes that one worker should find; None: not known. `room`: once a worker has run
    out of memory, the most workers for which hosts have it. `planned`: the most workers of hosts by
    a user's plan. No plan of ours may have more; hosts that are missing were not tried. `starved`:
    the most workers of hosts whose processors are too few for more; a plan may have more, if the
    job could not train else.
    """

    name: str
    arrived: float
    least: int
    most: int | None = None
    weight: float = 1.0
    held: int | None = None
    size: int = 0
    at: dict[str, int] = {}
    age: float = 0.0
    changes: int = 0
    change_cost: float = 0.0
    measured: bool = False
    unchanged_for: float = 0.0
    speeds: tuple[SpeedAt, ...] = ()
    micro_batches: int | None = None
    noise: float | None = None
    memory: int | None = None
    room: dict[str, int] = {}
    planned: dict[str, int] = {}
    starved: dict[str, int] = {}


class HostView(Struct, frozen=True, kw_only=True):
    """A host of the Brain. `cpu`: the part of its processors in use; `memory_free` is in bytes.

    `idle`: its slots without a worker of anybody, as they were measured. Figures older than 30 s
    are absent, as are those that nobody measures.
    """

    name: str
    slots: int
    cpu: float | None = None
    memory_free: int | None = None
    idle: int | None = None


class View(Struct, frozen=True, kw_only=True):
    """All jobs, in order of arrival, and all usable hosts. `triggers`: why a plan is asked for."""

    now: float
    triggers: tuple[str, ...]
    jobs: tuple[JobView, ...]
    hosts: tuple[HostView, ...]

    @property
    def event(self) -> str:
        """The triggers in one line, as in "job arrived, slots freed"."""
        return ", ".join(self.triggers)


class Plan(Struct, frozen=True, kw_only=True):
    """The workers of each job on each host, and why; a job that is not named waits.

    `reasons` may say more about single jobs.
    """

    workers: dict[str, dict[str, int]]
    reason: str
    reasons: dict[str, str] = {}


Algorithm: TypeAlias = Callable[[View], Plan]


def faults(view: View, plan: Plan) -> list[str]:
    """Return a phrase for each limit that a plan does not respect; none: it may be carried out."""
    slots = {host.name: host.slots for host in view.hosts}
    jobs = {job.name: job for job in view.jobs}
    used = dict.fromkeys(slots, 0)
    found = []
    for name, workers in plan.workers.items():
        job = jobs.get(name)
        if job is None:
            found.append(f"there is no job {name!r}")
            continue
        for host, count in workers.items():
            if host not in slots or count < 0:
                found.append(f"{name}: {counted(count, 'worker')} on {host!r}")
            elif count > (most := min(job.room.get(host, count), job.planned.get(host, count))):
                found.append(f"{name}: {counted(count, 'worker')} on {host}, allowed are {most}")
            else:
                used[host] += count
        size = sum(workers.values())
        most = size if job.most is None else job.most
        if size and not job.least <= size <= most:
            allowed = f"{job.least} to {job.most or 'all'}"
            found.append(f"{name}: {counted(size, 'worker')}, allowed are {allowed}")
    for host, count in used.items():
        if count > slots[host]:
            found.append(f"{host}: {counted(count, 'worker')} on {counted(slots[host], 'slot')}")
    return found


# ---- the workers of a job that a host may have ---------------------------------------------


def firm_slots(job: JobView, hosts: Sequence[HostView], slots: Mapping[str, int]) -> dict[str, int]:
    """Return the most workers of a job that each host may have: of its slots, what is allowed."""
    return lowered(slots, memory_limits(job, hosts), job.planned)


def wished_slots(
    job: JobView, hosts: Sequence[HostView], slots: Mapping[str, int]
) -> dict[str, int]:
    """Return the most workers that each host should have, if the job can train with them."""
    return lowered(slots, {} if job.room else _by_memory(job, hosts), job.starved)


def memory_limits(job: JobView, hosts: Sequence[HostView]) -> dict[str, int]:
    """Return the most workers by host, for a job of which a worker has run out of memory."""
    return _by_memory(job, hosts) | job.room if job.room else {}


def _by_memory(job: JobView, hosts: Sequence[HostView]) -> dict[str, int]:
    """Return how many workers have the memory on the hosts whose idle memory is known."""
    return {
        host.name: job.at.get(host.name, 0) + host.memory_free // job.memory
        for host in hosts
        if job.memory and host.memory_free is not None
    }


def too_small(
    job: JobView, hosts: Sequence[HostView], others: Mapping[str, int]
) -> tuple[str, int] | None:
    """Return the largest host, with its idle memory, if all have the memory for too few workers.

    `others`: slots that other jobs use; their hosts may have more idle memory later. The host is ""
    if the memory of none is known.
    """
    limits = memory_limits(job, [host for host in hosts if not others.get(host.name)])
    lacks = {host: room for host, room in limits.items() if not others.get(host)}
    if sum(lowered({host.name: host.slots for host in hosts}, lacks).values()) >= job.least:
        return None
    known = {host.name: host.memory_free for host in hosts if host.memory_free is not None}
    largest = max(known, key=known.__getitem__, default="")
    return largest, known.get(largest, 0)
