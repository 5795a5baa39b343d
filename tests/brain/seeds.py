"""Seeded random clusters under the Brain: jobs, users, lost hosts, silent drivers, dead Brains.

    python -m tests.brain.seeds --seeds 1000
    python -m tests.brain.seeds --seed 7

After each event the invariants must hold, and no slot may have processes of two jobs. When the
faults stop, each job that can run has to run, and the jobs have to end.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from random import Random

from msgspec.structs import replace

from elastic_driver.brain.algorithm import Plan, View
from elastic_driver.brain.fair import fair
from elastic_driver.brain.grants import JOB_LEASE_S
from elastic_driver.brain.messages import AskAlgorithm, HostsFound
from tests.brain.world import LIVES_ON_S, UNANSWERED_S, Curve, SimJob, World

FAULTS_S, QUIET_S = 200.0, 100.0
ALONE_S = JOB_LEASE_S + LIVES_ON_S - 1.1  # processes without a driver, which reports each second


@dataclass
class Outcome:
    """What happened in one seed."""

    jobs: int = 0
    grants: int = 0
    refused: int = 0
    brains: int = 0
    silent: int = 0
    runs: int = 0
    hosts: int = 0
    cut: int = 0
    late: int = 0
    memory: int = 0
    starved: int = 0


def curve_of(random: Random, best: float) -> Curve:
    """Return a speed curve: linear, flat from some size on, or falling from there."""
    kind, peak = random.choice(["linear", "flat", "falling"]), random.randint(1, 8)

    def speed(size: int) -> float:
        if kind == "linear" or size <= peak:
            return best * size
        return best * peak * (1.0 if kind == "flat" else (peak / size) ** 0.7)

    return speed


def any_plan(view: View, random: Random) -> Plan:
    """Return a plan within the bounds, and without any sense."""
    free = {host.name: host.slots for host in view.hosts}
    workers: dict[str, dict[str, int]] = {}
    for job in random.sample(view.jobs, len(view.jobs)):
        slots = [host for host, count in free.items() for _ in range(count)]
        most = min(len(slots), job.most or len(slots), job.least + 4)
        if most >= job.least and random.random() < 0.8:
            taken = random.sample(slots, random.randint(job.least, most))
            workers[job.name] = {host: taken.count(host) for host in sorted(set(taken))}
            for host in taken:
                free[host] -= 1
    return Plan(workers=workers, reason="anything")


class Faults:
    """One seed's cluster, and what happens to it."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.out = Outcome()
        hosts = {f"n{n}": random.randint(1, 4) for n in range(random.randint(1, 5))}
        self.all_hosts = hosts
        algorithm = random.choice(["", "", "other"])
        self.world = World(hosts, seed, algorithm)
        self.world.let_go_s = random.choice([0.1, 0.5, 3.0])
        self.world.answers = self._answer
        self.names = 0
        self.calm = False
        for _ in range(random.randint(1, 4)):
            self.world.after(random.uniform(0, 20), self.arrive)
        self.world.after(random.expovariate(0.2), self.strike)

    def _answer(self, ask: AskAlgorithm) -> Plan | str | None:
        if self.calm or self.random.random() < 0.1:
            return fair(ask.view)
        right = any_plan(ask.view, self.random)
        if not ask.algorithm:
            return right
        wrong = replace(right, workers={"nobody": {"n0": 1}})
        much = replace(right, workers={job: {"n0": 99} for job in right.workers} or {"x": {}})
        return self.random.choice([right, right, wrong, much, "raised ValueError: 3", None])

    def arrive(self) -> None:
        if self.calm:
            return
        random, world = self.random, self.world
        least = random.choice([1, 1, 1, 2, 3])
        self.names += 1
        world.add(
            f"job{self.names}",
            curve_of(random, random.uniform(1, 5)),
            steps_wanted=random.uniform(50, 2000),
            least=least,
            most=random.choice([None, None, least, least + 3]),
            held=random.choice([None, None, None, least]),
            weight=random.choice([1.0, 1.0, 2.0]),
        )
        self.out.jobs += 1

    # ---- faults --------------------------------------------------------------------------

    def strike(self) -> None:
        if self.calm:
            return
        doings = [
            self.arrive,
            self.lose_host,
            self.bring_host,
            self.silence,
            self.cut_off,
            self.come_late,
            self.kill_brain,
            self.user,
            self.begin_again,
            self.run_out_of_memory,
            self.starve,
        ]
        self.random.choice(doings)()
        self.world.after(self.random.expovariate(0.2), self.strike)

    def lose_host(self) -> None:
        world = self.world
        if not world.hosts:
            return
        host = self.random.choice(sorted(world.hosts))
        if self.random.random() < 0.3 and world.hosts[host] > 1:
            world.hosts[host] -= 1
        else:
            del world.hosts[host]
        self.out.hosts += 1
        world.brain(HostsFound(world.host_views()))

    def bring_host(self) -> None:
        host = self.random.choice(sorted(self.all_hosts))
        self.world.hosts[host] = self.all_hosts[host]
        self.world.brain(HostsFound(self.world.host_views()))

    def run_out_of_memory(self) -> None:
        """A worker ends: its host has the memory for fewer, and another one perhaps for none."""
        if (job := self._any_job()) is None or not job.using:
            return
        random = self.random
        host = random.choice(sorted(job.using))
        job.memory_need = max(job.memory_need, random.randint(1, 4) * 2**30)
        job.room = job.room | {host: job.using[host] - 1}
        other = random.choice(sorted(self.all_hosts))
        if random.random() < 0.5:
            job.room.setdefault(other, random.randint(0, 2))
        self.out.memory += 1
        self.world.report(job)

    def starve(self) -> None:
        """The processors of a host are too few for the workers of a job."""
        if (job := self._any_job()) is None:
            return
        crowded = [host for host, count in job.using.items() if count > 1]
        if crowded:
            host = self.random.choice(sorted(crowded))
            job.starved = job.starved | {host: job.using[host] - 1}
            self.out.starved += 1
            self.world.report(job)

    def _any_job(self) -> SimJob | None:
        jobs = [job for job in self.world.jobs.values() if job.driver_lives]
        return self.random.choice(jobs) if jobs else None

    def silence(self) -> None:
        """A driver dies, and comes back, or its processes end by themselves."""
        if (job := self._any_job()) is None:
            return
        world = self.world
        world.driver_dies(job)
        self.out.silent += 1
        if self.random.random() < 0.5:
            world.after(self.random.uniform(0.1, ALONE_S), lambda: world.come_back(job))
        else:
            world.after(self.random.uniform(0.1, ALONE_S), lambda: self._die(job))

    def cut_off(self) -> None:
        """The network between a driver and the Brain is cut; the job trains on."""
        if (job := self._any_job()) is None:
            return
        job.cut = True
        self.world.after(UNANSWERED_S, lambda: self.world.lose(job))
        self.out.cut += 1
        self.world.after(self.random.uniform(0.1, 4 * ALONE_S), lambda: self._mend(job))

    def _mend(self, job: SimJob) -> None:
        if job.cut and self.world.jobs.get(job.name) is job:
            self.world.come_back(job)

    def come_late(self) -> None:
        """A driver dies, all its processes end, and long after that it is resumed."""
        if (job := self._any_job()) is None or job.cut:
            return
        world = self.world
        world.driver_dies(job)
        self.out.late += 1

        def end_processes() -> None:
            job.count(world.now)
            job.using, job.holding = {}, {}

        world.after(self.random.uniform(0.1, ALONE_S), end_processes)
        wait = self.random.uniform(ALONE_S, 3 * ALONE_S)
        world.after(wait, lambda: world.come_back_late(job))

    def _die(self, job: SimJob) -> None:
        self.world.jobs.pop(job.name, None)
        self.world.lost(job)

    def begin_again(self) -> None:
        """A job's driver is killed, and the same command is started at once."""
        if (job := self._any_job()) is None:
            return
        self.out.runs += 1
        world = self.world
        del world.jobs[job.name]
        ghost = replace_name(job)
        world.ghosts.append(ghost)
        world.after(self.random.uniform(0.1, ALONE_S), lambda: world.ghosts.remove(ghost))
        world.add(job.name, job.curve, steps_wanted=job.steps_wanted, least=job.least)

    def kill_brain(self) -> None:
        if self.world.brain_lives:
            self.out.brains += 1
            self.world.kill_brain(self.random.uniform(0.1, 20.0))

    def user(self) -> None:
        if (job := self._any_job()) is not None:
            most = sum(self.all_hosts.values())
            job.held = self.random.choice(
                [None, self.random.randint(job.least, max(most, job.least))]
            )
            if job.held is not None and job.most is not None:
                job.held = min(job.held, job.most)
            self.world.report(job)

    # ---- the end -------------------------------------------------------------------------

    def play(self) -> Outcome:
        """Run the seed; raises if something is wrong."""
        world = self.world
        world.run(world.now + FAULTS_S)
        self.calm = True
        for host in self.all_hosts:
            world.hosts[host] = self.all_hosts[host]
        world.brain(HostsFound(world.host_views()))
        world.run(world.now + QUIET_S)
        self._check_quiet()
        self.out.grants = len(world.published)
        self.out.refused = sum(told.what.name == "plan_refused" for told in world.told)
        return self.out

    def _check_quiet(self) -> None:
        """Each job that fits trains, none has less than it needs, and no slot is wasted."""
        world = self.world
        used = world.in_use()
        free = {host: slots - used.get(host, 0) for host, slots in world.hosts.items()}
        in_order = [world.jobs[name] for name in world.cluster.jobs if name in world.jobs]
        waiting = [
            job for job in in_order if not job.size and job.least <= room_for(job, world.hosts)
        ]
        # The first of them that does not fit lets no other overtake it.
        if waiting and waiting[0].least <= room_for(waiting[0], free):
            raise AssertionError(f"{waiting[0].name} waits, {free} slots are free")
        for name, job in world.jobs.items():
            if any(count > job.room.get(host, count) for host, count in job.using.items()):
                raise AssertionError(f"{name} uses {job.using}, it has the memory for {job.room}")
            if job.size and job.size < job.least:
                raise AssertionError(f"{name} has {job.size} slots, it needs {job.least}")
            known = world.cluster.jobs.get(name)
            if known is None or (job.using != known.granted):
                raise AssertionError(f"{name} uses {job.using}, the Brain says {known}")


def room_for(job: SimJob, slots: dict[str, int]) -> int:
    """Return how many of these slots a job can use, by what it knows of the memory of hosts."""
    return sum(min(count, job.room.get(host, count)) for host, count in slots.items())


def replace_name(job: SimJob) -> SimJob:
    """Return what is left of a run: processes without a driver."""
    ghost = SimJob(job.name, job.curve, job.began)
    ghost.holding = dict(job.holding)
    return ghost


def run_seed(seed: int) -> Outcome:
    """Play one seed."""
    try:
        return Faults(seed).play()
    except Exception as error:
        replay = f"python -m tests.brain.seeds --seed {seed}"
        raise AssertionError(f"seed {seed}: {error}; replay: {replay}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    seeds = range(options.seeds) if options.seed is None else [options.seed]
    outcomes = [run_seed(seed) for seed in seeds]
    for name in Outcome.__dataclass_fields__:
        print(f"{name}: {sum(getattr(each, name) for each in outcomes)}")


if __name__ == "__main__":
    main()
