"""Ranks: the place of each member of a round.

Hosts come in the order of their oldest member, inside a host members come by age. So the
ranks of a host are contiguous, the oldest member is rank 0, survivors keep their order and
newcomers follow the survivors of their host. The meaning of the local and cross numbers is
Horovod's: https://horovod.readthedocs.io/en/stable/concepts_include.html
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from elastic_driver.core.members import SlotInfo


class Seat(NamedTuple):
    """A worker that is to get a rank; smaller `age` is older."""

    worker: str
    host: str
    slot: int
    age: tuple[bool, int]


def assign(seats: Iterable[Seat]) -> list[tuple[str, SlotInfo]]:
    """Return (worker, place) for every seat, ordered by rank; O(n log n)."""
    hosts: dict[str, list[Seat]] = {}
    for seat in sorted(seats, key=lambda seat: seat.age):
        hosts.setdefault(seat.host, []).append(seat)
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
