"""A simulated cluster around the Brain's machine: jobs that train, hosts, and an algorithm.

Each job is a driver with processes on hosts. It reports each second, carries out its newest grant a
moment later, and lets go of slots later still. What really runs on a host is known here, and after
every event it must not be more than the host has slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Any

from msgspec.structs import replace

from elastic_driver.brain.algorithm import HostView, Plan, View
from elastic_driver.brain.cluster import Cluster
from elastic_driver.brain.fair import fair
from elastic_driver.brain.grants import JOB_LEASE_S, Grant, JobOver, JobReport, Kind, Speed
from elastic_driver.brain.messages import (
    AskAlgorithm,
    DriverProbed,
    HostsFound,
    JobEnded,
    JobHeard,
    JobSilent,
    PlanFailed,
    Planned,
    ProbeDriver,
    PublishGrant,
    Tell,
)
from elastic_driver.job.events import Tick

LATENCY_S = 0.01
LIVES_ON_S = 8.0
UNANSWERED_S = 30.0  # until a connection without an answer has ended
CHANGE_S = 0.2  # the steps that a change of the size costs
Curve = Callable[[int], float]  # steps per second of a number of workers


@dataclass
class SimJob:
    """A job: its driver, and its processes by host."""

    name: str
    curve: Curve
    began: float
    steps_wanted: float = float("inf")
    least: int = 1
    most: int | None = None
    held: int | None = None
    weight: float = 1.0
    memory_need: int = 0  # a worker has run out of memory
    room: dict[str, int] = field(default_factory=dict)
    starved: dict[str, int] = field(default_factory=dict)
    grant: Grant | None = None
    using: dict[str, int] = field(default_factory=dict)  # slots of the newest grant it knows
    holding: dict[str, int] = field(default_factory=dict)  # slots with a process
    steps: float = 0.0
    counted_at: float = 0.0  # until when `steps` are counted
    stands_until: float = 0.0
    round: int = 0
    driver_lives: bool = True
    cut: bool = False  # nothing passes between its driver and the Brain; it trains on
    is_late: bool = False  # its driver has come late, and does not know which slots it has
    heard_at: float = 0.0
    silent_told: bool = False
    over_at: float | None = None

    @property
    def size(self) -> int:
        return sum(self.using.values())

    def count(self, now: float) -> None:
        trains_from = max(self.counted_at, self.stands_until)
        if self.size and now > trains_from:
            self.steps += (now - trains_from) * self.curve(self.size)
        self.counted_at = max(self.counted_at, now)

    def report(self, now: float) -> JobReport:
        speed = None
        if self.size:
            speed = Speed(
                round=self.round,
                size=self.size,
                hosts=len(self.using),
                worker="w",
                steps=int(self.steps * 1000),
                at=now,
                micro_batches=1000,
            )
        return JobReport(
            began=self.began,
            least=self.least,
            most=self.most,
            weight=self.weight,
            held=self.held,
            carried_out=self.grant.number if self.grant and not self.is_late else 0,
            holding=dict(self.holding),
            liveness=f"{self.name}:{self.began}",
            lives_on=LIVES_ON_S,
            memory_need=self.memory_need,
            room=dict(self.room),
            starved=dict(self.starved),
            kind=Kind(name=self.name, command=""),
            speed=speed,
        )


class Violation(AssertionError):
    """Something that must not happen."""


class World:
    """Jobs, hosts and the Brain, on one simulated clock."""

    def __init__(self, hosts: dict[str, int], seed: int = 0, algorithm: str = "") -> None:
        self.random, self.strangers = Random(seed), Random(seed)
        self.now = 1000.0
        self.hosts = dict(hosts)
        self.most: dict[str, int] = dict(hosts)  # slots that each host ever had
        self.jobs: dict[str, SimJob] = {}
        self.ghosts: list[SimJob] = []  # former runs of jobs, whose processes are not yet gone
        self.ended: dict[str, float] = {}
        self.cluster = Cluster(algorithm)
        self.brain_lives = True
        self.told: list[Tell] = []
        self.published: list[tuple[float, str, Grant]] = []
        self.numbers: dict[str, int] = {}
        self.answers: Callable[[AskAlgorithm], Plan | str | None] = lambda ask: fair(ask.view)
        self.views: list[View] = []
        self.let_go_s = 0.2
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._snapshot = self.cluster.snapshot()
        self.brain(HostsFound(self.host_views()))

    def host_views(self) -> tuple[HostView, ...]:
        return tuple(HostView(name=name, slots=slots) for name, slots in self.hosts.items())

    # ---- the clock -----------------------------------------------------------------------

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), do))

    def run(self, until: float, over: Callable[[], bool] = lambda: False) -> None:
        while not over():
            due = self.cluster.deadline() if self.brain_lives else None
            first = self._queue[0][0] if self._queue else until + 1
            if min(first, due if due is not None else first) > until:
                self.now = until
                return
            if due is not None and due <= first:
                self.now = max(self.now, due)
                self.brain(Tick())
                if (again := self.cluster.deadline()) is not None and again <= self.now:
                    raise Violation(f"the machine wants a tick at {again} again and again")
            else:
                self.now, _, do = heapq.heappop(self._queue)
                do()
            self.check()

    # ---- the Brain -----------------------------------------------------------------------

    def brain(self, event: Any) -> None:
        if not self.brain_lives:
            return
        decisions = self.cluster.handle(event, self.now)
        if wrong := self.cluster.check():
            raise Violation(f"{wrong} after {event}")
        for decision in decisions:
            match decision:
                case PublishGrant():
                    self._publish(decision)
                case AskAlgorithm():
                    self._ask(decision)
                case ProbeDriver():
                    self._probe(decision)
                case Tell():
                    self.told.append(decision)

    def _publish(self, decision: PublishGrant) -> None:
        name, grant = decision.job, decision.grant
        if grant.number < self.numbers.get(name, 0):
            raise Violation(f"{name}: grant {grant.number} after {self.numbers[name]}")
        self.numbers[name] = grant.number
        self.published.append((self.now, name, grant))
        self.after(self.random.uniform(0, 2 * LATENCY_S), lambda: self._deliver(name, grant))

    def _probe(self, asked: ProbeDriver) -> None:
        runs = [
            job for job in self.jobs.values() if (job.name, job.began) == (asked.job, asked.began)
        ]
        lives, cut = any(job.driver_lives for job in runs), any(job.cut for job in runs)
        dead = self.strangers.choice(("refused", "unproved"))  # another program has the port
        result: Any = "silent" if cut else "answered" if lives else dead
        probed = DriverProbed(asked.job, asked.began, asked.liveness, result)
        self.after(LATENCY_S, lambda: self.brain(probed))

    def _ask(self, ask: AskAlgorithm) -> None:
        self.views.append(ask.view)
        answer = self.answers(ask)
        if isinstance(answer, Plan):
            planned = Planned(ask.request, answer)
            self.after(LATENCY_S, lambda: self.brain(planned))
        elif answer is not None:
            failed = PlanFailed(ask.request, answer)
            self.after(LATENCY_S, lambda: self.brain(failed))

    def kill_brain(self, away: float) -> None:
        """End the Brain; the next one has its state, and answers of algorithms are lost."""
        self.brain_lives = False
        self._snapshot = self.cluster.snapshot()
        self.after(away, self._restart)

    def _restart(self) -> None:
        self.brain_lives = True
        self.cluster = Cluster.restored(self._snapshot)
        self.brain(Tick())
        self.brain(HostsFound(self.host_views()))
        for job in self.jobs.values():
            job.heard_at = self.now
            job.silent_told = False

    # ---- jobs ----------------------------------------------------------------------------

    def add(self, name: str, curve: Curve, **more: Any) -> SimJob:
        job = SimJob(name, curve, self.now, counted_at=self.now, **more)
        self.jobs[name] = job
        self._report_for_ever(job)
        return job

    def _report_for_ever(self, job: SimJob) -> None:
        if self.jobs.get(job.name) is not job:
            return
        self.report(job)
        if job.name in self.jobs:
            self.after(1.0, lambda: self._report_for_ever(job))

    def report(self, job: SimJob) -> None:
        job.count(self.now)
        if job.driver_lives and job.steps >= job.steps_wanted and self.jobs.get(job.name) is job:
            self.end(job)
        elif not job.driver_lives or job.cut or self.jobs.get(job.name) is not job:
            self._expire(job)
        elif self.brain_lives:
            job.heard_at, job.silent_told = self.now, False
            self.brain(JobHeard(job.name, job.report(self.now)))

    def _expire(self, job: SimJob) -> None:
        silent = self.now - job.heard_at >= JOB_LEASE_S
        if silent and self.brain_lives and not job.silent_told:
            job.silent_told = True
            self.brain(JobSilent(job.name))

    def end(self, job: SimJob) -> None:
        """All its processes are gone, and its driver says so; or another one says so later."""
        if self.jobs.pop(job.name, None) is None:
            return
        self.ended[job.name] = self.now
        if job.cut:
            self.lost(job)
        else:
            self._say_over(job)

    def lost(self, job: SimJob) -> None:
        """All its processes are gone, and nobody says so: its lease ends."""
        if self.jobs.get(job.name) is not None:
            return  # another run of it renews the lease
        wait = max(0.0, job.heard_at + JOB_LEASE_S - self.now) if self.brain_lives else 1.0
        if wait:
            self.after(wait, lambda: self.lost(job))
        elif not job.silent_told:
            self.brain(JobSilent(job.name))

    def _say_over(self, job: SimJob) -> None:
        if self.brain_lives:
            self.brain(JobEnded(job.name, JobOver(began=job.began, exit_code=0)))
        else:
            self.after(1.0, lambda: self._say_over(job))

    def driver_dies(self, job: SimJob) -> None:
        """Nothing says so but the end of its connection."""
        job.driver_lives = False
        self.after(UNANSWERED_S if job.cut else LATENCY_S, lambda: self.lose(job))

    def lose(self, job: SimJob) -> None:
        """The connection to a driver has ended, or nothing has come through it for long."""
        if job.cut or not job.driver_lives:
            place = f"{job.name}:{job.began}"
            self.brain(DriverProbed(job.name, job.began, place, "lost"))

    def come_back(self, job: SimJob) -> None:
        """Its next driver reads the newest grant, and reports."""
        job.driver_lives, job.cut = True, False
        grants = [grant for _, name, grant in self.published if name == job.name]
        if grants:
            self._deliver(job.name, grants[-1])
        self.report(job)

    def come_back_late(self, job: SimJob) -> None:
        """Its processes have ended long ago; the next driver asks which slots it has now."""
        job.count(self.now)
        job.driver_lives, job.is_late = True, True
        job.using, job.holding = {}, {}
        self.report(job)

    def _deliver(self, name: str, grant: Grant) -> None:
        job = self.jobs.get(name)
        if job is None or job.began != grant.began or not job.driver_lives or job.cut:
            return
        if job.grant is not None and grant.number <= job.grant.number:
            return
        job.count(self.now)
        before = job.using
        job.grant, job.is_late = replace(grant), False
        after = {host: n for host, n in grant.hosts.items() if n}
        for host, slots in after.items():
            job.holding[host] = max(slots, job.holding.get(host, 0))
        for host, slots in job.holding.items():
            if slots > after.get(host, 0):
                late = self.random.uniform(0.5, 1.5) * self.let_go_s
                self.after(late, partial(self._let_go, job, host, slots))
        job.using = after
        if before != after:
            job.round += 1
            job.stands_until = self.now + CHANGE_S
        self.report(job)

    def _let_go(self, job: SimJob, host: str, held: int) -> None:
        """Some processes have ended, unless the job may use their slots again."""
        left = max(job.using.get(host, 0), self.random.randint(0, held - 1))
        if left < job.holding.get(host, 0):
            job.holding[host] = left
            if left > job.using.get(host, 0):
                late = self.random.uniform(0.5, 1.5) * self.let_go_s
                self.after(late, partial(self._let_go, job, host, left))
        if not job.holding.get(host):
            job.holding.pop(host, None)
        self.report(job)

    # ---- what must be true ---------------------------------------------------------------

    def in_use(self) -> dict[str, int]:
        """Return the slots of each host that really have processes."""
        used: dict[str, int] = {}
        for job in (*self.jobs.values(), *self.ghosts):
            for host, slots in job.holding.items():
                used[host] = used.get(host, 0) + slots
        return used

    def check(self) -> None:
        for host, slots in self.in_use().items():
            # A host that is lost, or has become smaller, has no more than it ever had.
            self.most[host] = max(self.hosts.get(host, 0), self.most.get(host, 0))
            if slots > self.most[host]:
                raise Violation(f"{host}: {slots} processes on {self.most[host]} slots")

    def sizes(self) -> dict[str, int]:
        return {name: job.size for name, job in self.jobs.items()}
