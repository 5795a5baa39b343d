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
from typing import NamedTuple

from elastic_driver import contract
from elastic_driver.core.documents import Progress, World
from elastic_driver.core.measured import History, Measured, Usage, WorkerMeasured, decode_usage
from rendezvous.wire import UNREADABLE, Entry

LOOK_S = 1.0  # between two looks at the workers' progress
SHARE = 50.0  # the wait after a look is at least this many times as long as the look
USAGE_S = 2.0  # between two looks at the usage of hosts; agents sample it less often
WINDOW = 6  # looks from which a speed is computed
QUIET_S = 5.0  # without a new step, and three times the step time, after which the speed is 0
NEW, MERGED, OLD = 300, 10, 330  # moments of a second; how many become one; how many of those


class _Point(NamedTuple):
    """A worker's last step: the time by its clock, its steps and its samples until then."""

    at: float
    steps: int
    samples: int


class _Speed:
    """The speed of one worker in one round."""

    def __init__(self, round_id: int) -> None:
        self.round = round_id
        self.counted = 0  # samples that are in the sum of the job
        self._points: deque[_Point] = deque(maxlen=WINDOW)
        self._seen = 0.0  # when the newest point was

    def take(self, progress: Progress, now: float) -> None:
        if not self._points or progress.at > self._points[-1].at:
            self._points.append(_Point(progress.at, progress.steps_done, progress.samples_done))
            self._seen = now

    def of(self, progress: Progress, now: float) -> tuple[float | None, float | None]:
        """Return steps and samples per second; None: not known yet, or none are reported."""
        if not self._points:
            return None, None
        first, last = self._points[0], self._points[-1]
        if now - self._seen > QUIET_S + 3 * progress.step_time:
            return 0.0, (0.0 if last.samples else None)
        if last.at <= first.at:
            return None, None
        passed = last.at - first.at
        samples = (last.samples - first.samples) / passed if last.samples else None
        return (last.steps - first.steps) / passed, samples


class _Moment(NamedTuple):
    """The job at one moment; `t` in unix seconds."""

    t: float
    step: int
    steps_per_s: float | None
    samples_per_s: float | None
    world_size: int
    step_time: float | None


class Measurements:
    """The measurements of one job. The driver's thread calls all methods but the two named."""

    def __init__(self) -> None:
        self.due: float | None = None  # the time of the next look; None: the job has not begun
        self._usage_due = 0.0
        self._usage_keys: dict[str, str] = {}  # by host
        self._read: Mapping[str, Entry] = {}  # replaced as a whole, by any thread
        self._usage: dict[str, tuple[int, Usage]] = {}  # by key, with the revision
        self._world = World(0, (), "no round is complete yet")
        self._ranks: list[str] = []  # its workers
        self._speeds: dict[str, _Speed] = {}
        self._progress: dict[str, Progress] = {}  # in the order of ranks
        self._rates: dict[str, tuple[float | None, float | None]] = {}
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
        self._progress = {worker: progress[worker] for worker in self._ranks if worker in progress}
        samples = self._measured.samples
        speeds, self._speeds = self._speeds, {}
        for worker, each in self._progress.items():
            speed = speeds.get(worker)
            if speed is None or speed.round != each.round:
                speed, before = _Speed(each.round), speed
                speed.counted = 0 if before is None else before.counted
            speed.take(each, now)
            samples += max(0, each.samples_done - speed.counted)
            speed.counted = max(speed.counted, each.samples_done)
            self._speeds[worker] = speed
        self._rates = {w: self._speeds[w].of(each, now) for w, each in self._progress.items()}
        self._measured = self._sum_up(samples)
        self._remember(unix, size)

    def looked(self, now: float, began: float) -> None:
        """Plan the next look after one that began then."""
        self.due = now + max(LOOK_S, SHARE * (now - began))

    def usage_keys(self, now: float, agents: Iterable[tuple[str, int]]) -> tuple[str, ...]:
        """Return the keys to read for `usage_read`, none if it is too early.

        `agents` are hosts and incarnations.
        """
        if now < self._usage_due:
            return ()
        self._usage_due = now + USAGE_S
        self._usage_keys = {host: contract.agent_usage(host, number) for host, number in agents}
        return tuple(self._usage_keys.values())

    def usage_read(self, entries: Mapping[str, Entry]) -> None:
        """Take in the values of `usage_keys`; any thread may call this."""
        self._read = entries

    def _sum_up(self, samples: int) -> Measured:
        progress = self._progress.values()
        steps = [rate for rate, _ in self._rates.values() if rate is not None]
        sampled = [rate for _, rate in self._rates.values() if rate is not None]
        furthest = max([0, *(_step(each) for each in progress)])
        return Measured(
            step=max(furthest, self._measured.step if not progress else 0),
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

    def history(self, since: float = 0.0) -> History:
        """Return the moments after `since` (unix seconds); any thread may call this."""
        with self._lock:
            moments = [moment for moment in (*self._old, *self._new) if moment.t > since]
        columns = zip(*moments, strict=True) if moments else [()] * len(_Moment._fields)
        return History(**{n: [*c] for n, c in zip(_Moment._fields, columns, strict=True)})

    # ---- now -------------------------------------------------------------------------------

    def document(self) -> Measured:
        """Return the entry `measured` of the status."""
        usage = {host: found for host, key in self._usage_keys.items() if (found := self._of(key))}
        used = {
            worker: each
            for host, found in usage.items()
            for worker, each in found.workers.items()
            if contract.host_of_worker(worker) == host
        }
        now, workers = self._measured, {}
        for worker in {**self._progress, **used}:
            each, resources = self._progress.get(worker), used.get(worker)
            steps, samples = self._rates.get(worker, (None, None))
            workers[worker] = WorkerMeasured(
                step=-1 if each is None else _step(each),
                steps_per_s=steps,
                samples_per_s=samples,
                memory=None if resources is None else resources.memory,
                cpu=None if resources is None else resources.cpu,
                times=None if each is None else each.times,
            )
        return Measured(
            step=now.step,
            total=now.total,
            steps_per_s=now.steps_per_s,
            samples_per_s=now.samples_per_s,
            samples=now.samples,
            numbers=now.numbers,
            workers=workers,
            hosts={host: found.host for host, found in usage.items()},
        )

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


def _step(progress: Progress) -> int:
    return max(progress.step, -1 if progress.reported is None else progress.reported)


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
