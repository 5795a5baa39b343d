"""Detection of ranks that compute slowly while the job trains.

Workers report the compute time of each step, without the time they waited for other ranks. All
ranks of a synchronous step *finish* together, so only the compute time shows the slow one.
(`slow_links` finds slow networks.)

A rank's time is the median of its last reports. At each *look* (all ranks have reported a step) it
is compared with the usual time of all ranks. An alarm needs several looks in a row that agree, and
ends at a lower limit than it begins, so that jitter raises none. If another process takes the
processor for half a second, a rank takes about 1.5 times as long, hardly ever several times: a
slight difference must therefore last longer. If most ranks would be slow, the difference must be
larger.

A report may stand for several short steps. Their mean is steadier than one step, so fewer reports
are needed. Long steps are reported one by one; a processor quota may stop a process in every second
one of them, so the mean of two neighbours is taken.

Pure: the driver hands reports in and passes the alarms on. Times are seconds.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice, pairwise
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

# The limits. A slow rank is named after about 20 steps. If a report stands for several steps, fewer
# reports are needed, but never fewer than _REPORTS, and never fewer looks than _LOOKS.
_FACTOR = 1.5  # a rank is slow above this many times the usual time
_SLIGHT = 1.75  # below this many times it is only slightly slow
_LONGER = 3  # a slight slowness must last this many times as many looks
_PART = 0.1  # of a step; a rank that takes less than this part longer does no harm
_RECOVERED = 1.25  # an alarm ends below this many times the usual time
_WINDOW = 20  # steps; their median is a rank's time
_LEAST = 10  # steps that each rank must have reported before any is judged
_CONFIRM = 5  # steps in a row that must agree, and be as slow themselves
_REPORTS = 9  # the fewest reports of a window; half as many before a rank is judged
_LOOKS = 3  # the fewest looks that must agree
_BRIEF = 50  # looks; an alarm that is withdrawn sooner was a false one

_OPEN_STEPS = 256  # steps that wait for the reports of more ranks; older ones are dropped
_ANCHOR = 4  # the lower quartile; of up to four values it is the smallest
_NEIGHBOURS = 4  # reports; the distance between them is the number of steps in each


class Slowness(str, Enum):
    """The kind of a rank's slowness."""

    COMPUTE = "compute"
    NETWORK = "network"


class SlowRank(Struct, frozen=True):
    """A rank that delays the others."""

    rank: int
    host: str
    kind: Slowness
    ratio: float  # its time over the usual one, when the alarm was raised
    step: int  # the step at which it was raised
    excess: float = 0.0  # seconds of a step beyond the usual ones, in the steps before the alarm

    def share(self, step_time: float) -> float:
        """Return the part of a step of `step_time` seconds for which all ranks wait for this one.

        It is at most the part that the rank itself is late by: the step time may be that of steps
        before the rank became slow, and 0 if it is not known.
        """
        own = 1 - 1 / max(self.ratio, 1.0)
        return min(own, self.excess / step_time) if step_time > 0 else own

    def describe(self) -> str:
        """Return one line for the event log."""
        which = f"rank {self.rank} on {self.host} is slow ({self.kind.value})"
        return f"{which}: {self.ratio:.1f} times the usual time"


class Change(Struct, frozen=True):
    """An alarm that was raised, or (`over`) withdrawn."""

    slow: SlowRank
    over: bool = False


