"""The hosts that discovery found, and what keeps them from getting new workers.

Discovery reports hosts, failures put them in cool-down, time brings them back; a drain or a check
that is due keeps them out, too. `HOST_TRANSITIONS` says which news begins and ends what. A host in
cool-down keeps its healthy workers and only gets no new ones; it loses them, too, if the job leaves
hosts on which a worker has failed. A host that the job cannot do without is not put in cool-down:
only its restarts that fail fast are delayed. Not to be reachable is no failure: such a host is
probed, and used again as soon as it answers (`lost_hosts`). The workers of a drained host leave.

`reason_of` and `outlook` say in words for people why hosts get no workers. Times are monotonic
seconds.
"""

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

from elastic_driver.kernel.tables import index, saved
from elastic_driver.settings import DEFAULT_HOST_FAILURES, Settings
from elastic_driver.words import counted


class Hindrance(str, Enum):
    """Something that keeps a host from getting workers; a host may have several."""

    COOL_DOWN = "cool-down"
    PAUSING = "pausing"  # a restart there failed fast, and the next one waits for a moment
    DRAINED = "drained"
    UNREACHABLE = "unreachable"  # it is gone; it is probed until it answers
    UNCHECKED = "checking"  # it waits for a node check
    REFUSED = "refused"  # it refuses us or lacks something, and was tried often enough


class HostNews(str, Enum):
    """News of a host."""

    FAILED = "failed"  # its workers, its agent or a node check, beyond the limit
    FAILED_FAST = "failed, needed"  # the same, but the job cannot do without the host
    COOLED_DOWN = "cool-down over"
    LOST = "not reachable"
    ANSWERED = "answers"  # a probe, or it cannot be probed and the start of an agent is tried
    DRAINED = "drain"
    UNDRAINED = "drain cancelled"
    CHECK_DUE = "check due"
    CHECKED = "checked"
    GIVEN_UP = "given up"  # it has refused us again and again
    REMOVED = "removed"  # discovery no longer reports it; this ends no cool-down


_H = HostNews
HOST_TRANSITIONS: dict[Hindrance, dict[HostNews, bool]] = {  # whether the news begins or ends it
    Hindrance.COOL_DOWN: {_H.FAILED: True, _H.COOLED_DOWN: False},
    Hindrance.PAUSING: {_H.FAILED_FAST: True, _H.COOLED_DOWN: False},
    Hindrance.DRAINED: {_H.DRAINED: True, _H.UNDRAINED: False, _H.REMOVED: False},
    Hindrance.UNREACHABLE: {_H.LOST: True, _H.ANSWERED: False, _H.REMOVED: False},
    Hindrance.UNCHECKED: {_H.CHECK_DUE: True, _H.CHECKED: False, _H.REMOVED: False},
    Hindrance.REFUSED: {_H.GIVEN_UP: True, _H.UNDRAINED: False, _H.REMOVED: False},
}


# ---- how long a host is left alone -------------------------------------------------------

FIRST_PROBE_S = 0.5  # between two probes of a host; longer if very many are not reachable
LONGEST_PROBE_S = 3.0
SLOWER_AFTER_S = 60.0  # the pause is the time that the host has been gone, divided by this
PROBES_PER_S = 330  # of all hosts together: 1,000 hosts are probed every three seconds


def growing_pause(number: int, longest: float) -> float:
    """Return the seconds before a start: 0, 0.5, 1, 2, 4 … for number 0, 1, 2 …"""
    return min(0.5 * 2.0 ** (min(number, 64) - 1), longest) if number > 0 else 0.0


def probe_pause(host: str, lost: int, gone: float = 0.0) -> float:
    """Return the seconds until the next probe of a host, while `lost` hosts are probed.

    They grow with the seconds that it has been `gone`, from half a minute on. They are a little
    shorter for some hosts than for others, so that hosts are probed in turn.
    """
    pause = min(max(FIRST_PROBE_S, lost / PROBES_PER_S, gone / SLOWER_AFTER_S), LONGEST_PROBE_S)
    return pause * (1.0 - (zlib.crc32(host.encode()) % 1024) / 4096)


