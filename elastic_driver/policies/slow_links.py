"""Detection of hosts with a slow network link while the job trains.

Ranks report how long their data has been under way to each host (`worker.world.connections`): the
seconds in which something that was sent was not yet acknowledged. Between two *looks* at these
reports, each directed pair of hosts that exchange data has one figure: seconds a step. A slow link
shows on every pair of its host, in both directions, since acknowledgements also queue behind the
data. It does not show on pairs without that host. So a host's own figure is the *smallest* of its
pairs'. The host is slow if this figure is far above that of the usual pair, and a good part of a
step. There are two series of looks: a narrow link shows in any third of a second, but a link that
loses packets only stalls now and then.

A host that exchanges data with only one other cannot be told from its partner, and is not judged.
Pure. Times are seconds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from elastic_driver.policies.slow_ranks import Change, Slowness, SlowRank, usual
from elastic_driver.words.progress import Links

# The limits. A slow link is named after about 15 steps, or two seconds.
_FACTOR = 3.0  # a link is slow above this many times the usual pair's time
_RECOVERED = 2.0  # an alarm ends below this many times that time
_PART = 0.2  # of a step; a link that takes less than this part hides behind computing
_STEPS = 3  # the fewest steps between two looks
_SPANS = (0.3, 1.2)  # the fewest seconds between two looks, for two series of looks
CONFIRM = 3  # looks in a row that must agree
_BRIEF = 15  # looks; an alarm that is withdrawn sooner was a false one
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
        normal = usual(pairs.values(), _FACTOR) if pairs else 0.0
        for host in dict.fromkeys(self.hosts):
            partners = {a if b == host else b for a, b in pairs if host in (a, b)}
            if len(partners) < 2:
                continue  # it cannot be told from its partner
            own = min(seconds for pair, seconds in pairs.items() if host in pair)
            ratio, alarm = own / max(normal, 1e-6), self._alarms.get(host)
            if alarm is None:
                contradicts = ratio > _FACTOR and own > _PART * step_time
            else:
                contradicts = ratio < _RECOVERED and alarm.span is span
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
                self.false_alarms += span.looks - alarm.look <= _BRIEF
                changes.append(Change(alarm.slow, over=True))
        return changes
