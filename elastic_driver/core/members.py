"""Who takes part in a round: places, and the short form in which all of them travel.

Ranks of a host are contiguous, and everything else about a place follows from who sits where. So a
`World` goes over the wire as hosts with runs of slots: 1 kB for a thousand members, 10 kB for ten
thousand, where a place for each member is a hundred times that, and every member receives all of
it. `Members` is that form, and works a place out when somebody asks for it. Pure data.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Annotated, overload

from msgspec import Meta, Struct

from elastic_driver.contract import worker_id

MAX_MEMBERS = 10**6
Count = Annotated[int, Meta(ge=1, le=MAX_MEMBERS)]
Index = Annotated[int, Meta(ge=0, le=2**31)]


class SlotInfo(Struct, frozen=True, array_like=True):
    """One worker's place in a round (meaning of the six numbers as in Horovod)."""

    host: str
    slot: int  # names the device; never changes in a process's life
    rank: int
    local_rank: int  # counted anew each round, 0 … local_size − 1
    cross_rank: int  # index of this host among the hosts that have this local_rank
    size: int
    local_size: int
    cross_size: int  # number of hosts that have this local_rank
    node_rank: int  # index of the host in the round
    node_count: int


class Member(Struct, frozen=True, array_like=True):
    """A worker of a complete round, with the state it brought along."""

    worker: str
    place: SlotInfo
    version: int = -1  # committed steps; −1: a newcomer that holds no trained state
    clean: bool = True  # its tensors are those of `version`


class Run(Struct, frozen=True, array_like=True):
    """Workers of one host in slots next to each other, in the order of their ranks."""

    slot: Index  # of the first
    count: Count
    incarnation: Index  # of all


class HostGroup(Struct, frozen=True, array_like=True):
    """Hosts that follow each other and have the same slots in use."""

    hosts: tuple[Annotated[str, Meta(min_length=1, max_length=253)], ...]
    runs: Annotated[tuple[Run, ...], Meta(min_length=1)]


class Standings(Struct, frozen=True, array_like=True):
    """So many ranks that follow each other brought the same state along."""

    count: Count
    version: int
    clean: bool


class Roster(Struct, frozen=True, array_like=True):
    """The members of a round as they travel."""

    groups: tuple[HostGroup, ...]
    standings: tuple[Standings, ...]


class Members(Sequence[Member]):
    """The members by rank, worked out of a roster as they are asked for."""

    def __init__(self, roster: Roster) -> None:
        """Raises `ValueError` where the roster is too long or contradicts itself."""
        self.roster = roster
        self._hosts: list[str] = []
        self._runs: list[tuple[Run, ...]] = []  # by host
        self._first: list[int] = []  # by host: the rank of its first worker
        self._sizes: list[int] = []  # by host
        size = 0
        for group in roster.groups:
            local_size = sum(run.count for run in group.runs)
            hosts = len(group.hosts)
            self._hosts += group.hosts
            self._runs += [group.runs] * hosts
            self._first += range(size, size + hosts * local_size, local_size)
            self._sizes += [local_size] * hosts
            size += hosts * local_size
        self._size = size
        if size > MAX_MEMBERS or sum(s.count for s in roster.standings) != size:
            raise ValueError(f"a roster of {size} members is too long or contradicts itself")

    def __len__(self) -> int:
        return self._size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # equal to tuples, which hash otherwise

    def __iter__(self) -> Iterator[Member]:
        return iter(self._all)

    @overload
    def __getitem__(self, index: int) -> Member: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Member]: ...
    def __getitem__(self, index: int | slice) -> Member | Sequence[Member]:
        if isinstance(index, slice):
            return self._all[index]
        rank = range(self._size)[index]  # IndexError, and negative ones count from the end
        node = bisect_right(self._first, rank) - 1
        return self._member(node, rank - self._first[node])

    def named(self, worker: str) -> Member | None:
        """The entry of one worker, or None where it does not take part; without the others'."""
        host, _, rest = worker.rpartition(".")[0].rpartition(".")
        if host not in self._hosts or not rest.isdecimal():
            return None
        node, slot, local_rank = self._hosts.index(host), int(rest), 0
        for run in self._runs[node]:
            if run.slot <= slot < run.slot + run.count:
                member = self._member(node, local_rank + slot - run.slot)
                return member if member.worker == worker else None
            local_rank += run.count
        return None

    def _member(self, node: int, local_rank: int) -> Member:
        """One member, at a cost that grows with the number of hosts."""
        slot, incarnation = _seat(self._runs[node], local_rank)
        before = sum(size > local_rank for size in self._sizes[:node])
        return self._at(node, local_rank, slot, incarnation, before)

    def _at(self, node: int, local: int, slot: int, incarnation: int, cross: int) -> Member:
        host, rank = self._hosts[node], self._first[node] + local
        place = SlotInfo(
            host,
            slot,
            rank,
            local,
            cross,
            self._size,
            self._sizes[node],
            self._hosts_with[local],
            node,
            len(self._hosts),
        )
        standings = self.roster.standings[bisect_right(self._standing_from, rank) - 1]
        name = worker_id(host, slot, incarnation)
        return Member(name, place, standings.version, standings.clean)

    @cached_property
    def _hosts_with(self) -> list[int]:
        """By local rank: how many hosts have it."""
        counts = Counter(self._sizes)
        having = [0] * max(self._sizes, default=0)
        for size, hosts in counts.items():
            for local_rank in range(size):
                having[local_rank] += hosts
        return having

    @cached_property
    def _standing_from(self) -> list[int]:
        first, ranks = 0, []
        for standings in self.roster.standings:
            ranks.append(first)
            first += standings.count
        return ranks

    @cached_property
    def _all(self) -> tuple[Member, ...]:
        seen = [0] * len(self._hosts_with)
        members = []
        for node, runs in enumerate(self._runs):
            local_rank = 0
            for run in runs:
                for slot in range(run.slot, run.slot + run.count):
                    cross = seen[local_rank]
                    members.append(self._at(node, local_rank, slot, run.incarnation, cross))
                    seen[local_rank] += 1
                    local_rank += 1
        return tuple(members)


def roster_of(members: Sequence[Member]) -> Roster:
    """The short form of these members; raises `ValueError` where they cannot be a round."""
    by_host = groupby(members, key=lambda member: member.place.host)
    in_use = [(host, _runs(those)) for host, those in by_host]
    groups = [
        HostGroup(tuple(host for host, _ in alike), runs)
        for runs, alike in groupby(in_use, key=lambda host: host[1])
    ]
    standings = [
        Standings(sum(1 for _ in alike), version, clean)
        for (version, clean), alike in groupby(members, key=lambda m: (m.version, m.clean))
    ]
    return Roster(tuple(groups), tuple(standings))


def _runs(members: Iterable[Member]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for member in members:
        place = member.place
        incarnation = int(member.worker.rpartition(".")[2])
        if member.worker != worker_id(place.host, place.slot, incarnation):
            raise ValueError(f"{member.worker} is no worker in slot {place.slot} of {place.host}")
        last = runs[-1] if runs else None
        if last and (last.slot + last.count, last.incarnation) == (place.slot, incarnation):
            runs[-1] = Run(last.slot, last.count + 1, incarnation)
        else:
            runs.append(Run(place.slot, 1, incarnation))
    return tuple(runs)


def _seat(runs: tuple[Run, ...], local_rank: int) -> tuple[int, int]:
    """(slot, incarnation) of a host's worker."""
    for run in runs:
        if local_rank < run.count:
            return run.slot + local_rank, run.incarnation
        local_rank -= run.count
    raise IndexError("no such local rank")