# ---- the hosts ---------------------------------------------------------------------------

_COOL_DOWN = Hindrance.COOL_DOWN
TIMED = (Hindrance.COOL_DOWN, Hindrance.PAUSING)  # they end by themselves
_NAMED_FIRST = (
    *(Hindrance.DRAINED, Hindrance.REFUSED, Hindrance.UNREACHABLE, *TIMED, Hindrance.UNCHECKED),
)
MOST_REFUSALS = 5  # in a row; then a host is left alone until somebody says that it is mended
PROBED_TOGETHER_S = 0.05
FIRST_TOLD_AGAIN_S = 30.0  # twice as long each time
SOON_S = 10.0  # an agent that is lost this soon after the one before may not be able to live there


class Drain(NamedTuple):
    """The reason why a host or a worker has to leave, and how long it waits for replacements.

    `leave_by`: the time at which the agent of a host with a notice stops its workers; None: never.
    """

    reason: str
    replace_until: float
    leave_by: float | None = None


@dataclass(slots=True)
class Host:
    """A host that was discovered, with its record."""

    name: str
    slots: int
    position: int = 0  # in the stable order; a host that comes back goes to the end
    failures: list[float] = field(default_factory=list)  # times, within the window
    agent_losses: list[float] = field(default_factory=list)
    cooldowns: int = 0  # in a row; each doubles the next one
    left: bool = False  # its workers leave while it is in cool-down
    needed_again: bool = False  # its cool-down ends early if the job cannot do without it
    until: float = 0.0  # the end of its cool-down or pause
    pauses: int = 0  # in a row; each is longer than the one before
    paused_at: float = -math.inf
    reason: str = ""  # of its cool-down or pause, or why it is not reachable
    lost_at: float | None = None  # not reachable since then; None: its agent has been up since
    last_lost: float = -math.inf
    failed_starts: int = 0  # of agents, since it was not reachable; lost soon after it counts too
    probe_at: float = 0.0  # the next time, while it is not reachable
    probed: int = 0  # times, since it was not reachable
    told_again_after: float = FIRST_TOLD_AGAIN_S  # that it is still not reachable
    probes_from: int = 0  # answers to earlier probes say nothing about it
    refusals: int = 0  # in a row: agents that could not start, for which somebody is to blame
    last_trouble: float | None = None
    stepped: bool = False  # a worker there has finished a step since the last trouble
    drain: Drain | None = None  # while it is drained
    returned: bool = False  # discovery has removed and added it again
    check: str = ""  # the reason for which it waits for a check


