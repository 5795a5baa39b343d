"""The micro-batches of each rank, where the driver balances them.

With `--balance` the driver moves work away from slow ranks (`policies.balance`) and
publishes the new shares. Ranks would read them at different steps, so only rank 0 reads them. Every
few steps it broadcasts the newest shares; the broadcast begins with the step and ends with its
gradients. The received shares hold from the next step on. If a rank is lost meanwhile, the step
itself fails on all ranks, and the next world begins with equal shares.

The broadcast uses torch's default group, like the gradients, and costs the training thread a tenth
of a millisecond in every fourth step.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from elastic_driver.policies.microbatches import allocate_microbatches
from elastic_driver.words import orders as documents
from elastic_driver.words.progress import Division
from elastic_driver.worker import current
from elastic_driver.worker.heartbeat.progress import TrainingProgress
from elastic_driver.worker.world import session

EVERY = 4  # steps from one broadcast to the next


class BalancedShares:
    """The shares in force in the world of this process, the same on every rank.

    Args:
        newest: returns the newest shares of the driver; by default from the heartbeat.
        every: steps from one broadcast to the next, the same on every rank.
    """

    def __init__(
        self, newest: Callable[[], documents.Allocation | None] | None = None, every: int = EVERY
    ) -> None:
        self._progress = TrainingProgress()  # the membership's, once this process is in a world
        self._newest, self._every = newest or (lambda: self._progress.allocation), every
        self._world = (-1, 0, 0)  # round, number of ranks, virtual workers
        self._shares: list[int] = []
        self._rank = 0
        self._sent: tuple[torch.Tensor, Any] | None = None  # a pending broadcast

    def enter(self, rank: int, size: int, virtual_workers: int) -> list[int]:
        """Return the current shares by rank; in a new world all ranks have equal shares."""
        round_id = current.round_id() if current.is_initialized() else 0
        world = (round_id, size, virtual_workers)
        if world != self._world:
            self._world, self._shares = world, allocate_microbatches(virtual_workers, size)
        self._rank, self._sent = rank, None
        if (member := session.membership()) is not None:
            self._progress = member.progress
        self._report()
        return self._shares

    def begin(self, step: int, device: torch.device) -> None:
        """Begin step number `step`. Collective, by all ranks in the same steps."""
        if step % self._every == 0 and len(self._shares) > 1:
            shares = self._next_shares() if self._rank == 0 else None
            message = torch.tensor([0] * len(self._shares) if shares is None else shares)
            message = message.to(device)
            self._sent = message, dist.broadcast(message, 0, async_op=True)

    def finish(self) -> list[int] | None:
        """End a step; return the shares from the next step on, None where they stay as they are."""
        if self._sent is None:
            return None
        message, work = self._sent
        self._sent = None
        work.wait()
        shares: list[int] = message.tolist()
        if not any(shares):
            return None
        self._shares = shares
        self._report()
        return shares

    def _next_shares(self) -> list[int] | None:
        """Return the driver's shares if they are new and made for this world and batch."""
        given = self._newest()
        if given is None:
            return None
        round_id, size, virtual_workers = self._world
        shares = list(given.shares)
        fits = given.round == round_id and len(shares) == size and min(shares) >= 0
        new = sum(shares) == virtual_workers and shares != self._shares
        return shares if fits and new else None

    def _report(self) -> None:
        """Have the heartbeat report this rank's share and, on rank 0, fetch new shares."""
        share = Division(self._world[2], self._shares[self._rank])
        self._progress.division, self._progress.wants_allocations = share, self._rank == 0
