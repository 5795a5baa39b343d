"""How fast the job trains, what its workers and hosts use, and how that was in the last hour.

About once a second the driver's thread hands in the workers' progress, which the watch over slow
ranks has read already, and now and then it reads what the agents have written about their hosts.
A worker's progress carries the time of its last step by the worker's own clock, so speeds are
exact although messages are up to seconds old. Nothing here decides anything. The last five minutes
are kept in seconds, what is older in steps of ten. Times are seconds.
"""

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import NamedTuple, TypeAlias

from msgspec.structs import asdict, replace

from elastic_driver import contract
from elastic_driver.runtime.driver_parts import steps_of
from elastic_driver.words.orders import World
from elastic_driver.words.progress import (
    History,
    Measured,
    Progress,
    Usage,
    WorkerMeasured,
    decode_usage,
)
from rendezvous.wire import UNREADABLE, Entry

LOOK_S = 1.0  # between two looks at the workers' progress
SHARE = 200.0  # a look comes after at least this many times the processor time of the last one
MOST_RECORDED = 1000  # workers of a job; those of a larger one are not recorded
USAGE_S, MOST_USAGE_S = 1.0, 5.0  # between two looks at the usage of hosts, which agents sample
WORKERS_PER_S = 200.0  # whose usage is looked at; of a larger job less often
WINDOW = 6  # looks from which a speed is computed
QUIET_S = 5.0  # without a new step, and three times the step time, after which the speed is 0
NEW, MERGED, OLD = 300, 10, 330  # new moments; how many become an old one; how many of those
MOST_LEFT = 10_000  # workers that have left, whose samples are known
KEPT_S = 3600.0  # the age of the oldest moment


# A worker's last step: the time by its clock, its steps and its samples until then.
_Point: TypeAlias = tuple[float, int, int]


class _Speed:
    """The speed of one worker in one round: steps and samples per second, None if not known.

    It is computed when a new step is seen; there may be ten thousand of these.
    """

    __slots__ = ("counted", "newest", "points", "quiet_at", "samples_per_s", "steps_per_s")

    def __init__(self, counted: int = 0) -> None:
        self.counted = counted  # samples that are in the sum of the job
        self.newest: Progress | None = None
        self.points: deque[_Point] = deque(maxlen=WINDOW)
        self.quiet_at = 0.0  # without a new step until then, the speed is 0
        self.steps_per_s: float | None = None
        self.samples_per_s: float | None = None

    def take(self, progress: Progress, now: float) -> int:
        """Take in newer progress; return how many samples are new."""
        self.newest, points = progress, self.points
        at, done = progress.at, progress.samples_done
        new, self.counted = max(0, done - self.counted), max(done, self.counted)
        if points and at <= points[-1][0]:
            return new
        points.append((at, progress.steps_done, done))
        self.quiet_at = now + QUIET_S + 3 * progress.step_time
        first_at, first_step, first_sample = points[0]
        if at > first_at:
            self.steps_per_s = (progress.steps_done - first_step) / (at - first_at)
            if done:
                self.samples_per_s = (done - first_sample) / (at - first_at)
        return new

    def at(self, now: float) -> tuple[float | None, float | None]:
        """Return steps and samples per second now."""
        if now < self.quiet_at or self.steps_per_s is None:
            return self.steps_per_s, self.samples_per_s
        return 0.0, None if self.samples_per_s is None else 0.0


class _Moment(NamedTuple):
    """The job at one moment; `t` in unix seconds."""

    t: float
    step: int
    steps_per_s: float | None
    samples_per_s: float | None
    world_size: int
    step_time: float | None