class HostChanges(NamedTuple):
    """The changes of a discovery: (host, slots), host, (host, slots before, slots now)."""

    added: tuple[tuple[str, int], ...]
    removed: tuple[str, ...]
    resized: tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class Hosts:
    """Discovered hosts in stable order, with their failures and cool-downs."""

    settings: Settings
    distrusted: set[str] = saved(factory=set)  # slow hosts: usable, but the last choice
    known: dict[str, Host] = saved(factory=dict)  # that are there, in stable order
    next_probe: float = saved(math.inf)  # of a host that is not reachable
    _positions: int = saved(0, name="positions")
    _hindered: dict[Hindrance, dict[str, Host]] = index(
        "known _records", name="hindered", factory=lambda: {kind: {} for kind in Hindrance}
    )
    # A host that is removed and added again keeps its record: a short absence heals nothing.
    _records: dict[str, Host] = saved(factory=dict, name="records")

    def record_discovered(self, hosts: tuple[tuple[str, int], ...]) -> HostChanges:
        """Record the hosts that discovery found; hosts without slots count as absent.

        Known hosts keep their place, new ones follow in the order of the source.
        """
        found = {name: slots for name, slots in hosts if slots > 0}
        removed = tuple(name for name in self.known if name not in found)
        for name in removed:
            self._records[name] = self.known.pop(name)
            self._learn(self._records[name], HostNews.REMOVED)
        added, resized = [], []
        for name, slots in found.items():
            known = self.known.get(name)
            if known is None:
                self._positions += 1
                returned = name in self._records
                host = self.known[name] = self._records.pop(name, Host(name, slots))
                host.slots, host.position, host.returned = slots, self._positions, returned
                host.refusals = 0
                added.append((name, slots))
            elif known.slots != slots:
                resized.append((name, known.slots, slots))
                known.slots = slots
        return HostChanges(tuple(added), removed, tuple(resized))

    def has_had(self, name: str) -> bool:
        """Return whether the host is there, or has been."""
        return name in self.known or name in self._records

    def is_usable(self, name: str) -> bool:
        """Return whether the host is there and nothing keeps it from getting workers."""
        return name in self.known and self.hindrance(name) is None

    def hindrance(self, name: str) -> Hindrance | None:
        """Return what keeps the host from getting workers; a drain is named before the others."""
        return next((kind for kind in _NAMED_FIRST if name in self._hindered[kind]), None)

    def slots_without(self, name: str) -> int:
        """Return the slots of all usable hosts but this one."""
        usable = (host for host in self.known.values() if self.hindrance(host.name) is None)
        return sum(host.slots for host in usable if host.name != name)

    def hold(self, name: str, reason: str) -> None:
        """Keep a host from being used until `release`; does nothing if it is not there."""
        if name in self.known:
            self.known[name].check = reason
            self._learn(self.known[name], HostNews.CHECK_DUE)

    def release(self, host: Host) -> bool:
        """End the wait of a host for its check; return False if it did not wait."""
        held = host.name in self._hindered[Hindrance.UNCHECKED]
        self._learn(host, HostNews.CHECKED)
        return held

    def held(self) -> tuple[Host, ...]:
        """Return the hosts that only wait for a check, in stable order."""
        held = self._hindered[Hindrance.UNCHECKED].values()
        return tuple(h for h in held if self.hindrance(h.name) is Hindrance.UNCHECKED)

    def drain(self, name: str, drain: Drain) -> bool:
        """Keep a host from being used; return False if it is not there, or nothing is new.

        If there are several drains, the shortest wait for replacements counts.
        """
        host = self.known.get(name)
        known = self.drain_of(name)
        if host is None:
            return False
        if known is not None and known.replace_until <= drain.replace_until:
            if known.leave_by is not None or drain.leave_by is None:
                return False
            drain = drain._replace(replace_until=known.replace_until)
        host.drain = drain
        self._learn(host, HostNews.DRAINED)
        return True

    def undrain(self, name: str) -> bool:
        """Use a host again that is drained or was given up; return False for others."""
        kinds = (Hindrance.DRAINED, Hindrance.REFUSED)
        host = next((self._hindered[k][name] for k in kinds if name in self._hindered[k]), None)
        if host is not None:
            host.refusals = 0
            self._learn(host, HostNews.UNDRAINED)
        return host is not None

    def drain_of(self, name: str) -> Drain | None:
        """Return the host's drain, if it is drained."""
        host = self._hindered[Hindrance.DRAINED].get(name)
        return None if host is None else host.drain

    def distrust(self, name: str) -> None:
        """Make a slow host the last choice; it stays usable."""
        self.distrusted.add(name)

    def trust(self, name: str) -> None:
        """Treat a host like any other again."""
        self.distrusted.discard(name)

    def preference(self, host: Host) -> tuple[bool, int]:
        """Return the sort key for the order in which to use hosts: stable, slow ones last."""
        return (host.name in self.distrusted, host.position)

    def cooldown_left(self, name: str, now: float) -> float:
        """Return the seconds until its cool-down or pause is over; 0 outside of them."""
        ends = [self._hindered[k][name].until for k in TIMED if name in self._hindered[k]]
        return max(0.0, ends[0] - now) if ends else 0.0

    def hindered(self, kind: Hindrance) -> Mapping[str, Host]:
        """Return the hosts that a hindrance of this kind keeps from getting workers, by name."""
        return self._hindered[kind]

    def next_resurrection(self) -> float | None:
        """Return when the first cool-down or pause ends."""
        return min((h.until for k in TIMED for h in self._hindered[k].values()), default=None)

    def is_suspect(self, name: str, now: float) -> bool:
        """Return whether an agent was lost there within the window: the next one may fail too."""
        host = self.known.get(name)
        if host is None:
            return False
        return host.lost_at is not None or bool(self._recent(host.agent_losses, now))

    def count_failure(
        self, name: str, now: float, reason: str, *, needed: bool = False, leave: bool = False
    ) -> str | None:
        """Count a worker's failure; return the reason for a cool-down that it leads to.

        `needed`: the job cannot do without this host, so its restarts are delayed at most.
        `leave`: the job leaves the host whether it can do without it or not.
        """
        host = self._note_trouble(name, now)
        if host is None:
            return None
        failures = self._add(host.failures, now)
        given = self.settings.host_failures
        limit = given or (1 if leave else DEFAULT_HOST_FAILURES)
        if failures < limit or name in self._hindered[Hindrance.COOL_DOWN]:
            return None
        if needed and not leave:
            self._pause(host, now, reason, together=self.settings.settle)
            return None
        host.failures.clear()
        window = f"{counted(failures, 'failure')} within {self.settings.host_failure_window:g} s"
        why = reason if limit == 1 else f"{window}, the last: {reason}"
        cooldown = self._cool_down(host, now, why)
        host.left, host.needed_again = leave, not leave
        return cooldown

    def count_agent_loss(
        self, name: str, now: float, reason: str, *, started: bool, needed: bool = False
    ) -> str | None:
        """Count a lost agent; return the cool-down's reason, None: start it again in place.

        An agent that could not even start (`started` False) puts the host in cool-down, and so
        does a second loss within the window if no worker has trained in between. `needed`: see
        `count_failure`.
        """
        trained = name in self.known and self.known[name].stepped
        host = self._note_trouble(name, now)
        if host is None:
            return None
        losses = self._add(host.agent_losses, now)
        if started and (trained or losses == 1):
            return None
        if name in self._hindered[Hindrance.COOL_DOWN]:
            return host.reason
        if needed:
            self._pause(host, now, reason, together=0.0)
            return None
        return self._cool_down(host, now, reason)

    def count_refusal(self, name: str, now: float, reason: str) -> str | None:
        """Count an agent that a host refused to start; return what is new about that, in words.

        It is tried a few times more, as a machine may be new and not ready yet; then it is left
        alone. It is not used earlier if the job needs it: that would not help.
        """
        host = self.known.get(name)
        if host is None:
            return None
        host.refusals += 1
        if host.refusals >= MOST_REFUSALS:
            host.reason = f"tried {counted(host.refusals, 'time')}, and not again: {reason}"
            self._learn(host, HostNews.GIVEN_UP)
            mended = f"once it is mended: elasticctl drain {name} --cancel"
            return f"it was tried {counted(host.refusals, 'time')} and is left alone; {mended}"
        shortest, longest = self.settings.blacklist_cooldown
        host.until = now + min(shortest * 2.0 ** (host.refusals - 1), longest)
        host.reason, host.needed_again, host.left = reason, False, False
        self._learn(host, HostNews.FAILED)
        return reason if host.refusals == 1 else None

    def record_failed_check(self, host: Host, now: float, reason: str) -> str:
        """Put a host that failed a check in cool-down; return the reason in words."""
        self._note_trouble(host.name, now)
        cooldown = self._cool_down(host, now, reason)
        host.needed_again = False
        return cooldown

    def is_left(self, host: Host) -> bool:
        """Return whether the workers of a host have to leave, because one there has failed."""
        return host.left and host.name in self._hindered[Hindrance.COOL_DOWN]

    def record_step(self, name: str) -> None:
        """Record that a worker there finished a step: later trouble may start a new count."""
        if name in self.known:
            self.known[name].stepped = True

    def resurrect(self, now: float) -> list[str]:
        """End the cool-downs that are over; return their hosts, without those that were removed."""
        cooling = self._hindered[Hindrance.COOL_DOWN]
        over = [host for host in cooling.values() if host.until <= now]
        for host in over:
            self._learn(host, HostNews.COOLED_DOWN)
        return [host.name for host in over if host.name in self.known]

    def end_pauses(self, now: float) -> bool:
        """End the pauses that are over; return whether there are any."""
        over = [h for h in self._hindered[Hindrance.PAUSING].values() if h.until <= now]
        for host in over:
            self._learn(host, HostNews.COOLED_DOWN)
        return bool(over)

    @property
    def can_recall(self) -> bool:
        """True if a host is in cool-down, and may be used again earlier."""
        return bool(self._hindered[Hindrance.COOL_DOWN])

    def recall(self) -> str | None:
        """End the cool-down that would end first: the job needs that host; return its name."""
        cooling = self._hindered[Hindrance.COOL_DOWN].values()
        can = (h for h in cooling if h.needed_again and self.hindrance(h.name) is _COOL_DOWN)
        host = min((h for h in can if h.name in self.known), key=attrgetter("until"), default=None)
        if host is not None:
            self._learn(host, HostNews.COOLED_DOWN)
        return None if host is None else host.name

    # ---- hosts that are not reachable ------------------------------------------------------

    def lose(self, name: str, now: float, reason: str, *, started: bool, probes: int) -> bool:
        """Record that a host is not reachable; return whether that is new.

        It is probed at once. After an agent that could not be started (`started` False), or was
        lost soon after the one before, it is probed after a pause, which grows. `probes`: so many
        have begun; their answers are old.
        """
        host = self.known.get(name)
        if host is None:
            return False
        new = host.lost_at is None
        if new:
            if now - host.last_lost > SOON_S:
                host.failed_starts = -started
            host.lost_at = host.last_lost = now
            host.probed, host.told_again_after = 0, FIRST_TOLD_AGAIN_S
            host.failed_starts += 1
        elif not started:
            host.failed_starts += 1
        host.reason, host.probes_from = reason, probes + 1
        host.probe_at = now + growing_pause(host.failed_starts, LONGEST_PROBE_S)
        self._learn(host, HostNews.LOST)
        self.next_probe = min(self.next_probe, host.probe_at)
        return new

    def record_answer(self, name: str, probe: int) -> Host | None:
        """Use a host again that was not reachable; None if the probe is not about that."""
        host = self._hindered[Hindrance.UNREACHABLE].get(name)
        if host is None or probe < host.probes_from:
            return None
        self._learn(host, HostNews.ANSWERED)
        return host

    def is_lost(self, name: str) -> bool:
        """Return whether the host was not reachable, and no agent has been up since."""
        return name in self.known and self.known[name].lost_at is not None

    def record_reached(self, name: str) -> None:
        """Record that an agent is up on a host."""
        if name in self.known:
            self.known[name].lost_at = None
            self.known[name].refusals = 0

    def take_due_probes(self, now: float) -> tuple[str, ...]:
        """Return the hosts to probe now, with those due in a moment: one event serves them all."""
        lost = self._hindered[Hindrance.UNREACHABLE].values()
        due = [host for host in lost if host.probe_at <= now + PROBED_TOGETHER_S]
        for host in due:
            gone = now - (now if host.lost_at is None else host.lost_at)
            host.probe_at = now + probe_pause(host.name, len(lost), gone)
            host.probed += 1
        self.next_probe = min((host.probe_at for host in lost), default=math.inf)
        return tuple(host.name for host in due)

    def take_still_away(self, names: Iterable[str], now: float) -> list[Host]:
        """Return those of these hosts of which it is time to say again that they do not answer."""
        away = self._hindered[Hindrance.UNREACHABLE]
        told = list[Host]()
        for host in (away[name] for name in names if name in away):
            if host.lost_at is not None and now - host.lost_at >= host.told_again_after:
                host.told_again_after *= 2.0
                told.append(host)
        return told

    def _learn(self, host: Host, news: HostNews) -> None:
        """Begin and end what hinders the host, by the table."""
        for kind, begins in HOST_TRANSITIONS.items():
            if begins.get(news) is True:
                self._hindered[kind][host.name] = host
            elif begins.get(news) is False:
                self._hindered[kind].pop(host.name, None)

    def _note_trouble(self, name: str, now: float) -> Host | None:
        """Record trouble; a finished step and a quiet window before it reset the cool-downs."""
        host = self.known.get(name)
        window = self.settings.host_failure_window
        if host is not None:
            quiet = host.last_trouble is not None and now - host.last_trouble > window
            if quiet and host.stepped:
                host.cooldowns = 0
            host.last_trouble, host.stepped = now, False
        return host

    def _cool_down(self, host: Host, now: float, reason: str) -> str:
        shortest, longest = self.settings.blacklist_cooldown
        length = min(shortest * 2.0**host.cooldowns, longest)
        host.cooldowns = min(host.cooldowns + 1, 64)
        host.until, host.reason, host.needed_again = now + length, reason, True
        host.left = False
        self._learn(host, HostNews.FAILED)
        return f"no new workers for {length:g} s: {reason}"

    def _pause(self, host: Host, now: float, reason: str, *, together: float) -> None:
        """Delay the next restart; the first one is not delayed, each later one longer.

        Failures less than `together` seconds after the one that began a pause are part of it.
        """
        since = now - host.paused_at
        if since < together:
            return
        if since > self.settings.host_failure_window:
            host.pauses = 0
        length = growing_pause(host.pauses, self.settings.blacklist_cooldown[0])
        host.pauses, host.paused_at = host.pauses + 1, now
        if length:
            host.until = now + length
            host.reason = f"the next restart waits {length:g} s: {reason}; no host can replace it"
            self._learn(host, HostNews.FAILED_FAST)

    def _recent(self, times: list[float], now: float) -> list[float]:
        """Return the times within the window."""
        return [at for at in times if at > now - self.settings.host_failure_window]

    def _add(self, times: list[float], now: float) -> int:
        """Add a time and forget those before the window; return how many there are then."""
        times.append(now)
        times[:] = self._recent(times, now)
        return len(times)


