"""Which rank trains how many of a step's micro-batches, where the driver gives the shares.

With `--balance` the driver moves work away from slow ranks (`policies.stragglers.balance`) and
publishes
the new shares. When a rank hears of that is chance, so only rank 0 listens, and every few steps it
passes on what it knows: a broadcast of some numbers, begun with the step and complete with its
gradients.
What all ranks have received by then holds from the next step on. Whoever dies on the way breaks
the step itself for everybody, and the next world begins with equal shares.

`FixedBatch` owns a `Division`. The broadcast goes through torch's default group, like the
gradients, and costs the training thread a tenth of a millisecond in every fourth step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from elastic_driver.batch.microbatches import allocate_microbatches
from elastic_driver.core import documents
from elastic_driver.worker import current
from elastic_driver.worker.world import session

__all__ = ["Division"]

EVERY = 4  # steps from one broadcast to the next

_World = tuple[int, int, int]  # round, number of ranks, virtual workers


class Division:
    """The shares in force in the world this process is in, the same on every rank of it."""

    def __init__(
        self, newest: Callable[[], documents.Allocation | None] | None = None, every: int = EVERY
    ) -> None:
        """`newest`: what the driver has given last; by default what this worker has heard.

        `every`: steps from one broadcast to the next, the same on every rank.
        """
        self._newest, self._every = newest or _heard, every
        self._world: _World | None = None
        self._shares: list[int] = []
        self._rank = 0
        self._sent: tuple[torch.Tensor, Any] | None = None  # a broadcast under way

    def enter(self, rank: int, size: int, virtual_workers: int) -> list[int]:
        """The shares by rank: those agreed on in this world, equal ones where it is new."""
        round_id = current.round_id() if current.is_initialized() else 0
        world = (round_id, size, virtual_workers)
        if world != self._world:
            self._world, self._shares = world, allocate_microbatches(virtual_workers, size)
        self._rank, self._sent = rank, None
        self._tell()
        return self._shares

    def begin(self, step: int, device: torch.device) -> None:
        """Step number `step` begins. Collective, by all ranks in the same steps."""
        if step % self._every == 0 and len(self._shares) > 1:
            shares = self._news() if self._rank == 0 else None
            message = torch.tensor([0] * len(self._shares) if shares is None else shares)
            message = message.to(device)
            self._sent = message, dist.broadcast(message, 0, async_op=True)

    def finish(self) -> list[int] | None:
        """The step's gradients are there; the shares from the next step on, if they are others."""
        if self._sent is None:
            return None
        message, work = self._sent
        self._sent = None
        work.wait()
        shares: list[int] = message.tolist()
        if not any(shares):
            return None
        self._shares = shares
        self._tell()
        return shares

    def _news(self) -> list[int] | None:
        """What to pass on: shares of this very world and batch that are not in force yet."""
        given = self._newest()
        if given is None or self._world is None:
            return None
        round_id, size, virtual_workers = self._world
        shares = list(given.shares)
        fits = given.round == round_id and len(shares) == size and min(shares) >= 0
        if not fits or sum(shares) != virtual_workers or shares == self._shares:
            return None
        return shares

    def _tell(self) -> None:
        """Have the heartbeat report this rank's share, and on rank 0 listen for others."""
        member = session.membership()
        if member is None or self._world is None:
            return
        member.progress.division = documents.Division(self._world[2], self._shares[self._rank])
        member.progress.wants_allocations = self._rank == 0


def _heard() -> documents.Allocation | None:
    member = session.membership()
    return None if member is None else member.progress.allocation
