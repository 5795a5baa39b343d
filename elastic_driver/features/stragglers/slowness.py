"""Detection of ranks that compute slowly, and of slow network links, while the job trains.

**Ranks.** Workers report the compute time of each step, without the time they waited for other
ranks. All ranks of a synchronous step *finish* together, so only the compute time shows the slow
one.

A rank's time is the median of its last reports. At each *look* (all ranks have reported a step) it
is compared with the usual time of all ranks. An alarm needs several looks in a row that agree, and
ends at a lower limit than it begins, so that jitter raises none. If another process takes the
processor for half a second, a rank takes about 1.5 times as long, hardly ever several times: a
slight difference must therefore last longer. If most ranks would be slow, the difference must be
larger.

A report may stand for several short steps. Their mean is steadier than one step, so fewer reports
are needed. Long steps are reported one by one; a processor quota may stop a process in every second
one of them, so the mean of two neighbours is taken.

**Links.** Ranks report how long their data has been under way to each host (`worker.world.gloo`):
the seconds in which something that was sent was not yet acknowledged. Between two *looks* at these
reports, each directed pair of hosts that exchange data has one figure: seconds a step. A slow link
shows on every pair of its host, in both directions, since acknowledgements also queue behind the
data. It does not show on pairs without that host. So a host's own figure is the *smallest* of its
pairs'. The host is slow if this figure is far above that of the usual pair, and a good part of a
step. There are two series of looks: a narrow link shows in any third of a second, but a link that
loses packets only stalls now and then.

A host that exchanges data with only one other cannot be told from its partner, and is not judged.

Pure: the driver hands reports in and passes the alarms on. Times are seconds.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice, pairwise
from math import ceil
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from elastic_driver.arithmetic import usual
from elastic_driver.words.progress import Links

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


# The limits. A slow link is named after about 15 steps, or two seconds.
_LINK_FACTOR = 3.0  # a link is slow above this many times the usual pair's time
_LINK_RECOVERED = 2.0  # an alarm ends below this many times that time
_LINK_PART = 0.2  # of a step; a link that takes less than this part hides behind computing
_STEPS = 3  # the fewest steps between two looks
_SPANS = (0.3, 1.2)  # the fewest seconds between two looks, for two series of looks
CONFIRM = 3  # looks in a row that must agree
_LINK_BRIEF = 15  # looks; an alarm that is withdrawn sooner was a false one
_TRAFFIC = 0.1  # of the busiest pair's bytes; a pair with less exchanges no gradients

_Pair = tuple[str, str]  # sender, receiver
# The last step of each rank, and the totals of its connections by this step.
_Reports = dict[int, tuple[int, Links]]


@dataclass(slots=True)
class _Span:
    """A series of looks, at least `seconds` apart."""

    seconds: float
    before: _Reports = field(default_factory=dict)  # at the last look
    looks: int = 0
    # By host: looks in a row that say the opposite of the present verdict.
    agree: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Alarm:
    slow: SlowRank
    span: _Span  # the series of looks that raised it and can withdraw it
    look: int


class LinkWatch:
    """Watches the links of one round's hosts; a new round gets a new watch.

    `hosts`: the host of each rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self.false_alarms = 0  # alarms that were soon withdrawn
        self._now: _Reports = {}
        self._spans = [_Span(seconds) for seconds in _SPANS]
        self._alarms: dict[str, _Alarm] = {}  # by host

    @property
    def slow(self) -> tuple[SlowRank, ...]:
        """The hosts whose link is slow now, each by its first rank."""
        return tuple(sorted((a.slow for a in self._alarms.values()), key=lambda slow: slow.rank))

    def report(self, rank: int, step: int, links: Links) -> None:
        """Record the totals of a rank's connections at this step, since the round began."""
        self._now[rank] = step, links

    def look(self, step_time: float) -> tuple[Change, ...]:
        """Return the changes once every rank has reported enough steps of `step_time` seconds."""
        if len(self._now) < len(self.hosts):
            return ()
        changes: list[Change] = []
        for span in self._spans:
            needed = max(_STEPS, ceil(span.seconds / max(step_time, 1e-6)))
            if not span.before:
                span.before = dict(self._now)
            elif all(now[0] - span.before[rank][0] >= needed for rank, now in self._now.items()):
                pairs = self._pair_seconds(span.before)
                span.before = dict(self._now)
                span.looks += 1
                changes += self._judge(span, pairs, step_time)
        return tuple(changes)

    # ---- one look ------------------------------------------------------------------------

    def _pair_seconds(self, since: _Reports) -> dict[_Pair, float]:
        """Return the seconds a step that data was under way, for pairs that exchange much."""
        address = {self._now[rank][1].address: host for rank, host in enumerate(self.hosts)}
        seconds: dict[_Pair, float] = {}
        carried: dict[_Pair, float] = {}
        for rank, (step, links) in self._now.items():
            first_step, first = since[rank]
            before, steps = {use.peer: use for use in first.uses}, step - first_step
            for use in links.uses:
                earlier, peer = before.get(use.peer), address.get(use.peer)
                if earlier is None or peer is None:
                    continue
                pair = self.hosts[rank], peer
                spent = max(use.seconds - earlier.seconds, 0.0) / steps
                seconds[pair] = max(seconds.get(pair, 0.0), spent)
                carried[pair] = carried.get(pair, 0.0) + (use.carried - earlier.carried) / steps
        most = max(carried.values(), default=0.0)
        return {p: s for p, s in seconds.items() if carried[p] >= _TRAFFIC * most > 0}

    def _judge(self, span: _Span, pairs: Mapping[_Pair, float], step_time: float) -> list[Change]:
        changes: list[Change] = []
        normal = usual(pairs.values(), _LINK_FACTOR) if pairs else 0.0
        for host in dict.fromkeys(self.hosts):
            partners = {a if b == host else b for a, b in pairs if host in (a, b)}
            if len(partners) < 2:
                continue  # it cannot be told from its partner
            own = min(seconds for pair, seconds in pairs.items() if host in pair)
            ratio, alarm = own / max(normal, 1e-6), self._alarms.get(host)
            if alarm is None:
                contradicts = ratio > _LINK_FACTOR and own > _LINK_PART * step_time
            else:
                contradicts = ratio < _LINK_RECOVERED and alarm.span is span
            span.agree[host] = span.agree[host] + 1 if contradicts else 0
            if span.agree[host] < CONFIRM:
                continue
            span.agree[host] = 0
            if alarm is None:
                step = min(step for step, _ in self._now.values())
                rank = self.hosts.index(host)
                slow = SlowRank(rank, host, Slowness.NETWORK, ratio, step, own - normal)
                self._alarms[host] = _Alarm(slow, span, span.looks)
                changes.append(Change(slow))
            else:
                del self._alarms[host]
                self.false_alarms += span.looks - alarm.look <= _LINK_BRIEF
                changes.append(Change(alarm.slow, over=True))
        return changes
