"""Recorded jobs, played through an algorithm: what it would have made of them. Pure.

`recorded_jobs` reads the jobs from a database, `play` plays them, and two algorithms are shown
against what has happened.

Each job is there from its recorded beginning to its recorded end. At a size that was measured it is
as fast as it was then; at another one as fast as the model of the step time says, and that size is
marked as extrapolated. The algorithm sees a speed once its job has trained for some steps at that
size, as in life. The same jobs, hosts and algorithm give the same result. Times are seconds.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean
from typing import NamedTuple, Protocol

from elastic_driver.brain.algorithm import Algorithm, HostView, JobView, SpeedAt, View, faults
from elastic_driver.brain.store.records import HOUR, JOB, MINUTE, JobKey, Record, Row, work_of
from elastic_driver.features.sizes.gauge import LEAST_STEPS, WARM_UP_S, WARM_UP_STEPS
from elastic_driver.features.sizes.search import Layout, fit
from elastic_driver.words import aligned, counted

CHANGE_S = 0.3  # lost by a change of the size or the hosts
AGAIN_S = 61.0  # after the last event, for algorithms that leave a job alone for some time


class Recorded(NamedTuple):
    """A job that was recorded.

    `trained`: its batches; without a fixed batch, those of all its workers together. `samples`: of
    one such batch; None: not known.
    """

    name: str
    began: float
    ended: float
    record: Record
    trained: float
    samples: float | None = None


class Played(NamedTuple):
    """A job as an algorithm played it. `extrapolated`: sizes, with their hosts, not measured."""

    name: str
    trained: float
    changes: int
    extrapolated: tuple[tuple[int, int], ...]


class Outcome(NamedTuple):
    """All jobs as an algorithm played them; `refused`: its plans that broke a limit, and why."""

    jobs: tuple[Played, ...]
    refused: tuple[str, ...]


def best_possible(job: Recorded, slots: int) -> float:
    """Return what a job trains alone on all slots, at its fastest measured size all the time."""
    rates = [job.record.rate(each) for each in job.record.speeds if each.size <= slots]
    return max(rates, default=0.0) * (job.ended - job.began)


def play(jobs: Sequence[Recorded], hosts: Sequence[HostView], algorithm: Algorithm) -> Outcome:
    """Return what an algorithm makes of jobs that were measured, on these hosts."""
    return _Play(jobs, hosts, algorithm).run()


@dataclass
class _Job:
    """A job while it is played."""

    of: Recorded
    at: dict[str, int] = field(default_factory=dict)
    trained: float = 0.0
    age: float = 0.0
    changes: int = 0
    since: float = 0.0  # when it came to the present size
    seen: dict[tuple[int, int], SpeedAt] = field(default_factory=dict)
    guessed: dict[tuple[int, int], float] = field(default_factory=dict)  # step times of the model

    @property
    def size(self) -> int:
        return sum(self.at.values())

    @property
    def place(self) -> tuple[int, int]:
        """The size, and the number of hosts."""
        return self.size, len(self.at)

    def step_time(self) -> float:
        """Return the seconds of a step at the present place, from the record or the model."""
        size, hosts = self.place
        for each in self.of.record.speeds:
            if (each.size, each.hosts) == (size, hosts):
                return each.step_time
        if (size, hosts) not in self.guessed:
            self.guessed[size, hosts] = _by_model(self.of.record, size, hosts)
        return self.guessed[size, hosts]

    def known_at(self) -> float:
        """Return the time at which the speed at the present place is measured."""
        if not self.size or self.place in self.seen:
            return inf
        step_time = self.step_time()
        warm_up = max(WARM_UP_S, WARM_UP_STEPS * step_time)
        return self.since + CHANGE_S + warm_up + LEAST_STEPS * step_time

    def train(self, begin: float, end: float) -> None:
        """Train at the present place from a time until another one."""
        if self.size:
            worked = max(0.0, end - max(begin, self.since + CHANGE_S))
            work = work_of(self.size, self.of.record.micro_batches)
            self.trained += work * worked / self.step_time()
            self.age += end - begin

    def go_to(self, at: Mapping[str, int], now: float) -> None:
        """Go to other slots."""
        new = {host: count for host, count in at.items() if count}
        if new != self.at:
            self.changes += bool(self.at) and bool(new)
            self.at, self.since = new, now

    def view(self, now: float) -> JobView:
        record = self.of.record
        return JobView(
            name=self.of.name,
            arrived=self.of.began,
            least=record.least,
            most=record.most,
            size=self.size,
            at=self.at,
            age=self.age,
            changes=self.changes,
            change_cost=CHANGE_S if self.changes else 0.0,
            measured=self.place in self.seen,
            unchanged_for=now - self.since,
            speeds=tuple(self.seen[key] for key in sorted(self.seen)),
            micro_batches=record.micro_batches,
            memory=record.memory,
        )


class _Play:
    """One algorithm with all jobs."""

    def __init__(
        self, jobs: Sequence[Recorded], hosts: Sequence[HostView], algorithm: Algorithm
    ) -> None:
        ordered = sorted(jobs, key=lambda job: (job.began, job.name))
        self._coming = [_Job(job, since=job.began) for job in ordered]
        self._hosts, self._algorithm = tuple(hosts), algorithm
        self._here: list[_Job] = []
        self._over: list[_Job] = []
        self._refused: list[str] = []
        self._now = self._coming[0].of.began if self._coming else 0.0
        self._again = inf

    def run(self) -> Outcome:
        """Play until all jobs are over."""
        while self._coming or self._here:
            event = self._go_on()
            if event and self._here:
                self._plan(event)
        ordered = sorted(self._over, key=lambda job: (job.of.began, job.of.name))
        played = [
            Played(job.of.name, job.trained, job.changes, tuple(sorted(job.guessed)))
            for job in ordered
        ]
        return Outcome(tuple(played), tuple(self._refused))

    def _go_on(self) -> str:
        """Train until something happens; return what."""
        ends = min((job.of.ended for job in self._here), default=inf)
        known = min((job.known_at() for job in self._here), default=inf)
        comes = self._coming[0].of.began if self._coming else inf
        then = min(ends, known, comes, self._again)
        for job in self._here:
            job.train(self._now, then)
        self._now = then
        if then == ends:
            over = [job for job in self._here if job.of.ended == then]
            self._here = [job for job in self._here if job.of.ended != then]
            self._over += over
            return "slots freed"
        if then == comes:
            self._here.append(self._coming.pop(0))
            return "job arrived"
        if then == known:
            return self._measure()
        self._again = inf
        return "time passed"

    def _measure(self) -> str:
        for job in self._here:
            if job.known_at() == self._now:
                size, hosts = job.place
                speed = SpeedAt(size=size, hosts=hosts, step_time=job.step_time())
                job.seen[job.place] = speed
        return "size measured"

    def _plan(self, event: str) -> None:
        views = tuple(job.view(self._now) for job in self._here)
        view = View(now=self._now, triggers=(event,), jobs=views, hosts=self._hosts)
        plan = self._algorithm(view)
        if event != "time passed":
            self._again = self._now + AGAIN_S
        if wrong := faults(view, plan):
            self._refused.append(wrong[0])
            return
        # Jobs that shrink go first in life, too; here it takes no time.
        for job in self._here:
            job.go_to(plan.workers.get(job.of.name, {}), self._now)


def _by_model(record: Record, size: int, hosts: int) -> float:
    """Return the step time that the model expects at a place that was not measured."""
    times: dict[int, float] = {}
    lay: dict[int, int] = {}
    for each in record.speeds:  # in the order of sizes and hosts: the fewest hosts count
        if each.size not in times:
            times[each.size], lay[each.size] = each.step_time, each.hosts
    if size in times:  # on other hosts
        times.pop(size)
        if not times:
            return next(each.step_time for each in record.speeds if each.size == size)
    layout = Layout({**lay, size: hosts}, record.micro_batches)
    return fit(layout, times).step_time(size)


class Records(Protocol):
    """A database with the records and the figures of jobs (`store.database`)."""

    def records(self) -> list[tuple[JobKey, Record]]:
        """Return all jobs that have a record, in the order of their beginnings."""

    def rows(self, job: JobKey, period: int) -> list[Row]:
        """Return the rows of a job; `period` in seconds."""


def recorded_jobs(database: Records) -> tuple[list[Recorded], list[str]]:
    """Return the jobs that can be played, and the names of those that cannot.

    A job can be played if it has ended and was measured at one size at least.
    """
    found, left_out, names = [], [], Counter[str]()
    for key, record in database.records():
        names[key.run] += 1
        name = key.run if names[key.run] == 1 else f"{key.run}#{names[key.run]}"
        rows = [] if not record.speeds else database.rows(key, MINUTE) or database.rows(key, HOUR)
        job = _recorded(name, key, record, rows)
        if job is None:
            left_out.append(name)
        else:
            found.append(job)
    return sorted(found, key=lambda job: (job.began, job.name)), left_out


def _recorded(name: str, key: JobKey, record: Record, rows: Iterable[Row]) -> Recorded | None:
    series: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.series.subject == JOB:
            series.setdefault(row.series.name, {})[row.t] = row
    workers, steps = series.get("workers", {}), series.get("steps_per_s", {})
    looks = sum(row.values.n for row in workers.values())
    if record.ended is None or not record.speeds or not looks:
        return None
    batches = sum(
        row.values.n * row.values.mean * _batches(workers.get(t), record)
        for t, row in steps.items()
    )
    samples = sum(
        row.values.n * row.values.mean for row in series.get("samples_per_s", {}).values()
    )
    seconds = (record.ended - key.began) / looks  # of one look
    each = samples / batches if samples and batches else None
    return Recorded(name, key.began, record.ended, record, batches * seconds, each)


def _batches(workers: Row | None, record: Record) -> float:
    """Return the batches of a step, with the mean number of workers of a period."""
    if workers is None or record.micro_batches is not None:
        return work_of(1, record.micro_batches)
    return workers.values.mean


_MARK = "*"


def comparison(
    jobs: Sequence[Recorded],
    left_out: Sequence[str],
    hosts: Sequence[HostView],
    outcomes: Mapping[str, Outcome],
) -> str:
    """Return the tables for jobs in the order of their beginnings, and outcomes by algorithm."""
    slots = sum(host.slots for host in hosts)
    best = [best_possible(job, slots) for job in jobs]
    names = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
    head = ["job", "counted in", "recorded", "best possible", *outcomes]
    rows = [
        [
            job.name,
            "batches" if job.samples is None else "samples",
            _amount(job, job.trained),
            _amount(job, most),
            *(_played(job, outcome.jobs[number]) for outcome in outcomes.values()),
        ]
        for number, (job, most) in enumerate(zip(jobs, best, strict=True))
    ]
    what = f"{counted(len(jobs), 'job')} on {counted(slots, 'slot')}"
    lines = [f"{what} ({names})", "", *aligned([head, *rows], right=range(2, len(head))), ""]
    for name, outcome in outcomes.items():
        lines += _summary(name, jobs, best, outcome)
    if any(job.extrapolated for outcome in outcomes.values() for job in outcome.jobs):
        lines += ["", f"{_MARK}: was at sizes that were not measured; their speed is extrapolated"]
    if left_out:
        lines += ["", f"left out, not measured or not ended: {', '.join(left_out)}"]
    return "\n".join(lines) + "\n"


def _summary(
    name: str, jobs: Sequence[Recorded], best: Sequence[float], outcome: Outcome
) -> list[str]:
    changes = sum(job.changes for job in outcome.jobs)
    of_recorded = _share(outcome.jobs, [job.trained for job in jobs])
    lines = [
        f"{name}: {of_recorded} of recorded, {_share(outcome.jobs, best)} of best possible "
        f"(means of the jobs); changes: {changes}"
    ]
    for job in outcome.jobs:
        if job.extrapolated:
            sizes = ", ".join(f"{size} on {hosts}" for size, hosts in job.extrapolated)
            lines.append(f"  {job.name}: extrapolated sizes (workers on hosts): {sizes}")
    if outcome.refused:
        lines.append(f"  plans refused: {len(outcome.refused)}, the first: {outcome.refused[0]}")
    return lines


def _share(jobs: Iterable[Played], against: Iterable[float]) -> str:
    """Return the mean of what each job has trained, as a share of `against`; "?": none could."""
    shares = [job.trained / each for job, each in zip(jobs, against, strict=True) if each]
    return f"{fmean(shares):.1%}" if shares else "?"


def _amount(job: Recorded, batches: float) -> str:
    """Return batches as the table counts them: in samples, if those of a batch are known."""
    return f"{batches * (1.0 if job.samples is None else job.samples):.0f}"


def _played(job: Recorded, played: Played) -> str:
    """Return what a job has trained, marked if it was at sizes that were not measured."""
    return _amount(job, played.trained) + (_MARK if played.extrapolated else "")
