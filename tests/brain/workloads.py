"""Seeded workloads of several jobs: how long they take with the Brain, and with equal shares.

    python -m tests.brain.workloads --workloads 100

Every job has a speed curve that nobody knows before, and so much to do that it would take 5 to 20
minutes on its equal share: the slots, divided by the number of jobs of the workload. With static
equal shares a job has these slots from its arrival to its end, and uses as many of them as make it
fastest. With those of the present, the slots are divided anew whenever a job comes or ends, which
costs nothing. A change by the Brain costs 0.2 s, and a slot changes hands 0.2 s later.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from statistics import fmean

from tests.brain.world import Curve, World

LONGEST_S = 50_000.0


@dataclass(frozen=True)
class Work:
    """One job of a workload. `curve`: steps per second of a number of workers."""

    name: str
    arrives: float
    curve: Curve
    steps: float

    def best(self, slots: float) -> float:
        """Return the most speed with so many slots."""
        most = max(1, int(slots))
        return max(self.curve(size) for size in range(1, most + 1))


@dataclass(frozen=True)
class Times:
    """How long the jobs of a workload took, by job, and how often their sizes changed."""

    brain: Mapping[str, float]
    static: Mapping[str, float]
    present: Mapping[str, float]
    changes: int

    def saved(self, against: Mapping[str, float]) -> float:
        """Return by which share the mean time is shorter than another one."""
        return 1 - fmean(self.brain.values()) / fmean(against.values())

    def slowest(self) -> float:
        """Return the largest time of a job, as a multiple of that on its static share."""
        return max(self.ratios())

    def ratios(self) -> list[float]:
        """Return the time of each job, as a multiple of that on its static share."""
        return [self.brain[name] / self.static[name] for name in self.brain]


def curve_of(random: Random) -> Curve:
    """Return a curve: linear, saturating, or falling from some size on."""
    one = random.uniform(1.0, 10.0)
    kind = random.choice(["linear", "saturating", "saturating", "falling"])
    serial, peak = random.uniform(0.05, 0.5), random.randint(2, 6)

    def speed(size: int) -> float:
        if kind == "linear":
            return one * size
        if kind == "saturating":
            return one / (serial + (1 - serial) / size)
        return one * size if size <= peak else one * peak * (peak / size) ** 0.5

    return speed


def workload(seed: int) -> tuple[dict[str, int], list[Work]]:
    """Return the hosts and the jobs of a workload."""
    random = Random(f"workload {seed}")
    hosts = {f"n{n}": 4 for n in range(random.randint(2, 6))}
    number = random.randint(3, 10)
    share = sum(hosts.values()) / number
    jobs, arrives = [], 0.0
    for n in range(number):
        curve = curve_of(random)
        work = Work(f"job{n}", arrives, curve, 0.0)
        steps = work.best(share) * random.uniform(300.0, 1200.0)
        jobs.append(Work(f"job{n}", arrives, curve, steps))
        arrives += random.expovariate(1 / 60.0)
    return hosts, jobs


def measure(seed: int) -> Times:
    """Play one workload."""
    hosts, jobs = workload(seed)
    slots = sum(hosts.values())
    static = {job.name: job.steps / job.best(slots / len(jobs)) for job in jobs}
    world = World(hosts, seed)
    began = world.now
    for job in jobs:
        world.after(
            job.arrives, lambda job=job: world.add(job.name, job.curve, steps_wanted=job.steps)
        )
    world.run(began + LONGEST_S, lambda: len(world.ended) == len(jobs))
    brain = {job.name: world.ended[job.name] - began - job.arrives for job in jobs}
    return Times(brain, static, equal_shares(jobs, slots), len(world.published))


def equal_shares(jobs: list[Work], slots: int) -> dict[str, float]:
    """Return how long each job takes if the slots are always divided equally among those there."""
    now, left, took = 0.0, {job.name: job.steps for job in jobs}, dict[str, float]()
    while len(took) < len(jobs):
        here = [job for job in jobs if job.arrives <= now and job.name not in took]
        speeds = {job.name: job.best(slots / len(here)) for job in here}
        coming = [job.arrives for job in jobs if job.arrives > now]
        ends = [now + left[name] / speed for name, speed in speeds.items()]
        then = min(coming + ends)
        for job in here:
            left[job.name] -= (then - now) * speeds[job.name]
            if left[job.name] <= 1e-9 * job.steps:
                took[job.name] = then - job.arrives
        now = then
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", type=int, default=100)
    found = [measure(seed) for seed in range(parser.parse_args().workloads)]
    ratios = sorted(ratio for times in found for ratio in times.ratios())
    print(f"jobs: {len(ratios)}, grants: {sum(times.changes for times in found)}")
    print(f"shorter than static equal shares: {fmean(t.saved(t.static) for t in found):.1%}")
    print(f"shorter than those of the present: {fmean(t.saved(t.present) for t in found):.1%}")
    below = sum(ratio < 2 for ratio in ratios) / len(ratios)
    print(f"below twice the time on a static share: {below:.1%}, slowest: {ratios[-1]:.2f}")


if __name__ == "__main__":
    main()
