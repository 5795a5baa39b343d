"""Moves work away from slow ranks: carries out what `policies.stragglers.balance` decides.

`SlowRanks` owns one and hands it what the workers have written, at each look. Only ranks whose
`FixedBatch` takes its shares from the driver (`--balance`) say what theirs are; without all of
them nothing is decided. What a step cost a worker is remembered over a change of the world,
so that the survivors need not be held up again before a slow one is known.

Called by the driver's mailbox thread. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic_driver import contract
from elastic_driver.core.decisions import Announce
from elastic_driver.core.documents import Allocation, Progress, World, encode
from elastic_driver.policies.stragglers.balance import Balancer, Cost, Move
from rendezvous.errors import RendezvousError
from rendezvous.wire import Operation, Result, Set

Apply = Callable[[Sequence[Operation]], tuple[Result, ...]]


class WorkMover:
    """Gives shares to the ranks of the newest round.

    `apply` carries out operations on the job's store, within a second or it raises
    RendezvousError.
    """

    def __init__(self, apply: Apply) -> None:
        self._apply = apply
        self._world: World | None = None
        self._balancer = Balancer(())
        self._pending: Move | None = None  # decided, and not published yet

    def enter(self, world: World) -> None:
        """A round is complete: forget the one before, but for what its survivors are like."""
        before = self._world.members if self._world is not None else ()
        known = {m.worker: c for m, c in zip(before, self._balancer.costs(), strict=True)}
        self._balancer = Balancer(
            [member.place.host for member in world.members],
            known=[known.get(member.worker) for member in world.members],
        )
        self._world, self._pending = world, None

    def look(self, read: Sequence[Progress | None]) -> list[Announce]:
        """Take in what each rank has written (None: nothing new); what was moved, if anything."""
        world = self._world
        if world is None:
            return []
        for rank, progress in enumerate(read):
            if progress is not None and progress.division is not None:
                self._balancer.divided(rank, progress.division)
                for sample in progress.samples:
                    rest = max(sample.compute - sample.one_pass, 0.0) + sample.exchange
                    cost = Cost(sample.one_pass, rest)
                    self._balancer.measured(rank, sample.step, cost)
        move = self._pending or self._balancer.decide()
        if move is None:
            return []
        given = Allocation(world.round, move.shares, move.reason)
        try:
            self._apply([Set(contract.JOB_ALLOCATION, encode(given))])
        except RendezvousError:  # the store has more to do than it can: the next look tries again
            self._pending = move
            return []
        self._pending = None
        return [_announce(move, world)]


def _announce(move: Move, world: World) -> Announce:
    """The event, about the rank that held the others up."""
    last = world.members[move.last]
    return Announce(
        "work_moved",
        move.reason,
        round=world.round,
        host=last.place.host,
        slot=last.place.slot,
        rank=move.last,
        worker=last.worker,
        detail={"shares": " ".join(map(str, move.shares))},
    )