@dataclass(slots=True)
class _Track:
    """The times and the alarm of one rank."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    agree: int = 0  # looks in a row that say the opposite of the present verdict
    alarm: SlowRank | None = None
    raised: int = 0  # the number of the look at which the alarm was raised


class StragglerWatch:
    """Watches the ranks of one round; a new round gets a new watch.

    Args:
        hosts: the host of each rank.
        first_step: reports of earlier steps are ignored.
        step_time: seconds of a whole step, waiting included; the caller keeps it up to date.
            0: it is not known, and every difference counts.
    """

    def __init__(
        self, hosts: Sequence[str], *, first_step: int = 0, step_time: float = 0.0
    ) -> None:
        self.hosts, self.step_time = hosts, step_time
        self.false_alarms = 0  # alarms that were soon withdrawn
        self._tracks = [_Track() for _ in hosts]
        self._reported: dict[int, dict[int, float]] = {}
        self._latest = [first_step - 1] * len(hosts)
        self._seen: deque[int] = deque(maxlen=_NEIGHBOURS)  # the last steps that all have reported
        self._each = 1  # the number of steps that one report stands for
        self._looks = 0

    @property
    def slow(self) -> tuple[SlowRank, ...]:
        """The ranks that are slow now, by rank."""
        return tuple(track.alarm for track in self._tracks if track.alarm)

    def report(self, rank: int, step: int, compute: float) -> tuple[Change, ...]:
        """Record one rank's step; return the changes once every rank has reported this step.

        Args:
            rank: the reporting rank; unknown ranks and repeated steps are ignored.
            step: the finished step.
            compute: seconds that it computed, without the time it waited.
        """
        if not 0 <= rank < len(self.hosts) or step <= self._latest[rank]:
            return ()
        self._latest[rank] = step
        reported = self._reported.setdefault(step, {})
        reported[rank] = compute
        if len(reported) < len(self.hosts):
            if len(self._reported) > _OPEN_STEPS:
                del self._reported[min(self._reported)]
            return ()
        # The same steps of every rank are compared.
        self._seen.append(step)
        self._each = min((b - a for a, b in pairwise(self._seen)), default=1)
        for each, time in reported.items():
            self._tracks[each].times.append(time)
        # All ranks are past the earlier steps: their missing reports will not come.
        self._reported = {s: ranks for s, ranks in self._reported.items() if s > step}
        return tuple(self._look(step))

    # ---- one look ------------------------------------------------------------------------

    def _look(self, step: int) -> list[Change]:
        self._looks += 1
        least = self._reports(_LEAST, _REPORTS // 2)
        if any(len(track.times) < least for track in self._tracks):
            return []
        times = self._medians(self._reports(_WINDOW, _REPORTS))
        normal, factor = usual(times, _FACTOR), _FACTOR
        if normal <= 0:
            return []
        if 2 * sum(time > factor * normal for time in times) > len(times):
            factor *= factor  # most are not slow; a few are fast, with a processor of their own
        changes = []
        for rank, time in enumerate(times):
            host, excess = self.hosts[rank], max(time - normal, 0.0)
            found = SlowRank(rank, host, Slowness.COMPUTE, time / normal, step, excess)
            harms = time - normal > _PART * self.step_time
            change = self._judge(found, factor, harms=harms)
            if change is not None:
                changes.append(change)
        return changes

    def _medians(self, last: int) -> list[float]:
        """Return each rank's median over the last reports; single steps are averaged in pairs."""
        newest = [list(islice(reversed(track.times), last)) for track in self._tracks]
        if self._each == 1 and last > 1:
            newest = [[(a + b) / 2 for a, b in pairwise(times)] for times in newest]
        return [median(times) for times in newest]

    def _reports(self, steps: int, least: int) -> int:
        """Return the number of reports that cover `steps` steps, but no fewer than `least`."""
        return min(max(least, -(-steps // self._each)), steps)

    def _judge(self, found: SlowRank, factor: float, *, harms: bool) -> Change | None:
        track = self._tracks[found.rank]
        raised = track.alarm
        slow = found.ratio > factor and harms
        contradicts = slow if raised is None else found.ratio < _RECOVERED
        track.agree = track.agree + 1 if contradicts else 0
        looks = self._reports(_CONFIRM, _LOOKS)
        slight = raised is None and found.ratio < _SLIGHT
        if track.agree < looks * (_LONGER if slight else 1):
            return None
        if raised is None:
            newest = self._medians(looks)
            mine, normal = newest[found.rank], usual(newest, _FACTOR)
            if mine <= factor * normal:
                return None  # a few slow steps are over, though the median is still large
            # The window still has steps from before the rank became slow.
            alarm = track.alarm = replace(found, excess=mine - normal)
            track.raised = self._looks
        else:
            alarm, track.alarm = raised, None
            self.false_alarms += self._looks - track.raised <= _BRIEF
        track.agree = 0
        return Change(alarm, over=raised is not None)


def usual(values: Iterable[float], factor: float) -> float:
    """Return the median of the values up to `factor` times the lower quartile.

    A plain median fails if many nodes are slow: among 1, 3 it is 2, and among 1, 3, 3 it is 3. The
    lower quartile is a good node's value as long as at most three quarters are slow. One clock that
    runs too fast spoils a minimum, but not this value, in a large cluster.
    Raises ValueError for no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("nothing to compare with")
    anchor = ordered[(len(ordered) - 1) // _ANCHOR]
    return median(value for value in ordered if value <= factor * anchor)
