"""One seed: a cluster, a while of faults, quiet, the end; and what must be true of it.

While faults come, only the invariants count. Once they stop, the job must reach a complete
round of the best possible size, and then finish with success.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from msgspec.structs import replace as replace_fields

from elastic_driver.job import units
from elastic_driver.job.rounds import RoundState
from elastic_driver.job.workers import SPARES, WorkerState
from elastic_driver.settings import Settings
from tests.sim.cluster import Cluster
from tests.sim.driver import MOMENTS
from tests.sim.faults import Faults
from tests.sim.workers import STEP_S, Violation

FAULTS_S = 25.0
QUIET_S = 60.0  # longer than the longest cool-down and every boot after it
FINISH_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """How a seed went."""

    seed: int
    elastic: bool
    rounds: int
    trained: int
    exit_code: int | None
    ignored: int
    replaced: int  # slow workers
    promoted: int  # spares
    repaired: int  # worlds
    events: int
    died: int  # drivers
    refused: int  # orders of earlier drivers
    reunited: tuple[int, ...]  # agents after a partition: those given up, those that went on


class SeedFailed(AssertionError):
    """A seed showed something that must not happen; carries the story."""

    def __init__(self, seed: int, why: str, trace: list[str], *, mortal: bool) -> None:
        kind = " --mortal" if mortal else ""
        replay = f"python -m tests.sim --seed {seed}{kind} --trace"
        super().__init__(f"seed {seed}: {why}; replay: {replay}")
        self.trace = trace


def settings_of(random: Random, slots: int) -> Settings:
    """Settings as different as users' are."""
    start_np = random.randint(1, slots)
    min_np = random.randint(1, start_np)
    max_np = random.choice([None, start_np, start_np + random.randint(0, 4)])
    return Settings(
        start_np=start_np,
        min_np=min_np,
        max_np=max_np,
        fruitless_restarts=10_000,  # bad luck must not end a job here
        host_failures=random.choice([None, None, 2, 5]),
        blacklist_cooldown=(1.0, 8.0),
        elastic_timeout=200.0,
        start_timeout=200.0,
        heartbeat_timeout=2.0,
        stop_grace=1.0,
        settle=random.choice([0.0, 0.3, 1.0]),
        last_call=random.choice([0.0, 0.02, 0.2]),
        plain_after=random.choice([0.5, 3.0]),
        on_difference="repair",
    )


def with_hosts_bounded(settings: Settings, seed: int, hosts: int) -> Settings:
    """Of every three seeds two are about node units, or bounds on the number of hosts.

    The bounds can be kept: the simulation brings every host back in the end.
    """
    random = Random(f"hosts of {seed}")
    unit = random.choice([1, 1, min(2, hosts), min(3, hosts)])
    least = random.choice([1, 1, unit])
    most = random.choice([None, None, random.randint(unit, 5)])
    bounded = replace(settings, node_unit=unit, min_hosts=least, max_hosts=most)
    if not units.limited(bounded):
        return settings
    # What is left of fewer hosts must be enough to train with.
    max_np = None if settings.max_np is None else max(settings.max_np, unit)
    return replace(bounded, min_np=1, max_np=max_np, start_np=1)


def with_slow_replaced(settings: Settings, seed: int) -> Settings:
    """Of every three seeds one replaces slow workers, sooner and more often than real jobs do."""
    random = Random(f"slow of {seed}")
    pause = random.choice([0.0, 1.0, 5.0])
    if random.random() < 2 / 3:
        return settings
    # Rather one worker less than there are slots: otherwise there is nowhere to go.
    most = max(settings.start_np, (settings.max_np or settings.start_np + 2) - 1)
    fewer = replace(settings, max_np=most)
    return replace(
        fewer, replace_slow=True, slow_for=random.choice([0.0, 0.5]), replace_pause=pause
    )


def with_spread(settings: Settings, seed: int) -> Settings:
    """In two of three seeds a first notice waits for others, as in real jobs."""
    random = Random(f"spread of {seed}")
    return replace(settings, notice_spread=random.choice([0.0, 1.0, 5.0]))


def with_spares(settings: Settings, seed: int) -> Settings:
    """Of every three seeds one keeps spares."""
    random = Random(f"spares of {seed}")
    return replace(settings, spares=random.choice([1, 1, 2]) if random.random() < 1 / 3 else 0)


