"""Histograms of durations, and those of a server's requests. Times are seconds.

A histogram is a fixed array of counters, so recording a duration takes a fraction of a microsecond
and its memory never grows. One thread writes a histogram; any thread may read it.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

WAITS = "waits"  # requests that waited for a key to be written
REQUEST_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class Histogram:
    """Counts of durations; bucket `i` has those up to `bounds[i]`, the last one all longer ones."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Record a duration that was measured this many times."""
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.sum += seconds * times

    def cumulative(self) -> list[tuple[str, int]]:
        """Return for each bound, as Prometheus writes it, how many durations were not longer."""
        found, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), tuple(self.counts), strict=True):
            total += count
            found.append((bound, total))
        return found


class RequestTimes:
    """The seconds from a request's arrival until its answer was written, by kind of route.

    The kind is the first word of the route's path, so there are as many as the server has routes.
    """

    def __init__(self) -> None:
        self._times: dict[str, Histogram] = {}
        self._of_path: dict[str, Histogram] = {}  # the same, by path

    def of(self, path: str) -> Histogram:
        """Return the histogram of a route, by its path in the router."""
        found = self._of_path.get(path)
        if found is None:
            kind = path.removeprefix("/v1").strip("/").partition("/")[0]
            found = self._of_path[path] = self.of_kind(kind)
        return found

    def of_kind(self, kind: str) -> Histogram:
        """Return the histogram of one kind of route."""
        return self._times.setdefault(kind, Histogram(REQUEST_BOUNDS))

    def record(self, path: str, seconds: float, *, waited: bool) -> None:
        """Record the time of an answered request by its route; `waited`: for a key."""
        (self.of_kind(WAITS) if waited else self.of(path)).observe(seconds)

    def snapshot(self) -> Mapping[str, Histogram]:
        """Return the histograms by kind of route."""
        return dict(self._times)