class Measurements:
    """The measurements of one job. The driver's thread calls all methods but `history`."""

    def __init__(self) -> None:
        self.due: float | None = None  # the time of the next look; None: the job has not begun
        self._usage_due = 0.0
        self._usage_keys: dict[str, str] = {}  # by host
        self._read: Mapping[str, Entry] = {}
        self._usage: dict[str, tuple[int, Usage]] = {}  # by key, with the revision
        self._world = World(0, (), "no round is complete yet")
        self._ranks: list[str] = []  # its workers
        self._speeds: dict[str, _Speed] = {}
        self._counted: dict[str, int] = {}  # samples of workers that have left: they may return
        self._progress: dict[str, Progress] = {}  # in the order of ranks
        self._now = 0.0  # the time of the last look
        self._measured = Measured()  # without workers and hosts
        self._lock = threading.Lock()  # for the next two
        self._new: deque[_Moment] = deque()
        self._old: deque[_Moment] = deque(maxlen=OLD)

    # ---- looks -----------------------------------------------------------------------------

    def take(
        self, now: float, unix: float, world: World, progress: Mapping[str, Progress], size: int
    ) -> None:
        """Take in the newest progress of the workers of a round; `size` of them train now."""
        if world is not self._world:
            self._world, self._ranks = world, [member.worker for member in world.members]
            self._let_go(set(self._speeds) - set(self._ranks))
        self._progress = {worker: progress[worker] for worker in self._ranks if worker in progress}
        samples, self._now = self._measured.samples, now
        before, self._speeds = self._speeds, {}
        for worker, each in self._progress.items():
            speed = before.get(worker)
            if speed is None or speed.newest is not each:
                if speed is None:
                    speed = _Speed(self._counted.pop(worker, 0))
                elif speed.newest is not None and speed.newest.round != each.round:
                    speed = _Speed(speed.counted)
                samples += speed.take(each, now)
            self._speeds[worker] = speed
        self._measured = self._sum_up(samples)
        self._remember(unix, size)

    def _let_go(self, workers: Iterable[str]) -> None:
        for worker in workers:
            self._counted[worker] = self._speeds[worker].counted
        for worker in list(self._counted)[:-MOST_LEFT]:
            del self._counted[worker]

    def looked(self, now: float, spent: float) -> None:
        """Plan the next look after one that began now and took so much processor time."""
        self.due = now + max(LOOK_S, SHARE * spent)

    def recorded(self, now: float, spent: float) -> None:
        """Put the next look off if a record that was made now took much processor time."""
        self.due = max(self.due or 0.0, now + SHARE * spent)

    def usage_keys(self, now: float, agents: Iterable[tuple[str, int]]) -> tuple[str, ...]:
        """Return the keys to read for `usage_read`, none if it is too early.

        `agents` are hosts and incarnations.
        """
        if now < self._usage_due:
            return ()
        each = max(USAGE_S, min(len(self._ranks) / WORKERS_PER_S, MOST_USAGE_S))
        self._usage_due = now + each
        self._usage_keys = {host: contract.agent_usage(host, number) for host, number in agents}
        return tuple(self._usage_keys.values())

    def usage_read(self, entries: Mapping[str, Entry]) -> None:
        """Take in the values of `usage_keys`."""
        self._read = entries

    def _sum_up(self, samples: int) -> Measured:
        progress = self._progress.values()
        rates = [speed.at(self._now) for speed in self._speeds.values()]
        steps = [rate for rate, _ in rates if rate is not None]
        sampled = [rate for _, rate in rates if rate is not None]
        furthest = max(map(steps_of, progress), default=0)
        return Measured(
            step=max(furthest, 0) if progress else self._measured.step,
            total=max((e.total for e in progress if e.total is not None), default=None),
            steps_per_s=median(steps) if steps else None,
            samples_per_s=sum(sampled) if sampled else None,
            samples=samples,
            numbers=next((each.numbers for each in progress if each.numbers), {}),
        )

    # ---- the last hour ---------------------------------------------------------------------

    def _remember(self, unix: float, size: int) -> None:
        here = (each for each in self._progress.values() if each.round == self._world.round)
        times = [each.step_time for each in here if each.step_time > 0]
        now, step_time = self._measured, median(times) if times else None
        moment = _Moment(unix, now.step, now.steps_per_s, now.samples_per_s, size, step_time)
        with self._lock:
            self._new.append(moment)
            if len(self._new) > NEW:
                self._old.append(_merged([self._new.popleft() for _ in range(MERGED)]))
            while self._old and self._old[0].t < unix - KEPT_S:
                self._old.popleft()

    def history(self, since: float = 0.0) -> History:
        """Return the moments after `since` (unix seconds); any thread may call this."""
        with self._lock:
            moments = [moment for moment in (*self._old, *self._new) if moment.t > since]
        columns = zip(*moments, strict=True) if moments else [()] * len(_Moment._fields)
        return History(**{n: [*c] for n, c in zip(_Moment._fields, columns, strict=True)})

    # ---- now -------------------------------------------------------------------------------

    @property
    def job(self) -> Measured:
        """The job as a whole, without workers and hosts; any thread may ask."""
        return self._measured

    def record(self) -> Measured:
        """Return what statistics keep once the usage was read."""
        found = self.document()
        return found if len(found.workers) <= MOST_RECORDED else replace(found, workers={})

    def document(self) -> Measured:
        """Return the entry `measured` of the status."""
        usage = {host: found for host, key in self._usage_keys.items() if (found := self._of(key))}
        used = {
            worker: each
            for host, found in usage.items()
            for worker, each in found.workers.items()
            if contract.host_of_worker(worker) == host
        }
        workers = {}
        for worker in {**self._progress, **used}:
            each, resources = self._progress.get(worker), used.get(worker)
            speed = self._speeds.get(worker)
            steps, samples = (None, None) if speed is None else speed.at(self._now)
            workers[worker] = WorkerMeasured(
                step=-1 if each is None else steps_of(each),
                steps_per_s=steps,
                samples_per_s=samples,
                times=None if each is None else each.times,
                **({} if resources is None else asdict(resources)),
            )
        hosts = {host: found.host for host, found in usage.items()}
        return replace(self._measured, workers=workers, hosts=hosts)

    def idle_memory(self) -> tuple[tuple[str, int], ...]:
        """Return the hosts whose idle memory is known, with it in bytes."""
        hosts = self.document().hosts
        return tuple((host, max(h.memory_total - h.memory_used, 0)) for host, h in hosts.items())

    def _of(self, key: str) -> Usage | None:
        """Return the usage under a key; None if there is none, or something else."""
        entry = self._read.get(key)
        if entry is None:
            self._usage.pop(key, None)
            return None
        revision, usage = self._usage.get(key, (0, None))
        if revision == entry.revision:
            return usage
        try:
            usage = decode_usage(entry.value)
        except UNREADABLE:
            return None
        self._usage[key] = entry.revision, usage
        return usage


def _merged(moments: list[_Moment]) -> _Moment:
    """Return one moment for several: the last, with the mean of every speed and time."""
    return moments[-1]._replace(
        steps_per_s=_mean([moment.steps_per_s for moment in moments]),
        samples_per_s=_mean([moment.samples_per_s for moment in moments]),
        step_time=_mean([moment.step_time for moment in moments]),
    )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
