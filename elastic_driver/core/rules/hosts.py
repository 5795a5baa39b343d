"""The hosts that discovery found, and what keeps them from getting new workers.

Discovery reports hosts, failures put them in cool-down, time brings them back; a drain or a check
that is due keeps them out, too. The transition table says which news begins and ends what.
A host in cool-down keeps its healthy workers and only gets no new ones. The workers of a drained
host leave. Times are monotonic seconds.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from elastic_driver.settings import DEFAULT_HOST_FAILURES, Settings


class Hindrance(str, Enum):
    """Something that keeps a host from getting workers; a host may have several."""

    COOL_DOWN = "cool-down"
    DRAINED = "drained"
    UNCHECKED = "checking"  # it waits for a node check


class HostNews(str, Enum):
    """News of a host."""

    FAILED = "failed"  # its workers, its agent or a node check, beyond the limit
    COOLED_DOWN = "cool-down over"
    DRAINED = "drain"
    UNDRAINED = "drain cancelled"
    CHECK_DUE = "check due"
    CHECKED = "checked"
    REMOVED = "removed"  # discovery no longer reports it; this ends no cool-down


_H = HostNews
HOST_TRANSITIONS: dict[Hindrance, dict[HostNews, bool]] = {  # whether the news begins or ends it
    Hindrance.COOL_DOWN: {_H.FAILED: True, _H.COOLED_DOWN: False},
    Hindrance.DRAINED: {_H.DRAINED: True, _H.UNDRAINED: False, _H.REMOVED: False},
    Hindrance.UNCHECKED: {_H.CHECK_DUE: True, _H.CHECKED: False, _H.REMOVED: False},
}


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
    until: float = 0.0  # the end of its cool-down
    reason: str = ""  # of its cool-down
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
class HostManager:
    """Discovered hosts in stable order, with their failures and cool-downs."""

    settings: Settings
    distrusted: set[str] = field(default_factory=set)  # slow hosts: usable, but the last choice
    known: dict[str, Host] = field(default_factory=dict)  # that are there, in stable order
    _positions: int = 0
    _hindered: dict[Hindrance, dict[str, Host]] = field(
        default_factory=lambda: {kind: {} for kind in Hindrance}
    )
    # A host that is removed and added again keeps its record: a short absence heals nothing.
    _records: dict[str, Host] = field(default_factory=dict)

    def discovered(self, hosts: tuple[tuple[str, int], ...]) -> HostChanges:
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
                added.append((name, slots))
            elif known.slots != slots:
                resized.append((name, known.slots, slots))
                known.slots = slots
        return HostChanges(tuple(added), removed, tuple(resized))

    def usable(self, name: str) -> bool:
        """Return whether the host is there and nothing keeps it from getting workers."""
        return name in self.known and self.hindrance(name) is None

    def hindrance(self, name: str) -> Hindrance | None:
        """Return what keeps the host from getting workers; a drain is named before the others."""
        first = (Hindrance.DRAINED, Hindrance.COOL_DOWN, Hindrance.UNCHECKED)
        return next((kind for kind in first if name in self._hindered[kind]), None)

    def hold(self, name: str, reason: str) -> None:
        """Keep a host from being used until `release`; does nothing if it is not there."""
        if name in self.known:
            self.known[name].check = reason
            self._learn(self.known[name], HostNews.CHECK_DUE)

    def release(self, host: Host) -> bool:
        """Let a host be used that was held for a check; return False if it was not held."""
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
        host, known = self.known.get(name), self.drained(name)
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
        """Let a drained host be used again; return False if it is not drained."""
        host = self._hindered[Hindrance.DRAINED].get(name)
        if host is not None:
            self._learn(host, HostNews.UNDRAINED)
        return host is not None

    def drained(self, name: str) -> Drain | None:
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
        """Return the seconds until the host may receive workers again; 0 outside cool-down."""
        host = self._hindered[Hindrance.COOL_DOWN].get(name)
        return max(0.0, host.until - now) if host else 0.0

    def reason(self, name: str) -> str:
        """Return why the host gets no workers, or is the last choice; empty if neither is so."""
        kind = self.hindrance(name)
        if kind is None:
            return "slow: the last choice" if name in self.distrusted else ""
        host = self._hindered[kind][name]
        drain = host.drain.reason if host.drain else ""
        return {Hindrance.DRAINED: drain, Hindrance.UNCHECKED: host.check}.get(kind, host.reason)

    def next_resurrection(self) -> float | None:
        """Return when the first cool-down ends."""
        return min((h.until for h in self._hindered[Hindrance.COOL_DOWN].values()), default=None)

    def suspect(self, name: str, now: float) -> bool:
        """Return whether an agent was lost there within the window: the next one may fail too."""
        host = self.known.get(name)
        return host is not None and self._recent(host.agent_losses, now) > 0

    def worker_failed(self, name: str, now: float, reason: str) -> str | None:
        """Count a worker's failure; return the reason for a cool-down that it leads to."""
        host = self._note_trouble(name, now)
        if host is None:
            return None
        host.failures.append(now)
        failures, given = self._recent(host.failures, now), self.settings.host_failures
        limit = DEFAULT_HOST_FAILURES if given is None else given
        if failures < limit or name in self._hindered[Hindrance.COOL_DOWN]:
            return None
        host.failures.clear()
        window = f"{failures} failures within {self.settings.host_failure_window:g} s"
        return self._cool_down(host, now, f"{window}, the last: {reason}")

    def agent_failed(self, name: str, now: float, reason: str, *, started: bool) -> str | None:
        """Count a lost agent; return the cool-down's reason, None: start it again in place.

        An agent that could not even start (`started` False), or a second loss within the
        window, puts the host in cool-down.
        """
        host = self._note_trouble(name, now)
        if host is None:
            return None
        host.agent_losses.append(now)
        if started and self._recent(host.agent_losses, now) == 1:
            return None
        cooling = name in self._hindered[Hindrance.COOL_DOWN]
        return host.reason if cooling else self._cool_down(host, now, reason)

    def check_failed(self, host: Host, now: float, reason: str) -> str:
        """Put a host that failed a check in cool-down; return the reason in words."""
        self._note_trouble(host.name, now)
        return self._cool_down(host, now, reason)

    def step_finished(self, name: str) -> None:
        """Record that a worker there finished a step: later trouble may start a new count."""
        if name in self.known:
            self.known[name].stepped = True

    def resurrect(self, now: float) -> list[str]:
        """End the cool-downs that are over; return their hosts, without those that were removed."""
        over = [h for h in self._hindered[Hindrance.COOL_DOWN].values() if h.until <= now]
        for host in over:
            self._learn(host, HostNews.COOLED_DOWN)
        return [host.name for host in over if host.name in self.known]

    def _learn(self, host: Host, news: HostNews) -> None:
        """Begin and end what hinders the host, by the table."""
        for kind, begins in HOST_TRANSITIONS.items():
            if begins.get(news) is True:
                self._hindered[kind][host.name] = host
            elif begins.get(news) is False:
                self._hindered[kind].pop(host.name, None)

    def _note_trouble(self, name: str, now: float) -> Host | None:
        """Record trouble; a finished step and a quiet window before it reset the cool-downs."""
        host, window = self.known.get(name), self.settings.host_failure_window
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
        host.until, host.reason = now + length, reason
        self._learn(host, HostNews.FAILED)
        return f"no new workers for {length:g} s: {reason}"

    def _recent(self, times: list[float], now: float) -> int:
        """Drop times before the window; return how many are left."""
        times[:] = [at for at in times if at > now - self.settings.host_failure_window]
        return len(times)
