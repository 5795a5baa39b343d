"""The usual value among times of which some may be far too long; pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

_ANCHOR = 4  # the lower quartile: for up to four values the smallest of them


def median(values: Iterable[float]) -> float:
    """Return the middle value, or the mean of the two middle ones; raises ValueError for none."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("the median of no values")
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def usual(values: Iterable[float], factor: float) -> float:
    """Return the median of the values up to `factor` times the lower quartile.

    A plain median fails if many nodes are slow: among 1, 3 it is 2, and among 1, 3, 3 it is 3. The
    lower quartile is a good node's value as long as at most three quarters are slow; unlike the
    minimum it is not spoiled by one clock that ran too fast in a large cluster.
    Raises ValueError for no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("nothing to compare with")
    anchor = ordered[(len(ordered) - 1) // _ANCHOR]
    return median(value for value in ordered if value <= factor * anchor)
