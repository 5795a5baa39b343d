"""How fast each rank trains, and the shares of a step that follow from it (`--balance`).

`FixedBatch` times its micro-batches here and asks, at the start of each pass over the data, for
everybody's share: a slow host gets fewer virtual workers. The gradient does not depend on
who trains which, so neither does the result. Times are seconds.
"""

from __future__ import annotations

import statistics
from collections import deque

import torch
import torch.distributed as dist

from elastic_driver.core.batch import allocate_microbatches, allocate_weighted

__all__ = ["Pace", "balanced_shares"]

KEPT = 64  # micro-batches; a hiccup in one of them is no pace


class Pace:
    """Times of this rank's last micro-batches."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=KEPT)

    def note(self, seconds: float, samples: int) -> None:
        """A micro-batch of so many samples took so long, its data included."""
        if seconds > 0:
            self._times.append(seconds / samples)

    def speed(self) -> float:
        """Samples a second; 0 where none is known yet."""
        return 1.0 / statistics.median(self._times) if self._times else 0.0


def balanced_shares(virtual_workers: int, size: int, pace: Pace) -> list[int]:
    """Collective: each rank's micro-batches by the speeds all have measured, alike on every rank.

    A rank that has measured nothing (a newcomer) counts as the median of the others.
    """
    if size == 1:
        return [virtual_workers]
    speeds = [torch.zeros(1, dtype=torch.float64) for _ in range(size)]
    dist.all_gather(speeds, torch.tensor([pace.speed()], dtype=torch.float64))
    values = [float(speed) for speed in speeds]
    known = [value for value in values if value > 0]
    if not known:
        return allocate_microbatches(virtual_workers, size)
    usual = statistics.median(known)
    return allocate_weighted(virtual_workers, [value or usual for value in values])
