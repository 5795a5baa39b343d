"""Detection of hosts with a slow network link while the job trains.

Ranks report how long their data has been under way to each host (`worker.world.connections`):
seconds in which something sent was not yet acknowledged. Between two looks that makes one figure
for each directed pair of hosts that exchange data, seconds a step. A slow link shows on every pair
its host belongs to, in both directions, since acknowledgements too queue behind the data; on pairs
without that host it does not. So a host's own figure is the *smallest* of its pairs', and it is
slow where that is far above the usual pair's and a good part of a step. Looks are taken over two
spans: a narrow link shows in any third of a second, one that loses packets stalls now and then.

A host that exchanges data with one other only cannot be told from its partner, and is not judged.
Pure. Times are seconds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from msgspec import Struct

from elastic_driver.core.documents import Links
from elastic_driver.policies.slow_ranks import Change, Slowness, SlowRank, usual

_TRAFFIC = 0.1  # of the busiest pair's bytes: less is no exchange of gradients
_Pair = tuple[str, str]  # sender, receiver


class LinkSettings(Struct, frozen=True, kw_only=True):
    """The limits for calling a link slow; the defaults take about 15 steps, or two seconds."""

    factor: float = 3.0  # slow: more than this many times the usual pair's time
    recovered: float = 2.0  # no longer slow: less than this many times
    part: float = 0.2  # and more than this part of a step: less hides behind computing
    steps: int = 3  # that a look is taken over, at least
    spans: tuple[float, ...] = (0.3, 1.2)  # and seconds these take, at least: for each its looks
    confirm: int = 3  # looks in a row that must agree
    brief: int = 15  # an alarm withdrawn within so many looks was a false one


class _Report(Struct, frozen=True):
    step: int
    links: Links


@dataclass(slots=True)
class _Span:
    """Looks over so many seconds each."""

    seconds: float
    before: dict[int, _Report] = field(default_factory=dict)  # by rank, at the last look
    looks: int = 0
    agree: Counter[str] = field(default_factory=Counter)  # by host, looks in a row that contradict


@dataclass(frozen=True, slots=True)
class _Alarm:
    slow: SlowRank
    span: _Span  # by whose looks it was raised, and will be withdrawn
    look: int


@dataclass
class LinkWatch:
    """Watches the links of one round's hosts; a new round gets a new watch.

    `hosts`: the host of each rank.
    """

    hosts: Sequence[str]
    settings: LinkSettings = field(default_factory=LinkSettings)
    false_alarms: int = 0  # alarms that were soon withdrawn
    _now: dict[int, _Report] = field(init=False, default_factory=dict)
    _spans: tuple[_Span, ...] = field(init=False)
    _alarms: dict[str, _Alarm] = field(init=False, default_factory=dict)  # by host

    def __post_init__(self) -> None:
        self._spans = tuple(_Span(seconds) for seconds in self.settings.spans)

    @property
    def slow(self) -> tuple[SlowRank, ...]:
        """The hosts whose link is slow now, each by its first rank."""
        return tuple(sorted((a.slow for a in self._alarms.values()), key=lambda slow: slow.rank))

    def report(self, rank: int, step: int, links: Links) -> None:
        """Take in the totals of a rank's connections by this step, since the round began."""
        self._now[rank] = _Report(step, links)

    def look(self, step_time: float) -> tuple[Change, ...]:
        """Return the changes once every rank has reported enough steps; `step_time`: of a step."""
        if len(self._now) < len(self.hosts):
            return ()
        changes: list[Change] = []
        for span in self._spans:
            if not span.before:
                span.before = dict(self._now)
            elif self._is_due(span, step_time):
                seconds = self._host_seconds(self._pair_seconds(span.before))
                span.before = dict(self._now)
                span.looks += 1
                changes += self._judge(span, seconds, step_time)
        return tuple(changes)

    # ---- one look ------------------------------------------------------------------------

    def _is_due(self, span: _Span, step_time: float) -> bool:
        needed = max(self.settings.steps, ceil(span.seconds / max(step_time, 1e-6)))
        return all(now.step - span.before[rank].step >= needed for rank, now in self._now.items())

    def _pair_seconds(self, since: Mapping[int, _Report]) -> dict[_Pair, float]:
        """Seconds a step that data was under way between two hosts, where there was much of it."""
        address = {self._now[rank].links.address: host for rank, host in enumerate(self.hosts)}
        seconds: dict[_Pair, float] = {}
        carried: dict[_Pair, float] = {}
        for rank, now in self._now.items():
            before = {use.peer: use for use in since[rank].links.uses}
            steps = now.step - since[rank].step
            for use in now.links.uses:
                earlier, peer = before.get(use.peer), address.get(use.peer)
                if earlier is None or peer is None:
                    continue
                pair = self.hosts[rank], peer
                spent = max(use.seconds - earlier.seconds, 0.0) / steps
                seconds[pair] = max(seconds.get(pair, 0.0), spent)
                carried[pair] = carried.get(pair, 0.0) + (use.carried - earlier.carried) / steps
        most = max(carried.values(), default=0.0)
        return {p: s for p, s in seconds.items() if carried[p] >= _TRAFFIC * most > 0}

    def _host_seconds(self, pairs: Mapping[_Pair, float]) -> dict[str, tuple[float, float]]:
        """By host: its smallest pair's seconds, and what is usual among all pairs."""
        if len(pairs) < 2:
            return {}
        normal = usual(pairs.values(), self.settings.factor)
        found = {}
        for host in dict.fromkeys(self.hosts):
            partners = {a if b == host else b for a, b in pairs if host in (a, b)}
            if len(partners) > 1:
                found[host] = min(s for pair, s in pairs.items() if host in pair), normal
        return found

    def _judge(
        self, span: _Span, seconds: Mapping[str, tuple[float, float]], step_time: float
    ) -> list[Change]:
        settings, changes = self.settings, []
        step = min(report.step for report in self._now.values())
        for host, (own, normal) in seconds.items():
            ratio = own / max(normal, 1e-6)
            alarm = self._alarms.get(host)
            if alarm is None:
                contradicts = ratio > settings.factor and own > settings.part * step_time
            else:
                contradicts = ratio < settings.recovered and alarm.span is span
            span.agree[host] = span.agree[host] + 1 if contradicts else 0
            if span.agree[host] < settings.confirm:
                continue
            span.agree[host] = 0
            if alarm is None:
                rank = self.hosts.index(host)
                slow = SlowRank(rank, host, Slowness.NETWORK, ratio, step)
                self._alarms[host] = _Alarm(slow, span, span.looks)
                changes.append(Change(slow))
            else:
                del self._alarms[host]
                self.false_alarms += span.looks - alarm.look <= settings.brief
                changes.append(Change(alarm.slow, over=True))
        return changes