# ---- in words for people -----------------------------------------------------------------


def reason_of(hosts: Hosts, name: str, now: float) -> str:
    """Return why the host gets no workers, or is the last choice; empty if neither is so."""
    kind = hosts.hindrance(name)
    if kind is None:
        return "slow: the last choice" if name in hosts.distrusted else ""
    host = hosts.hindered(kind)[name]
    drain = host.drain.reason if host.drain else ""
    gone = now - (host.lost_at or now)
    probe = max(0.0, host.probe_at - now)
    lost = f"gone for {gone:.0f} s, next probe in {probe:.1f} s: {host.reason}"
    others = {Hindrance.UNCHECKED: host.check, Hindrance.UNREACHABLE: lost}
    return {Hindrance.DRAINED: drain, **others}.get(kind, host.reason)


def outlook(hosts: Hosts, now: float) -> str:
    """Return when the first host comes back if all are in cool-down or not reachable."""
    kinds = {hosts.hindrance(name) for name in hosts.known}
    if not kinds or not kinds <= {Hindrance.UNREACHABLE, *TIMED}:
        return ""
    lost = hosts.hindered(Hindrance.UNREACHABLE)
    waiting = {**hosts.hindered(TIMED[0]), **hosts.hindered(TIMED[1])}
    ends = [(h.until, name) for name, h in waiting.items() if name in hosts.known.keys() - lost]
    parts = [f"{name} is back in {until - now:.0f} s" for until, name in sorted(ends)[:1]]
    if lost:
        it = "it answers" if len(lost) == 1 else "they answer"
        parts.append(f"{counted(len(lost), 'is', 'are')} probed, and used again as soon as {it}")
    every = "each host is in cool-down or unreachable"
    return f"{every}; {'; '.join(parts)}"
