"""Speeds of a job by its number of workers, for the tests of the search."""

from collections.abc import Callable
from typing import NamedTuple


class Curve(NamedTuple):
    """Relative speeds, where the workers lie, and the micro-batches of a fixed batch."""

    speeds: tuple[float, ...]
    slots: tuple[int, ...] = (8,)  # of each host
    micro_batches: int | None = None

    def hosts(self) -> dict[int, int]:
        """The number of hosts of each size."""
        firsts = [sum(self.slots[:n]) for n in range(len(self.slots))]
        return {
            size: sum(first < size for first in firsts) for size in range(1, sum(self.slots) + 1)
        }

    def speed(self, size: int) -> float:
        return self.speeds[size - 1]

    def step_time(self, size: int, base: float = 0.1) -> float:
        """Seconds of a step, of `base` with one worker."""
        work = 1 if self.micro_batches else size
        return base * self.speeds[0] * work / self.speeds[size - 1]


def _fixed_batch(micro_batches: int, exchange: Callable[[int], float]) -> tuple[float, ...]:
    times = [-(-micro_batches // size) + exchange(size) for size in range(1, 9)]
    return tuple(times[0] / each for each in times)


CURVES = {
    "linear": Curve((1, 2, 3, 4, 5, 6, 7, 8)),
    "linear over hosts": Curve((1, 2, 3, 4, 5, 6, 7, 8), (2, 2, 2, 2)),
    "saturating": Curve((1, 1.6, 2.0, 2.29, 2.5, 2.67, 2.8, 2.91)),
    "saturating early": Curve((1, 1.8, 2.2, 2.35, 2.4, 2.42, 2.43, 2.44)),
    "flat from 2": Curve((1, 1.9, 1.92, 1.93, 1.94, 1.94, 1.95, 1.95)),
    "flat": Curve((1,) * 8),
    "falling": Curve((1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)),
    "peak at 3": Curve((1, 1.8, 2.4, 2.2, 2.0, 1.7, 1.4, 1.2)),
    "peak at 3 of two hosts": Curve((1, 1.8, 2.5, 2.2, 1.9, 1.6, 1.4, 1.2), (4, 4)),
    "peak at 5": Curve((1, 1.9, 2.7, 3.4, 3.9, 3.6, 3.2, 2.8)),
    "peak at 6": Curve((1, 1.9, 2.8, 3.6, 4.3, 4.9, 4.2, 3.4)),
    "drop at the second host": Curve((1, 2, 3, 4, 2, 2.3, 2.6, 2.9), (4, 4)),
    "dip at the second host": Curve((1, 2, 3, 4, 3.2, 4, 4.9, 5.6), (4, 4)),
    "drop at each host": Curve((1, 2, 3, 1.8, 2.2, 2.6, 2.8, 3.1), (3, 3, 2)),
    "drop at hosts of 2, 4 and 2": Curve((1, 1.93, 1.39, 1.79, 2.16, 2.51, 1.41, 1.56), (2, 4, 2)),
    "one of two hosts is best": Curve((1, 1.88, 2.67, 1.38, 1.64, 1.87, 2.09, 2.28), (3, 5)),
    "sharp peak at 5": Curve((1, 1.52, 1.94, 2.31, 2.64, 1.96, 1.46, 1.08), (2, 6)),
    "8 micro-batches": Curve(_fixed_batch(8, lambda n: 0.2 * (n > 1)), (8,), 8),
    "many micro-batches": Curve(_fixed_batch(840, lambda n: 5.0 * n), (4, 4), 840),
}
