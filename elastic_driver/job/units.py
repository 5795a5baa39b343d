"""The hosts that may make up a world: whole units (`--node-unit`), within `--nnodes MIN:MAX`.

Called when a round is placed or completed, and when a change is considered. Hosts that do not make
up a unit are a reserve: their workers are started and wait, and join when they make up another unit
or replace a host that is gone. With too few hosts there is no world, and the job waits. A host
counts as long as it has one worker in the world.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from elastic_driver.job.workers import RUNNING, Worker
from elastic_driver.settings import Settings
from elastic_driver.words import counted


def limited(settings: Settings) -> bool:
    """Return whether the number of hosts is limited in any way."""
    return settings.node_unit > 1 or settings.min_hosts > 1 or settings.max_hosts is not None


def width(settings: Settings) -> int:
    """Return the fewest hosts that a world can have; they share its workers evenly."""
    return -(-max(1, settings.min_hosts) // settings.node_unit) * settings.node_unit


def one_more(hosts: int, settings: Settings, *, slots_needed: bool) -> bool:
    """Return whether a host is needed beside `hosts`: for its slots, or to make up a unit."""
    if settings.max_hosts is not None and hosts >= settings.max_hosts:
        return False
    return slots_needed or hosts < settings.min_hosts or hosts % settings.node_unit > 0


def whole(hosts: Sequence[str], settings: Settings) -> Sequence[str]:
    """Return the first of these hosts that make up whole units; none if they are too few."""
    count = len(hosts) if settings.max_hosts is None else min(len(hosts), settings.max_hosts)
    count -= count % settings.node_unit
    return hosts[:count] if count >= settings.min_hosts else hosts[:0]


def fit(workers: Iterable[Worker], settings: Settings) -> list[Worker]:
    """Return the workers that may be in one world, in the order given.

    Hosts that train now come first, then hosts that hold the newest state, so that the choice loses
    no finished step, then the hosts of the oldest workers.
    """
    there = list(workers)
    if not limited(settings):
        return there
    best = max((w.version for w in there if w.clean), default=-1)
    rank: dict[str, tuple[Any, ...]] = {}  # of a host: the least of each of its workers' values
    for worker in there:
        holds = worker.clean and worker.version == best
        mine = (worker.state is not RUNNING, not holds, worker.age)
        rank[worker.host] = tuple(map(min, mine, rank.get(worker.host, mine)))
    chosen = set(whole(sorted(rank, key=rank.__getitem__), settings))
    return [worker for worker in there if worker.host in chosen]


def shares(workers: list[Worker], settings: Settings, first: Sequence[Worker] = ()) -> list[Worker]:
    """Return the workers in the order in which to keep them if fewer are wanted: oldest first.

    `first` come before all others. If a world needs several hosts, one worker of each host comes
    before the second of any host.
    """
    by_age = [*first, *sorted(workers, key=lambda worker: worker.age)]
    if width(settings) == 1:
        return by_age
    seen: dict[str, int] = {}
    order = {host: n for n, host in enumerate(dict.fromkeys(w.host for w in by_age))}
    keyed: list[tuple[int, int, int]] = []
    for number, worker in enumerate(by_age):
        level = seen[worker.host] = seen.get(worker.host, -1) + 1
        keyed.append((order[worker.host] // width(settings), level, number))
    return [by_age[number] for _, _, number in sorted(keyed)]


def shortage(hosts: int, settings: Settings) -> str:
    """Return why this number of hosts is not enough; empty if it is."""
    if not limited(settings) or whole([""] * hosts, settings):
        return ""
    unit = settings.node_unit
    units = f" (in units of {unit})" if unit > 1 else ""
    have = counted(hosts, "host has", "hosts have")
    return f"{have} workers, {counted(width(settings), 'is', 'are')} needed{units}"
