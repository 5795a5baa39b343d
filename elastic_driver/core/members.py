"""The members of a round: their places, and the short form in which all of them travel.

Ranks of a host are contiguous, and everything else about a place follows from the slots in use.
So a `World` goes over the wire as hosts with runs of slots: 1 kB for a thousand members, 10 kB for
ten thousand, where a place for each member is a hundred times that, and every member receives all
of it. `Members` is that form, and works a place out when it is asked for. Pure data.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from typing import Annotated, NamedTuple, overload

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


class SlotRun(Struct, frozen=True, array_like=True):
    """Workers of one host in slots next to each other, in the order of their ranks."""

    slot: Index  # of the first
    count: Count
    incarnation: Index  # of all


class HostGroup(Struct, frozen=True, array_like=True):
    """Hosts that follow each other and have the same slots in use."""

    hosts: tuple[Annotated[str, Meta(min_length=1, max_length=253)], ...]
    runs: Annotated[tuple[SlotRun, ...], Meta(min_length=1)]


class Standings(Struct, frozen=True, array_like=True):
    """A run of `count` ranks that brought the same state along."""

    count: Count
    version: int
    clean: bool


class Roster(Struct, frozen=True, array_like=True):
    """The members of a round as they travel."""

    groups: tuple[HostGroup, ...]
    standings: tuple[Standings, ...]


class _HostBlock(NamedTuple):
    """Hosts of one group, and where they begin."""

    number: int  # among the blocks
    group: HostGroup
    local_size: int
    node: int  # rank of the first host
    rank: int  # of its first worker

    @property
    def behind(self) -> int:
        """The rank that follows its last worker's."""
        return self.rank + len(self.group.hosts) * self.local_size


class Members(Sequence[Member]):
    """The members by rank, worked out of a roster as they are asked for.

    Making one, and asking it for one member, costs what the groups of hosts do, not the hosts:
    every member of a round does both.
    """

    def __init__(self, roster: Roster) -> None:
        """Raises `ValueError` where the roster is too long or contradicts itself."""
        self.roster = roster
        self._blocks: list[_HostBlock] = []
        self._having: dict[int, list[int]] = {}  # by local rank, as they are asked for
        self._nodes = size = 0
        for number, group in enumerate(roster.groups):
            local_size = sum(run.count for run in group.runs)
            block = _HostBlock(number, group, local_size, self._nodes, size)
            self._blocks.append(block)
            self._nodes += len(group.hosts)
            size = block.behind
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
        block = next(block for block in self._blocks if rank < block.behind)
        offset, local_rank = divmod(rank - block.rank, block.local_size)
        return self._member(block, offset, local_rank)

    def named(self, worker: str) -> Member | None:
        """The entry of one worker, or None where it does not take part; without the others'."""
        host, _, rest = worker.rpartition(".")[0].rpartition(".")
        block = next((block for block in self._blocks if host in block.group.hosts), None)
        if block is None or not rest.isdecimal():
            return None
        slot, local_rank = int(rest), 0
        for run in block.group.runs:
            if run.slot <= slot < run.slot + run.count:
                offset = block.group.hosts.index(host)
                member = self._member(block, offset, local_rank + slot - run.slot)
                return member if member.worker == worker else None
            local_rank += run.count
        return None

    def _member(self, block: _HostBlock, offset: int, local_rank: int) -> Member:
        """The member with this local rank on the host at `offset` in its block."""
        slot, incarnation = _seat(block.group.runs, local_rank)
        host, node = block.group.hosts[offset], block.node + offset
        rank = block.rank + offset * block.local_size + local_rank
        having = self._hosts_with(local_rank)
        ranks = (rank, local_rank, having[block.number] + offset)
        sizes = (self._size, block.local_size, having[-1])
        place = SlotInfo(host, slot, *ranks, *sizes, node, self._nodes)
        standings = self.roster.standings[bisect_right(self._standing_from, rank) - 1]
        name = worker_id(host, slot, incarnation)
        return Member(name, place, standings.version, standings.clean)

    def _hosts_with(self, local_rank: int) -> list[int]:
        """Return how many hosts have this local rank, before each block and behind them all."""
        if local_rank not in self._having:
            counts = (len(b.group.hosts) * (b.local_size > local_rank) for b in self._blocks)
            self._having[local_rank] = list(accumulate(counts, initial=0))
        return self._having[local_rank]

    @cached_property
    def _standing_from(self) -> list[int]:
        counts = (standings.count for standings in self.roster.standings)
        return list(accumulate(counts, initial=0))[:-1]

    @cached_property
    def _all(self) -> tuple[Member, ...]:
        return tuple(
            self._member(block, offset, local_rank)
            for block in self._blocks
            for offset in range(len(block.group.hosts))
            for local_rank in range(block.local_size)
        )


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


def _runs(members: Iterable[Member]) -> tuple[SlotRun, ...]:
    runs: list[SlotRun] = []
    for member in members:
        place = member.place
        incarnation = int(member.worker.rpartition(".")[2])
        if member.worker != worker_id(place.host, place.slot, incarnation):
            raise ValueError(f"{member.worker} is no worker in slot {place.slot} of {place.host}")
        last = runs[-1] if runs else None
        if last and (last.slot + last.count, last.incarnation) == (place.slot, incarnation):
            runs[-1] = SlotRun(last.slot, last.count + 1, incarnation)
        else:
            runs.append(SlotRun(place.slot, 1, incarnation))
    return tuple(runs)


def _seat(runs: tuple[SlotRun, ...], local_rank: int) -> tuple[int, int]:
    """(slot, incarnation) of a host's worker."""
    for run in runs:
        if local_rank < run.count:
            return run.slot + local_rank, run.incarnation
        local_rank -= run.count
    raise IndexError("no such local rank")
