"""Ranks: the place of each member of a round.

Hosts come in the order of their oldest member, inside a host members come by age. So the
ranks of a host are contiguous, the oldest member is rank 0, survivors keep their order and
newcomers follow the survivors of their host. The meaning of the local and cross numbers is
Horovod's: https://horovod.readthedocs.io/en/stable/concepts_include.html

A newcomer of Horovod's API is told a rank before it is in a world. It gets that one wherever the
ranks of a host stay contiguous and the oldest member stays rank 0: other survivors make room.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from elastic_driver.words.world import SlotInfo

NOT_TOLD = -1  # in place of a rank


class Seat(NamedTuple):
    """A worker that is to get a rank; smaller `age` is older, (True, …) was in no world yet.

    `told`: the rank that it counts on.
    """

    worker: str
    host: str
    slot: int
    age: tuple[bool, int]
    told: int = NOT_TOLD


def assign(seats: Iterable[Seat], *, by_age: bool = False) -> list[tuple[str, SlotInfo]]:
    """Return (worker, place) for every seat, ordered by rank; O(n log n).

    `by_age`: hosts come in the order of their oldest member, whatever ranks were told.
    """
    hosts: dict[str, list[Seat]] = {}
    in_order = sorted(seats, key=lambda seat: seat.age)
    for seat in in_order:
        hosts.setdefault(seat.host, []).append(seat)
    if any(seat.told != NOT_TOLD for seat in in_order):
        hosts = _as_told(hosts, in_order[0], len(in_order), by_age=by_age)
    size = sum(map(len, hosts.values()))
    hosts_with = Counter(n for members in hosts.values() for n in range(len(members)))
    places: list[tuple[str, SlotInfo]] = []
    seen = Counter[int]()  # hosts so far that have this local rank
    for node_rank, members in enumerate(hosts.values()):
        for local_rank, seat in enumerate(members):
            ranks = (len(places), local_rank, seen[local_rank])
            sizes = (size, len(members), hosts_with[local_rank])
            place = SlotInfo(seat.host, seat.slot, *ranks, *sizes, node_rank, len(hosts))
            seen[local_rank] += 1
            places.append((seat.worker, place))
    return places


def _as_told(
    hosts: dict[str, list[Seat]], oldest: Seat, size: int, *, by_age: bool
) -> dict[str, list[Seat]]:
    """Return the hosts, and the seats of each, in an order that gives seats the ranks told.

    A member that was in a world before stays first: scripts broadcast from rank 0.
    """
    first = None if oldest.age[0] else oldest
    by_oldest = _seated(list(hosts), hosts, first)
    if by_age:
        return by_oldest
    told = {
        name: [seat.told for seat in there if NOT_TOLD < seat.told < size]
        for name, there in hosts.items()
    }
    left = dict(hosts)
    order = list[str]()
    start = 0
    while left:
        order.append(first.host if first and not order else _next_host(left, told, start))
        start += len(left.pop(order[-1]))
    making_room = _seated(order, hosts, first)
    return making_room if _kept(making_room) > _kept(by_oldest) else by_oldest


def _seated(
    order: Iterable[str], hosts: dict[str, list[Seat]], first: Seat | None
) -> dict[str, list[Seat]]:
    """Return the hosts in this order, each with its seats in order."""
    seated = dict[str, list[Seat]]()
    start = 0
    for name in order:
        seated[name] = _in_host(hosts[name], start, first)
        start += len(hosts[name])
    return seated


def _kept(hosts: dict[str, list[Seat]]) -> int:
    """Return how many seats have the rank that they were told."""
    return sum(seat.told == rank for rank, seat in enumerate(chain(*hosts.values())))


def _next_host(left: dict[str, list[Seat]], told: dict[str, list[int]], start: int) -> str:
    """Return the host whose ranks begin at `start`: the first one, unless that passes one over."""
    fitting = [
        name
        for name, there in left.items()
        if all(start <= rank < start + len(there) for rank in told[name])
    ]
    first = fitting[0] if fitting else next(iter(left))
    due = [name for name in fitting if told[name] and min(told[name]) < start + len(left[first])]
    return min(due, key=lambda name: min(told[name]), default=first)


def _in_host(there: list[Seat], start: int, first: Seat | None) -> list[Seat]:
    """Return the seats of a host, whose ranks begin at `start`; `first` keeps its place there."""
    placed: dict[int, Seat] = {0: first} if first in there else {}
    for seat in there:
        if seat is not first and 0 <= (at := seat.told - start) < len(there):
            placed.setdefault(at, seat)
    seated = {seat.worker for seat in placed.values()}
    others = (seat for seat in there if seat.worker not in seated)
    return [placed[at] if at in placed else next(others) for at in range(len(there))]
