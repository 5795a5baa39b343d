"""The members of a round, the short form in which they travel, and whose state wins.

Ranks of a host are contiguous, and everything else about a place follows from the slots in use.
So a `World` is sent as hosts with runs of slots: 1 kB for a thousand members, 10 kB for ten
thousand. A place for each member would be a hundred times as long, and every member receives all of
it. `Members` holds the short form and computes a place when it is asked for.

Each worker finds by itself which state all go on with (`source_of`), so that no messages are
needed; the driver does the same with its own records, for the event log. Pure.
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
    slot: int  # the device; it never changes, but a spare gets it only when it takes a slot
    rank: int
    local_rank: int  # counted anew each round, 0 … local_size − 1
    cross_rank: int  # index of this host among the hosts that have this local_rank
    size: int
    local_size: int
    cross_size: int  # number of hosts that have this local_rank
    node_rank: int  # index of the host in the round
    node_count: int


class Member(Struct, frozen=True, array_like=True):
    """A worker of a complete round, with the version of its state."""

    worker: str
    place: SlotInfo
    version: int = -1  # committed steps; −1: a newcomer that holds no trained state
    clean: bool = True  # its tensors are those of `version`
    phase: int = 0  # the number of the training function's call that it is in


class SlotRun(Struct, frozen=True, array_like=True):
    """Workers of one host in slots next to each other, in the order of their ranks."""

    slot: Index  # of the first
    count: Count
    incarnation: Index  # of all
    shift: int = 0  # from the slot to the one in the name; not 0 only if it was a spare


class HostGroup(Struct, frozen=True, array_like=True):
    """Hosts that follow each other and have the same slots in use."""

    hosts: tuple[Annotated[str, Meta(min_length=1, max_length=253)], ...]
    runs: Annotated[tuple[SlotRun, ...], Meta(min_length=1)]


class Standings(Struct, frozen=True, array_like=True):
    """A run of `count` ranks with the same version of the state, in the same training function."""

    count: Count
    version: int
    clean: bool
    phase: int = 0


class Roster(Struct, frozen=True, array_like=True):
    """The members of a round as they travel."""

    groups: tuple[HostGroup, ...]
    standings: tuple[Standings, ...]


class _HostBlock(NamedTuple):
    """The hosts of one group, the slots in use on each, and their first ranks."""

    number: int  # among the blocks
    hosts: tuple[str, ...]
    seats: list[tuple[int, int]]  # slot in the name and incarnation, by local rank
    slots: list[int]  # by local rank
    node: int  # rank of the first host
    rank: int  # of its first worker


class Members(Sequence[Member]):
    """The members by rank; each is computed from the roster when it is asked for.

    Creating this object and reading one member are O(groups of hosts), not O(hosts), because every
    member of a round does both.
    """

    def __init__(self, roster: Roster) -> None:
        """Raises `ValueError` for a roster that is too long or contradicts itself."""
        self.roster = roster
        self._blocks: list[_HostBlock] = []
        self._having: dict[int, list[int]] = {}  # hosts before each block, by local rank
        self._states_from = list(accumulate((s.count for s in roster.standings), initial=0))
        sizes = (len(group.hosts) * sum(r.count for r in group.runs) for group in roster.groups)
        self._size = sum(sizes)
        if self._size > MAX_MEMBERS or self._states_from[-1] != self._size:
            raise ValueError(f"a roster of {self._size} members is too long or contradicts itself")
        self._nodes = rank = 0
        for number, group in enumerate(roster.groups):
            seats = [
                (r.slot + r.shift + i, r.incarnation) for r in group.runs for i in range(r.count)
            ]
            slots = [r.slot + i for r in group.runs for i in range(r.count)]
            self._blocks.append(_HostBlock(number, group.hosts, seats, slots, self._nodes, rank))
            self._nodes += len(group.hosts)
            rank += len(group.hosts) * len(seats)

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
        block = next(block for block in reversed(self._blocks) if block.rank <= rank)
        return self._member(block, *divmod(rank - block.rank, len(block.seats)))

    def named(self, worker: str) -> Member | None:
        """Return one worker's entry, without computing the others'; None if it is no member."""
        host, *numbers = worker.rsplit(".", 2)
        if len(numbers) == 2 and all(number.isdecimal() for number in numbers):
            seat = (int(numbers[0]), int(numbers[1]))
            for block in self._blocks:
                if host in block.hosts and seat in block.seats:
                    offset = block.hosts.index(host)
                    local_rank = block.seats.index(seat)
                    member = self._member(block, offset, local_rank)
                    return member if member.worker == worker else None
        return None

    def _member(self, block: _HostBlock, offset: int, local_rank: int) -> Member:
        """Return the member with this local rank on the host at `offset` in its block."""
        named, incarnation = block.seats[local_rank]
        host = block.hosts[offset]
        local_size = len(block.seats)
        rank = block.rank + offset * local_size + local_rank
        having = self._hosts_with(local_rank)
        ranks = (rank, local_rank, having[block.number] + offset)
        sizes = (self._size, local_size, having[-1])
        node = block.node + offset
        place = SlotInfo(host, block.slots[local_rank], *ranks, *sizes, node, self._nodes)
        state = self.roster.standings[bisect_right(self._states_from, rank) - 1]
        return Member(
            worker_id(host, named, incarnation), place, state.version, state.clean, state.phase
        )

    def _hosts_with(self, local_rank: int) -> list[int]:
        """Return how many hosts have this local rank, before each block and behind them all."""
        if local_rank not in self._having:
            counts = (len(b.hosts) * (len(b.seats) > local_rank) for b in self._blocks)
            self._having[local_rank] = list(accumulate(counts, initial=0))
        return self._having[local_rank]

    @cached_property
    def _all(self) -> tuple[Member, ...]:
        return tuple(
            self._member(block, offset, local_rank)
            for block in self._blocks
            for offset in range(len(block.hosts))
            for local_rank in range(len(block.seats))
        )


def roster_of(members: Sequence[Member]) -> Roster:
    """Return the short form of these members; raises `ValueError` if they cannot be a round."""
    by_host = groupby(members, key=lambda member: member.place.host)
    in_use = [(host, _runs(those)) for host, those in by_host]
    groups = [
        HostGroup(tuple(host for host, _ in alike), runs)
        for runs, alike in groupby(in_use, key=lambda host: host[1])
    ]
    return Roster(tuple(groups), standings_of(members))


def standings_of(members: Sequence[Member]) -> tuple[Standings, ...]:
    """Return the versions of the members' states, in runs."""
    return tuple(
        Standings(sum(1 for _ in alike), *standing)
        for standing, alike in groupby(members, key=lambda m: (m.version, m.clean, m.phase))
    )


