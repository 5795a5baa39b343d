"""The plan of one seed: the calls of each rank, and what has to come of them; pure.

All ranks compute the same plan, and each carries out its part: its calls in its own order, some of
them only after all ranks have met ("late"), some never. A call is right on all ranks, or one
thing is wrong with it (`Fault`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum
from itertools import combinations

KINDS = ("allreduce", "grouped", "allgather", "broadcast", "reducescatter", "alltoall")
DTYPES = ("float32", "float64", "int32", "int64", "int16", "uint8")
OPS = ("Average", "Sum", "Min", "Max", "Product")
SCATTERED_OPS = OPS[:2]
SHAPES = ((1,), (3,), (7, 2), (2, 3, 4), (64, 33), (5, 0))
LARGE = (1_100_000,)  # is not fused


class Fault(Enum):
    """What is wrong with a call."""

    NONE = "right"
    DISAGREES = "ranks disagree"
    TWICE = "called twice"
    FORGOTTEN = "forgotten"


@dataclass(frozen=True)
class Call:
    """One call as one rank makes it.

    Args:
        root: of a broadcast, a rank of the world.
        rows: added to the first dimension, for what may have another number of rows on each rank.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    op: str
    root: int
    process_set: int
    rows: int = 0


@dataclass(frozen=True)
class Planned:
    """A call of several ranks.

    Args:
        calls: by rank; a rank that is missing never makes it.
        late: ranks that make it after all have met only.
        twice: the rank that makes it twice; -1: none.
    """

    name: str
    fault: Fault
    members: tuple[int, ...]
    calls: dict[int, Call]
    late: frozenset[int]
    twice: int = -1


@dataclass(frozen=True)
class Plan:
    """All calls of one seed.

    Args:
        orders: by rank, the numbers of its calls in the order in which it makes them.
        steps: by rank, how many steps it makes before it joins; none: nobody joins.
    """

    seed: int
    planned: tuple[Planned, ...]
    orders: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]


def process_sets(size: int) -> list[tuple[int, ...]]:
    """Return the ranks of each process set; the world is the first."""
    everyone = tuple(range(size))
    smaller = [each for count in range(1, size) for each in combinations(everyone, count)]
    return [everyone, *smaller[:: max(1, len(smaller) // 4)]]


def plan_of(seed: int, size: int) -> Plan:
    """Return the plan of a seed for a world of `size` ranks; the same on all of them."""
    rng = random.Random(f"{seed}/{size}")
    forgetful = rng.random() < 0.1  # these seeds take as long as a stall
    planned = tuple(
        _planned(rng, f"{seed}.{number}", size, forgetful) for number in range(rng.randint(1, 30))
    )
    orders = []
    for rank in range(size):
        numbers = [n for n, each in enumerate(planned) if rank in each.calls]
        if rng.random() < 0.8:
            rng.shuffle(numbers)
        orders.append(tuple(numbers))
    joins = rng.random() < 0.3
    steps = tuple(rng.randint(0, 6) for _ in range(size)) if joins else ()
    return Plan(seed, planned, tuple(orders), steps)


def ops_of(kind: str) -> tuple[str, ...]:
    """Return the operations of a kind; those that do not compute have any."""
    return SCATTERED_OPS if kind == "reducescatter" else OPS


def _planned(rng: random.Random, name: str, size: int, forgetful: bool) -> Planned:
    sets = process_sets(size)
    number = rng.randrange(len(sets)) if rng.random() < 0.3 else 0
    members = sets[number]
    shape = LARGE if rng.random() < 0.01 else rng.choice(SHAPES)
    root = rng.choice(members)
    kind = rng.choice(KINDS)
    call = Call(name, kind, rng.choice(DTYPES), shape, rng.choice(ops_of(kind)), root, number)
    calls = dict.fromkeys(members, call)
    if kind in ("allgather", "alltoall"):
        calls = {rank: replace(call, rows=rng.randint(0, 3)) for rank in members}
    late = frozenset(rank for rank in members if rng.random() < 0.1)
    faults = [Fault.DISAGREES, Fault.TWICE] + [Fault.FORGOTTEN] * (4 * forgetful)
    fault = rng.choice(faults) if len(members) > 1 and rng.random() < 0.3 else Fault.NONE
    if fault is Fault.NONE:
        return Planned(name, fault, members, calls, late)
    odd, other = rng.sample(members, 2)
    if fault is Fault.DISAGREES:
        calls[odd] = _changed(rng, calls[odd], members)
        return Planned(name, fault, members, calls, late)
    if fault is Fault.TWICE:  # the first is pending for sure, as long as another rank is late
        return Planned(name, fault, members, calls, (late - {odd}) | {other}, odd)
    if rng.random() < 0.5:
        kind = _other(rng, ("allgather", "broadcast", "alltoall"), call.kind)
        calls[odd] = replace(calls[odd], kind=kind)
    else:
        del calls[odd]
    return Planned(name, fault, members, calls, frozenset())


def _changed(rng: random.Random, call: Call, members: tuple[int, ...]) -> Call:
    """Return a call of the same name and kind that cannot be carried out with the others."""
    ways = [replace(call, dtype=_other(rng, DTYPES, call.dtype))]
    beyond = (*call.shape[:1], *(n + 1 for n in call.shape[1:]), 2)
    ways.append(replace(call, shape=beyond))
    if call.kind in ("allreduce", "grouped", "reducescatter"):
        ways.append(replace(call, op=_other(rng, ops_of(call.kind), call.op)))
        ways.append(replace(call, shape=(call.shape[0] + 1, *call.shape[1:])))
    if call.kind == "broadcast":
        ways.append(replace(call, root=_other(rng, members, call.root)))
    return rng.choice(ways)


def _other(rng: random.Random, values: tuple, *but: object):  # type: ignore[no-untyped-def,type-arg]
    return rng.choice([value for value in values if value not in but])