def _plan_departure(cluster: Cluster, faults: Faults, seed: int) -> None:
    """In every fourth seed the whole job is told to go, in the midst of trouble or after it."""
    random = Random(f"departure of {seed}")
    if random.random() < 0.25:
        hosts = random.random() < 0.5
        # Hosts are let back when faults stop, for then the job is to grow; agents end all the same.
        deadline = random.choice([0.5, 2.0, 8.0, 8.0 if hosts else 30.0])
        at = random.uniform(2.0, FAULTS_S if hosts else FAULTS_S + 10.0)
        go = partial(faults.notice_to_all, deadline, hosts=hosts)
        cluster.clock.after(at, lambda: None if cluster.end else go())


def run_seed(seed: int, *, mortal: bool = False) -> Outcome:
    """Play one seed to its end, with drivers that may die; raises `SeedFailed` if it is wrong."""
    random = Random(seed)
    hosts = {f"h{n}": random.randint(1, 4) for n in range(random.randint(1, 4))}
    settings = with_slow_replaced(settings_of(random, sum(hosts.values())), seed)
    settings = with_spread(settings, seed)
    settings = with_hosts_bounded(settings, seed, len(hosts))
    settings = with_spares(settings, seed)
    settings = replace(settings, fixed_hosts=Random(f"fixed {seed}").random() < 0.5)
    cluster = Cluster(seed, settings, elastic=random.random() < 0.75, mortal=mortal)
    faults = Faults(cluster, hosts, seed, own_exits=random.random() < 0.4)
    cluster.agent_trouble = random.choice([0.0, 0.0, 0.15])
    _plan_departure(cluster, faults, seed)
    try:
        _play(cluster, faults)
    except Exception as error:
        raise SeedFailed(
            seed, f"{type(error).__name__}: {error}", cluster.trace, mortal=mortal
        ) from error
    return Outcome(
        seed,
        cluster.elastic,
        cluster.job.rounds.current.number,
        cluster.trained,
        cluster.end.exit_code if cluster.end else None,
        cluster.job.effects.ignored_events,
        cluster.replaced,
        cluster.promoted,
        cluster.differences.repaired,
        cluster.driver.handled,
        cluster.driver.died,
        cluster.refused,
        tuple(cluster.reunited),
    )


def _play(cluster: Cluster, faults: Faults) -> None:
    clock = cluster.clock

    def over() -> bool:
        return cluster.end is not None

    faults.discover()
    clock.after(cluster.random.uniform(0.1, 4.0), lambda: faults.inject_until(FAULTS_S))
    faults.partitions.part_until(FAULTS_S)
    if cluster.elastic:
        cluster.differences.differ_until(FAULTS_S)
    clock.run(FAULTS_S, over)
    if not over():
        cluster.driver.live_on()
        faults.heal()
        clock.run(FAULTS_S + QUIET_S, over)
    if not over():
        _check_best_size(cluster)
        cluster.differences.check_quiet()
        if cluster.driver.mortal:
            _check_after_a_crash(cluster)
        cluster.goal = cluster.trained + 10
        clock.run(FAULTS_S + QUIET_S + FINISH_S, over)
    _check_end(cluster, faults)


def _check_after_a_crash(cluster: Cluster) -> None:
    """A driver that dies between two events of a quiet job changes nothing; one more may follow."""
    clock, driver = cluster.clock, cluster.driver
    before, trained = _state(cluster), cluster.trained
    away = driver.random.uniform(0.0, 5.0)
    cluster.calm = True
    driver.die_between(away)
    clock.run(clock.now + away + 10.0, lambda: cluster.end is not None)
    if (after := _state(cluster)) != before:
        raise Violation(f"the job after a crash is {after}, it was {before}")
    if cluster.trained - trained < away / STEP_S:
        raise Violation("while no driver lived nobody trained")
    if driver.random.random() < 0.5:
        later = driver.random.uniform(0.0, 3.0)
        moment = driver.random.choice(MOMENTS)
        clock.after(later, lambda: driver.die_soon(moment, later))


