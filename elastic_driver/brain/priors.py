"""What finished jobs like a new one say about it: its best size, its memory and its speeds. Pure.

A prior is a guess that measurements replace. One that is wrong by more than a fifth at a size that
was measured is dropped as a whole: the data, the machines or the script have changed.
"""

from collections.abc import Iterable, Sequence
from statistics import median, median_low
from typing import NamedTuple

from msgspec.structs import replace

from elastic_driver.brain.algorithm import JobView, SpeedAt
from elastic_driver.brain.store.records import Record, in_order
from elastic_driver.features.sizes.messages import WRONG

JOBS = 5  # so many of the newest similar jobs count
MEMORY_FACTOR = 1.5  # of the largest memory of a worker


class Prior(NamedTuple):
    """The experience of similar jobs; None: they say nothing about it.

    `jobs`: how many there are. `memory`: the bytes that one worker should find.
    """

    jobs: int
    size: int | None
    memory: int | None
    speeds: tuple[SpeedAt, ...]

    @property
    def memory_reason(self) -> str:
        """Why a worker is expected to need this memory."""
        what = f"{MEMORY_FACTOR:g} times the largest peak of similar jobs ({self.jobs} of them)"
        return f"{(self.memory or 0) / 2**20:.0f} MiB, {what}"


def prior_of(records: Sequence[Record]) -> Prior | None:
    """Return what the records of similar jobs say, None if there is none of them.

    Of what several of them have measured the median counts.
    """
    if not records:
        return None
    times: dict[tuple[int, int], list[SpeedAt]] = {}
    for record in records:
        for speed in record.speeds:
            times.setdefault((speed.size, speed.hosts), []).append(speed)
    sizes = [record.best for record in records if record.best is not None]
    most = max((record.memory for record in records if record.memory is not None), default=None)
    return Prior(
        jobs=len(records),
        size=median_low(sizes) if sizes else None,
        memory=None if most is None else round(MEMORY_FACTOR * most),
        speeds=in_order(_middle(measured) for measured in times.values()),
    )


def is_wrong(prior: Prior, measured: Iterable[SpeedAt]) -> bool:
    """Return whether a speed that was measured differs from the prior's by more than a fifth."""
    expected = {(each.size, each.hosts): each.step_time for each in prior.speeds}
    return any(
        abs(each.step_time / expected[each.size, each.hosts] - 1) > WRONG
        for each in measured
        if (each.size, each.hosts) in expected
    )


def with_prior(view: JobView, prior: Prior | None) -> JobView:
    """Return a job with the prior's memory and speeds where it has none of its own.

    A prior that is wrong changes nothing.
    """
    if prior is None or is_wrong(prior, view.speeds):
        return view
    known = {(each.size, each.hosts) for each in view.speeds}
    more = [each for each in prior.speeds if (each.size, each.hosts) not in known]
    return replace(
        view,
        speeds=in_order([*view.speeds, *more]),
        memory=prior.memory if view.memory is None else view.memory,
    )


def _middle(measured: Sequence[SpeedAt]) -> SpeedAt:
    """Return one speed for several at the same size."""
    return replace(
        measured[0],
        step_time=median(each.step_time for each in measured),
        error=max(each.error for each in measured),
    )
