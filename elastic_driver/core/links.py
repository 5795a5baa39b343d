"""Which host's network link is slow while the job trains.

Ranks report how long their data has been under way to each peer's host (`worker.links`): seconds in
which something sent was not yet acknowledged. Between two looks that makes one figure for each
directed pair of hosts that exchange data, seconds a step. A slow link shows on every pair its
host belongs to, in both directions, since acknowledgements too queue behind the data; on pairs
without that host it does not. So a host's own figure is the *smallest* of its pairs', and it is
slow where that is far above the usual pair's and a good part of a step.

A host that exchanges data with one other only cannot be told from its partner, and is not judged.
Pure. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from msgspec import Struct

from elastic_driver.core.messages import Links
from elastic_driver.core.robust import usual
from elastic_driver.core.stragglers import Change, Slowness, SlowRank

_TRAFFIC = 0.1  # of the busiest pair's bytes: less is no exchange of gradients
_Pair = tuple[str, str]  # who sends, who receives


class LinkSettings(Struct, frozen=True, kw_only=True):
    """When a link is called slow; the defaults name one within about 15 steps, or two seconds."""

    factor: float = 3.0  # slow: more than this many times the usual pair's time
    recovered: float = 2.0  # no longer slow: less than this many times
    part: float = 0.2  # and more than this part of a step: what hides behind computing is no harm
    steps: int = 3  # that a look is taken over, at least
    seconds: float = 0.3  # and what these take, at least
    confirm: int = 3  # looks in a row that must agree
    brief: int = 15  # an alarm withdrawn within so many looks was a false one


class _Report(Struct, frozen=True):
    step: int
    links: Links


@dataclass(slots=True)
class _Verdict:
    agree: int = 0  # looks in a row that contradict the present verdict
    alarm: SlowRank | None = None
    raised: int = 0  # the look at which it was


@dataclass
class LinkWatch:
    """Watches the links of one round's hosts; a new round gets a new watch.

    `hosts`: the host of each rank.
    """

    hosts: Sequence[str]
    settings: LinkSettings = field(default_factory=LinkSettings)
    false_alarms: int = 0  # alarms that were soon withdrawn
    _before: dict[int, _Report] = field(init=False, default_factory=dict)
    _now: dict[int, _Report] = field(init=False, default_factory=dict)
    _verdicts: dict[str, _Verdict] = field(init=False)
    _looks: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._verdicts = {host: _Verdict() for host in self.hosts}

    @property
    def slow(self) -> tuple[SlowRank, ...]:
        """The hosts whose link is slow now, each by its first rank."""
        alarms = (verdict.alarm for verdict in self._verdicts.values())
        return tuple(sorted((a for a in alarms if a), key=lambda alarm: alarm.rank))

    def report(self, rank: int, step: int, links: Links) -> None:
        """What a rank's connections have come to by this step, since the round began."""
        self._now[rank] = _Report(step, links)

    def look(self, step_time: float) -> tuple[Change, ...]:
        """What changes once every rank has told of enough steps; `step_time`: of a whole one."""
        if len(self._now) < len(self.hosts):
            return ()
        if not self._before:
            self._before = dict(self._now)
            return ()
        settings = self.settings
        needed = max(settings.steps, ceil(settings.seconds / max(step_time, 1e-6)))
        if any(self._now[rank].step - self._before[rank].step < needed for rank in self._now):
            return ()
        seconds = self._host_seconds(self._pair_seconds())
        step = min(report.step for report in self._now.values())
        self._before = dict(self._now)
        self._looks += 1
        return self._judge(seconds, step, step_time)

    # ---- one look ------------------------------------------------------------------------

    def _pair_seconds(self) -> dict[_Pair, float]:
        """Seconds a step that data was under way between two hosts, where there was much of it."""
        address = {self._now[rank].links.address: host for rank, host in enumerate(self.hosts)}
        seconds: dict[_Pair, float] = {}
        carried: dict[_Pair, float] = {}
        for rank, now in self._now.items():
            before = {use.peer: use for use in self._before[rank].links.uses}
            steps = now.step - self._before[rank].step
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
        for host in self._verdicts:
            partners = {a if b == host else b for a, b in pairs if host in (a, b)}
            if len(partners) > 1:
                found[host] = min(s for pair, s in pairs.items() if host in pair), normal
        return found

    def _judge(
        self, seconds: Mapping[str, tuple[float, float]], step: int, step_time: float
    ) -> tuple[Change, ...]:
        changes = []
        for host, (own, normal) in seconds.items():
            verdict = self._verdicts[host]
            ratio = own / max(normal, 1e-6)
            if verdict.alarm is None:
                contradicts = ratio > self.settings.factor and own > self.settings.part * step_time
            else:
                contradicts = ratio < self.settings.recovered
            verdict.agree = verdict.agree + 1 if contradicts else 0
            if verdict.agree < self.settings.confirm:
                continue
            verdict.agree = 0
            if verdict.alarm is None:
                rank = self.hosts.index(host)
                verdict.alarm = SlowRank(rank, host, Slowness.NETWORK, ratio, step)
                verdict.raised = self._looks
                changes.append(Change(verdict.alarm))
            else:
                changes.append(Change(verdict.alarm, over=True))
                self.false_alarms += self._looks - verdict.raised <= self.settings.brief
                verdict.alarm = None
        return tuple(changes)