def _state(cluster: Cluster) -> dict[str, object]:
    """Return the part of the job's state that a crash of its driver must not change."""
    status = cluster.job.status(cluster.driver.now)
    return {
        "members": status.members,
        "hosts": [(h.host, h.slots, h.state, h.workers and h.agent) for h in status.hosts],
        "round": (status.round, status.round_state),
        "wanted": status.wanted,
        "counters": replace_fields(status.counters, ignored_events=0),
    }


def _check_departure(cluster: Cluster) -> None:
    """It has ended in time; where the state was saved, nobody who could write was further."""
    job = cluster.job
    assert job.ending.departure is not None
    if cluster.ended_at > job.ending.departure.end_by + cluster.driver.waited + 1e-6:
        raise Violation(f"ended {cluster.ended_at - job.ending.departure.end_by:.3f} s too late")
    if job.final_checkpoint.save is None or not job.final_checkpoint.save.folder:
        return
    for worker in cluster.living():
        told = (
            worker.agent.reachable and not worker.agent.sealed
        )  # by the driver that ended the job
        able = told and worker.clean and not (worker.frozen or worker.doomed)
        if cluster.elastic and able and worker.version > cluster.on_disk:
            raise Violation(f"{worker.id} holds {worker.version}, on disk is {cluster.on_disk}")


def _check_best_size(cluster: Cluster) -> None:
    job = cluster.job
    slots = sum(host.slots for host in job.hosts.known.values())
    best = slots if job.capacity.wanted is None else min(slots, job.capacity.wanted)
    if job.rounds.current.state is not RoundState.COMPLETE:
        found = f"round {job.rounds.current.number} is {job.rounds.current.state}"
        raise Violation(f"quiet, but {found}: {job.effects.waiting}")
    if units.limited(job.settings):
        _check_best_hosts(cluster)
    elif (size := job.workers.count(WorkerState.RUNNING)) != best:
        raise Violation(f"quiet, but {size} workers train where {best} could")
    before = cluster.trained
    cluster.clock.run(cluster.clock.now + 2.0, lambda: cluster.end is not None)
    if cluster.trained <= before:
        raise Violation("quiet and complete, but nobody finishes a step")
    _check_spares(cluster)


def _check_spares(cluster: Cluster) -> None:
    """Each host that trains has its spares, unless some of them have failed there."""
    job = cluster.job
    spares = Counter(worker.host for worker in job.workers.having(*SPARES))
    for host in {worker.host for worker in job.workers.having(WorkerState.RUNNING)}:
        failed = job.spares.has_failed(host)
        if spares[host] != job.settings.spares * cluster.elastic and not failed:
            raise Violation(f"quiet, but {host} has {spares[host]} spares")


def _check_best_hosts(cluster: Cluster) -> None:
    """As many hosts as whole units allow, each with all its slots where any number is wanted."""
    job = cluster.job
    found = {host.name: host.slots for host in job.hosts.known.values()}
    best = len(units.whole(list(found), job.settings))
    inside = [w.host for w in job.workers.having(WorkerState.RUNNING)]
    if job.capacity.wanted is None and len(set(inside)) != best:
        raise Violation(f"quiet, but {len(set(inside))} hosts train where {best} could")
    slots = sum(found[host] for host in set(inside))
    if job.capacity.wanted is None and len(inside) != slots:
        raise Violation(f"quiet, but {len(inside)} of {slots} slots of these hosts train")


def _check_end(cluster: Cluster, faults: Faults) -> None:
    if cluster.end is None:
        raise Violation(f"everybody should have finished, but: {cluster.job.effects.waiting}")
    if cluster.end.exit_code == 0:
        if cluster.goal is None:
            raise Violation("success before anybody had finished the script")
        return
    if cluster.job.ending.departure is not None:
        _check_departure(cluster)
        return
    # Ending with a failure is right only where the script itself may be to blame.
    mismatches = sum("mismatch" in fault for fault in faults.injected)
    own = any("exit" in fault for fault in faults.injected) or mismatches > 1
    short = any("run_out" in fault for fault in faults.injected)
    small = short and "ran out of memory" in cluster.end.reason
    early = cluster.elastic and not cluster.job.outcome.has_progress
    if not own and not early and not small:
        raise Violation(f"failed without a reason: {cluster.end.reason}")
