"""A job with a given speed curve, on a clock of its own, and the machine that scales it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from elastic_driver.features.sizes.autoscaler import GIVE_UP_S, AutoScaler
from elastic_driver.features.sizes.messages import PriorFound, SpeedSeen
from elastic_driver.job.decisions import Announce
from elastic_driver.job.events import MemoryExpected, SizeProposed
from elastic_driver.kernel.services import SendEvent
from tests.features.sizes.curves import CURVES, Curve

LOOK_S = 1.0


@dataclass
class SimulatedJob:
    """Trains with `size` workers; a change of the size takes `change` seconds."""

    curve: Curve
    size: int = 1
    base: float = 0.1
    noise: float = 0.0
    change: float = 0.3
    least: int = 1
    most: int | None = None
    held: bool = False
    rest: int | None = None
    gradient_noise: float | None = None  # its scale; None: not known
    available: int = 99  # workers that can be had
    now: float = 100.0
    steps: int = 0
    at: float = 100.0
    round: int = 1
    machine: AutoScaler = field(default_factory=AutoScaler)
    proposals: list[SizeProposed] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)  # the memory that similar jobs took
    announced: list[Announce] = field(default_factory=list)
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.wanted = self.size

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK_S
            while (took := self._step_time()) + self.at <= self.now:
                self.at, self.steps = self.at + took, self.steps + 1
            self._look()

    def until_found(self, within: float = 60.0) -> float:
        began = self.now
        while not self.machine.found:
            assert self.now - began < within, self.machine.search
            self.run(LOOK_S)
        return self.now - began

    def _step_time(self) -> float:
        factor = max(0.2, 1 + self.noise * self.chance.gauss(0, 1))
        return self.curve.step_time(self.size, self.base) * factor

    def _look(self) -> None:
        seen = SpeedSeen(
            round=self.round,
            size=self.size,
            wanted=self.wanted,
            worker="a.0.1",
            steps=self.steps,
            at=self.at,
            slots=self.curve.slots,
            least=self.least,
            most=self.most,
            held=self.held,
            rest=self.rest,
            micro_batches=self.curve.micro_batches,
            noise=None if self.size == 1 else self.gradient_noise,
        )
        for decision in self.machine.handle(seen, self.now):
            if isinstance(decision, Announce):
                self.announced.append(decision)
                continue
            assert isinstance(decision, SendEvent)
            if isinstance(decision.event, MemoryExpected):
                self.expected.append(decision.event.need)
                continue
            assert isinstance(decision.event, SizeProposed)
            self.proposals.append(decision.event)
            self.go_to(decision.event.num_proc)
        assert self.machine.check() == []
        assert self.machine.deadline() is None

    def go_to(self, size: int) -> None:
        self.wanted = size
        if min(size, self.available) != self.size:
            self.size, self.round = min(size, self.available), self.round + 1
            self.at += self.change


def assert_found_and_stays(job: SimulatedJob, within: float = 60.0) -> None:
    """At most six changes lead to 95 % of the best speed; then one more in ten minutes at most."""
    before = len(job.proposals)
    job.until_found(within)
    assert job.curve.speed(job.wanted) >= 0.95 * max(job.curve.speeds)
    changes = len(job.proposals)
    assert changes - before <= 6
    job.run(600)
    assert len(job.proposals) <= changes + 1


def with_steps_of(seconds: float, curve: Curve) -> float:
    """The step time with one worker at which no size has longer steps than this."""
    return seconds / max(curve.step_time(size, 1.0) for size in range(1, 9))


@pytest.mark.parametrize("name", CURVES)
def test_it_finds_the_best_size_within_a_minute_and_stays(name: str) -> None:
    assert_found_and_stays(SimulatedJob(CURVES[name]))


@pytest.mark.parametrize("name", CURVES)
def test_it_does_so_with_noise_of_10_percent(name: str) -> None:
    base = with_steps_of(0.1, CURVES[name])
    for seed in range(5):
        chance = random.Random(seed)
        assert_found_and_stays(SimulatedJob(CURVES[name], base=base, noise=0.1, chance=chance))


class OnABusyMachine(SimulatedJob):
    """All steps of a second take longer or shorter together, by 12 % or so."""

    now_takes: float = 1.0

    def _step_time(self) -> float:
        return super()._step_time() * self.now_takes

    def _look(self) -> None:
        self.now_takes = max(0.3, 1 + 0.12 * self.chance.gauss(0, 1))
        super()._look()


@pytest.mark.parametrize("name", ["linear", "peak at 3", "peak at 5", "flat from 2"])
def test_it_does_not_search_for_minutes_on_a_busy_machine(name: str) -> None:
    """With a minute for each size, this took four to six minutes."""
    base = with_steps_of(0.05, CURVES[name])
    for seed in range(5):
        job = OnABusyMachine(CURVES[name], base=base, chance=random.Random(seed))
        job.until_found(150)
        assert job.curve.speed(job.wanted) >= 0.9 * max(job.curve.speeds)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("linear", "peak at 3"),
        ("peak at 3", "linear"),
        ("flat from 2", "falling"),
        ("drop at the second host", "dip at the second host"),
    ],
)
def test_it_does_so_again_when_the_curve_changes_midway(
    first: str, then: str, noise: float
) -> None:
    job = SimulatedJob(CURVES[first], base=0.05, noise=noise)
    assert_found_and_stays(job)
    best = job.curve.step_time(job.size, job.base)
    job.curve = CURVES[then]
    job.base *= 1.3 * best / job.curve.step_time(job.size, job.base)  # steps are 30 % longer
    began = job.now
    while job.machine.found:
        job.run(LOOK_S)
        assert job.now - began < 75, "a change for a minute is noticed"
    assert_found_and_stays(job)


def test_long_steps_take_as_many_looks_as_they_need() -> None:
    job = SimulatedJob(CURVES["peak at 3"], base=3.0)
    job.until_found(within=1500)
    assert job.wanted == 3


def test_a_changed_speed_reopens_the_search() -> None:
    job = SimulatedJob(CURVES["linear"])
    job.until_found()
    assert job.wanted == 8
    job.curve = CURVES["peak at 3"]
    job.run(200)
    assert [a.event for a in job.announced] == ["size_found", "size_search_reopened", "size_found"]
    assert job.wanted == 3


def test_a_change_of_10_percent_does_not() -> None:
    job = SimulatedJob(CURVES["linear"])
    job.until_found()
    job.base *= 1.1
    changes = len(job.proposals)
    job.run(600)
    assert len(job.proposals) == changes


def test_the_limits_of_the_job_hold() -> None:
    job = SimulatedJob(CURVES["linear"], size=2, least=2, most=5)
    job.until_found()
    assert job.wanted == 5
    job = SimulatedJob(CURVES["falling"], size=4, least=3)
    job.until_found(within=200)
    assert job.wanted == 3
    assert all(3 <= each.num_proc <= 8 for each in job.proposals)


def test_only_whole_units_of_hosts_are_tried() -> None:
    machine, slots = AutoScaler(), (2, 2, 2, 2)
    seen = SpeedSeen(
        round=1, size=4, wanted=4, worker="a", steps=0, at=0.0, slots=slots, least=1, unit=2
    )
    machine.handle(seen, 1.0)
    assert machine.search is not None
    assert set(machine.search.layout.hosts) == {3, 4, 7, 8}


def test_a_size_that_a_user_asked_for_holds_until_it_is_released() -> None:
    job = SimulatedJob(CURVES["linear"], held=True)
    job.run(120)
    assert job.proposals == []
    job.held = False
    job.until_found()
    assert job.wanted == 8


def test_a_size_that_cannot_be_had_is_given_up() -> None:
    job = SimulatedJob(CURVES["linear"], available=3)
    job.until_found(within=4 * GIVE_UP_S)
    assert job.size == job.wanted <= 3


def test_moves_that_do_not_repay_themselves_are_not_made() -> None:
    short = SimulatedJob(CURVES["linear"], change=20.0, rest=400)
    short.run(300)
    assert len(short.proposals) == 1  # the first move tells what a move costs
    long = SimulatedJob(CURVES["linear"], change=20.0, rest=400_000)
    long.run(300)
    assert long.wanted == 8


def test_hosts_that_come_reopen_the_search_and_measured_sizes_are_not_tried_again() -> None:
    job = SimulatedJob(Curve((1, 2, 3, 4, 5, 6, 7, 8), (4,)))
    job.until_found()
    assert job.wanted == 4
    before = len(job.proposals)
    job.curve = Curve((1, 2, 3, 4, 5, 6, 7, 8), (4, 4))
    job.run(60)
    assert [each.num_proc for each in job.proposals[before:]] == [8]
    job.curve = Curve((1, 2, 3, 4, 5, 6, 7, 8), (4,))
    job.go_to(4)
    before = len(job.proposals)
    job.run(60)
    assert len(job.proposals) == before


def goodput(job: SimulatedJob, size: int) -> float:
    """What a job learns per second, whose batch grows with its workers."""
    noise = job.gradient_noise
    assert noise is not None
    return job.curve.speed(size) * (noise + 1) / (noise + size)


@pytest.mark.parametrize("noise", [0.3, 2.0, 10.0, 1e6])
@pytest.mark.parametrize("name", ["linear", "saturating", "peak at 5", "dip at the second host"])
def test_a_larger_batch_counts_for_less_where_gradients_have_little_noise(
    name: str, noise: float
) -> None:
    job = SimulatedJob(CURVES[name], gradient_noise=noise)
    job.until_found()
    best = max(goodput(job, size) for size in range(1, 9))
    assert goodput(job, job.wanted) >= 0.95 * best
    assert len(job.proposals) <= 6
    before = len(job.proposals)
    job.run(600)
    assert len(job.proposals) <= before + 1


def test_the_search_begins_again_when_the_noise_of_the_gradients_has_grown() -> None:
    job = SimulatedJob(CURVES["linear"], gradient_noise=0.2)
    job.until_found()
    assert job.wanted <= 4
    job.gradient_noise = 1000.0
    job.run(120)
    assert job.wanted == 8


def test_a_noise_that_is_hardly_known_moves_no_job_back_and_forth() -> None:
    job = SimulatedJob(CURVES["saturating"], gradient_noise=3.0)
    job.until_found()
    before = len(job.proposals)
    for _ in range(600):
        job.gradient_noise = 3.0 * job.chance.lognormvariate(0.0, 0.7)
        job.run(LOOK_S)
    assert len(job.proposals) <= before + 1


def test_a_fixed_batch_is_not_weighed() -> None:
    weighed = SimulatedJob(CURVES["8 micro-batches"], gradient_noise=0.1)
    weighed.until_found()
    plain = SimulatedJob(CURVES["8 micro-batches"])
    plain.until_found()
    assert weighed.wanted == plain.wanted


def knows(job: SimulatedJob, curve: Curve, factor: float = 1.0) -> None:
    """Tell the machine the speeds of similar jobs."""
    times = tuple(
        (size, hosts, factor * curve.step_time(size, job.base))
        for size, hosts in curve.hosts().items()
    )
    assert job.machine.handle(PriorFound(jobs=3, step_times=times), job.now) == []


@pytest.mark.parametrize("name", CURVES)
def test_it_begins_where_similar_jobs_were_best_and_stays_there(name: str) -> None:
    job = SimulatedJob(CURVES[name])
    knows(job, job.curve, factor=1.15)  # another machine, a little slower
    job.until_found()
    assert job.curve.speed(job.wanted) >= 0.95 * max(job.curve.speeds)
    assert len(job.proposals) <= 1
    assert all("similar jobs" in each.reason for each in job.proposals)
    job.run(600)
    assert len(job.proposals) <= 1


@pytest.mark.parametrize("factor", [0.75, 1.3])
def test_what_similar_jobs_have_measured_is_dropped_if_it_is_wrong(factor: float) -> None:
    job = SimulatedJob(CURVES["peak at 3"])
    knows(job, CURVES["linear"], factor)
    job.run(30)
    assert job.proposals[0].num_proc == 8
    assert job.announced[0].event == "prior_dropped"
    assert job.expected == [0], "their memory says nothing, either"
    job.until_found()
    assert job.wanted == 3


def test_a_size_of_similar_jobs_that_turned_out_wrong_is_noticed_later() -> None:
    job = SimulatedJob(CURVES["peak at 5"], size=2)
    curve = CURVES["peak at 5"]
    times = tuple((n, 1, curve.step_time(n, 0.1) * (0.5 if n == 8 else 1.0)) for n in (2, 5, 8))
    job.machine.handle(PriorFound(jobs=1, step_times=times), job.now)
    job.run(300)
    job.until_found()
    assert curve.speed(job.wanted) >= 0.95 * max(curve.speeds)


def test_sizes_that_this_job_cannot_have_are_left_out() -> None:
    job = SimulatedJob(CURVES["linear"], most=3)
    knows(job, job.curve)
    job.until_found()
    assert [each.num_proc for each in job.proposals] == [3]
    other_hosts = SimulatedJob(CURVES["linear over hosts"])
    knows(other_hosts, Curve((1, 2, 3, 4, 5, 6, 7, 8), (1,) * 8))
    other_hosts.until_found()
    assert other_hosts.wanted == 8
    assert len(other_hosts.proposals) > 1, "they lay on other hosts, so each size is tried"


def test_what_comes_after_the_search_changes_nothing() -> None:
    job = SimulatedJob(CURVES["peak at 3"])
    job.until_found()
    before = len(job.proposals)
    knows(job, CURVES["linear"])
    job.run(60)
    assert len(job.proposals) == before