def _runs(members: Iterable[Member]) -> tuple[SlotRun, ...]:
    runs: list[SlotRun] = []
    for member in members:
        place = member.place
        named, incarnation = map(int, member.worker.rsplit(".", 2)[1:])
        if member.worker != worker_id(place.host, named, incarnation):
            raise ValueError(f"{member.worker} is no worker in slot {place.slot} of {place.host}")
        last = runs[-1] if runs else None
        alike = incarnation, named - place.slot
        if last and (last.slot + last.count, last.incarnation, last.shift) == (place.slot, *alike):
            runs[-1] = SlotRun(last.slot, last.count + 1, *alike)
        else:
            runs.append(SlotRun(place.slot, 1, *alike))
    return tuple(runs)


class StateVersion(NamedTuple):
    """The state that a worker brings into a round.

    `steps`: committed steps it stands for (−1: nothing trained yet). `clean`: its tensors are
    exactly those, not the ones of a step that was broken off.
    """

    steps: int = -1
    clean: bool = True

    @property
    def trained(self) -> bool:
        """Return whether the worker has trained at all."""
        return self.steps >= 0


def source_of(states: Sequence[StateVersion]) -> int | None:
    """Return the rank whose state all ranks go on with; `states` are in the order of ranks.

    Only clean states count: one between two commits is nobody's. The one with the most steps wins,
    then the lowest rank. If no rank has trained, it is the lowest clean rank. None if the state was
    trained and no rank has it whole, or no rank is clean.
    """
    clean = [rank for rank, state in enumerate(states) if state.clean]
    trained = [rank for rank in clean if states[rank].trained]
    if trained:
        return max(trained, key=lambda rank: (states[rank].steps, -rank))
    lost = any(state.trained for state in states)
    return clean[0] if clean and not lost else None


def receivers_of(
    states: Sequence[StateVersion], source: int, *, repair: bool = False
) -> frozenset[int]:
    """Return the ranks that take over the state of `source`.

    A rank keeps its own state if it is clean and has as many steps. If no rank has trained, all
    others receive, because each has drawn its own first values. With `repair` they do so because
    ranks with the same number of steps were found to hold different states.
    """
    sent = states[source]
    if repair or not sent.trained:
        return frozenset(range(len(states))) - {source}
    return frozenset(rank for rank, state in enumerate(states) if state != sent) - {source}
