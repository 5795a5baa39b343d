"""The hosts there are, and what keeps them from getting new workers.

Discovery reports hosts, failures put them in cool-down, time brings them back; a drain or a check
that is due keeps them out, too. The transition table says which news begins and ends what.
A host in cool-down keeps its healthy workers; it only gets no new ones. A drained host's workers
leave. Times are monotonic seconds.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum

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
    REMOVED = "removed"  # discovery no longer reports it; flapping ends no cool-down


HOST_TRANSITIONS: dict[Hindrance, dict[HostNews, bool]] = {  # whether the news begins or ends it
    Hindrance.COOL_DOWN: {HostNews.FAILED: True, HostNews.COOLED_DOWN: False},
    Hindrance.DRAINED: {HostNews.DRAINED: True, HostNews.UNDRAINED: False, HostNews.REMOVED: False},
    Hindrance.UNCHECKED: {
        HostNews.CHECK_DUE: True,
        HostNews.CHECKED: False,
        HostNews.REMOVED: False,
    },
}


@dataclass(frozen=True, slots=True)
class Drain:
    """The reason why a host or a worker has to go, and the limit of the wait for replacements.

    `leave_by`: when its agent, which has a notice of the host's end, stops it; None: never.
    Times are monotonic seconds.
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
    failures: deque[float] = field(default_factory=deque)  # times, within the window
    agent_losses: deque[float] = field(default_factory=deque)
    cooldowns: int = 0  # in a row; each doubles the next one
    until: float = 0.0  # in cool-down up to this time
    reason: str = ""  # why it is in cool-down
    last_trouble: float | None = None
    stepped: bool = False  # a worker there has finished a step since the last trouble
    drain: Drain | None = None  # while it is drained
    check: str = ""  # why it waits for a check


@dataclass(frozen=True, slots=True)
class HostChanges:
    """The changes of a discovery: (host, slots), (host), (host, slots before, slots now)."""

    added: tuple[tuple[str, int], ...]
    removed: tuple[str, ...]
    resized: tuple[tuple[str, int, int], ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.resized)


class HostManager:
    """Discovered hosts in stable order, with their failures and cool-downs."""

    def __init__(self, settings: Settings) -> None:
        self._window = settings.host_failure_window
        limit = settings.host_failures
        self._threshold = DEFAULT_HOST_FAILURES if limit is None else limit
        self._shortest, self._longest = settings.blacklist_cooldown
        self._hosts: dict[str, Host] = {}
        self._positions = 0
        self._hindered: dict[Hindrance, dict[str, Host]] = {kind: {} for kind in Hindrance}
        self._distrusted: set[str] = set()  # slow ones; flapping heals nothing here either
        # A host that is removed and added again keeps its record: flapping heals nothing.
        self._records: dict[str, Host] = {}

    def discovered(self, hosts: tuple[tuple[str, int], ...]) -> HostChanges:
        """Take over what discovery found; hosts with no slots count as absent.

        Known hosts keep their place, new ones follow in the order of the source.
        """
        found = {name: slots for name, slots in hosts if slots > 0}
        removed = tuple(name for name in self._hosts if name not in found)
        for name in removed:
            self._records[name] = self._hosts.pop(name)
            self._learn(self._records[name], HostNews.REMOVED)
        added, resized = [], []
        for name, slots in found.items():
            known = self._hosts.get(name)
            if known is None:
                host = self._records.pop(name, None) or Host(name, slots)
                self._positions += 1
                host.slots, host.position = slots, self._positions
                self._hosts[name] = host
                added.append((name, slots))
            elif known.slots != slots:
                resized.append((name, known.slots, slots))
                known.slots = slots
        return HostChanges(tuple(added), removed, tuple(resized))

    def __contains__(self, name: str) -> bool:
        return name in self._hosts

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def order(self) -> tuple[Host, ...]:
        """Every discovered host, in stable order."""
        return tuple(self._hosts.values())

    def get(self, name: str) -> Host | None:
        """The host, if it is there."""
        return self._hosts.get(name)

    def slots(self, name: str) -> int:
        """The host's slots; 0 for a host that is not (or no longer) there."""
        host = self._hosts.get(name)
        return host.slots if host else 0

    def usable(self, name: str) -> bool:
        """Return whether the host is there and nothing keeps it from getting workers."""
        return name in self._hosts and self.hindrance(name) is None

    def hindrance(self, name: str) -> Hindrance | None:
        """Return what keeps the host from getting workers; a drain is named before the others."""
        for kind in (Hindrance.DRAINED, Hindrance.COOL_DOWN, Hindrance.UNCHECKED):
            if name in self._hindered[kind]:
                return kind
        return None

    def hold(self, name: str, reason: str) -> None:
        """Keep a host from being used until `release`; harmless where it is not there."""
        host = self._hosts.get(name)
        if host is not None:
            host.check = reason
            self._learn(host, HostNews.CHECK_DUE)

    def release(self, host: Host) -> bool:
        """Let a host be used that was held for a check; False where it was not held."""
        held = host.name in self._hindered[Hindrance.UNCHECKED]
        self._learn(host, HostNews.CHECKED)
        return held

    def held(self) -> tuple[Host, ...]:
        """Return the hosts that only wait for a check, in stable order."""
        held = self._hindered[Hindrance.UNCHECKED].values()
        return tuple(h for h in held if self.hindrance(h.name) is Hindrance.UNCHECKED)

    def drain(self, name: str, drain: Drain) -> bool:
        """Keep a host from being used; False where it is not there, or nothing is new.

        Of several drains the one that hurries most counts.
        """
        host, known = self._hosts.get(name), self.drained(name)
        if host is None:
            return False
        if known is not None and known.replace_until <= drain.replace_until:
            if known.leave_by is not None or drain.leave_by is None:
                return False
            drain = replace(drain, replace_until=known.replace_until)
        host.drain = drain
        self._learn(host, HostNews.DRAINED)
        return True

    def undrain(self, name: str) -> bool:
        """Let a drained host be used again; False where it is not drained."""
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
        self._distrusted.add(name)

    def trust(self, name: str) -> None:
        """Let a host count like any other again."""
        self._distrusted.discard(name)

    def distrusted(self, name: str) -> bool:
        """Return whether the host is the last choice, being slow."""
        return name in self._distrusted

    def choice(self) -> tuple[Host, ...]:
        """Every discovered host in the order in which to use them: stable, slow ones last."""
        return tuple(sorted(self._hosts.values(), key=self.preference))

    def preference(self, host: Host) -> tuple[bool, int]:
        """Sorts hosts into that order."""
        return (host.name in self._distrusted, host.position)

    def cooldown_left(self, name: str, now: float) -> float:
        """Return the seconds until the host may receive workers again; 0 outside cool-down."""
        host = self._hindered[Hindrance.COOL_DOWN].get(name)
        return max(0.0, host.until - now) if host else 0.0

    def reason(self, name: str) -> str:
        """Return why the host gets no workers, or is the last choice; empty where it is neither."""
        kind = self.hindrance(name)
        if kind is None:
            return "slow: the last choice" if name in self._distrusted else ""
        host = self._hindered[kind][name]
        if kind is Hindrance.DRAINED and host.drain is not None:
            return host.drain.reason
        return host.check if kind is Hindrance.UNCHECKED else host.reason

    def next_resurrection(self) -> float | None:
        """Return when the first cool-down ends."""
        return min((h.until for h in self._hindered[Hindrance.COOL_DOWN].values()), default=None)

    def suspect(self, name: str, now: float) -> bool:
        """Return whether an agent was lost there within the window: do not rely on its next one."""
        host = self._hosts.get(name)
        return host is not None and self._recent(host.agent_losses, now) > 0

    def worker_failed(self, name: str, now: float, reason: str) -> str | None:
        """Count a worker's failure; the reason for the cool-down it leads to, if it does."""
        host = self._hosts.get(name)
        if host is None:
            return None
        self._note_trouble(host, now)
        host.failures.append(now)
        failures = self._recent(host.failures, now)
        if failures < self._threshold or name in self._hindered[Hindrance.COOL_DOWN]:
            return None
        host.failures.clear()
        text = f"{failures} failures within {self._window:g} s, the last: {reason}"
        return self._cool_down(host, now, text)

    def agent_failed(self, name: str, now: float, reason: str, *, started: bool) -> str | None:
        """Count a lost agent; None: start it again in place, else the cool-down's reason.

        An agent that could not even start (`started` False), or a second loss within the
        window, puts the host in cool-down.
        """
        host = self._hosts.get(name)
        if host is None:
            return None
        self._note_trouble(host, now)
        host.agent_losses.append(now)
        if started and self._recent(host.agent_losses, now) == 1:
            return None
        if name in self._hindered[Hindrance.COOL_DOWN]:
            return host.reason
        return self._cool_down(host, now, reason)

    def check_failed(self, host: Host, now: float, reason: str) -> str:
        """Put a host that failed a check in cool-down; the reason in words."""
        self._note_trouble(host, now)
        return self._cool_down(host, now, reason)

    def step_finished(self, name: str) -> None:
        """A worker there finished a step: trouble long after this starts a new count."""
        host = self._hosts.get(name)
        if host is not None:
            host.stepped = True

    def resurrect(self, now: float) -> list[str]:
        """End the cool-downs that are over; return the hosts of which discovery knows."""
        over = [h for h in self._hindered[Hindrance.COOL_DOWN].values() if h.until <= now]
        for host in over:
            self._learn(host, HostNews.COOLED_DOWN)
        return [host.name for host in over if host.name in self._hosts]

    def _learn(self, host: Host, news: HostNews) -> None:
        """Begin and end what hinders the host, by the table."""
        for kind, begins in HOST_TRANSITIONS.items():
            if begins.get(news) is True:
                self._hindered[kind][host.name] = host
            elif begins.get(news) is False:
                self._hindered[kind].pop(host.name, None)

    def _note_trouble(self, host: Host, now: float) -> None:
        """A step finished since, and a quiet window, wipe the doubling of the cool-downs."""
        quiet = host.last_trouble is not None and now - host.last_trouble > self._window
        if quiet and host.stepped:
            host.cooldowns = 0
        host.last_trouble, host.stepped = now, False

    def _cool_down(self, host: Host, now: float, reason: str) -> str:
        length = min(self._shortest * 2.0**host.cooldowns, self._longest)
        host.cooldowns = min(host.cooldowns + 1, 64)
        host.until, host.reason = now + length, reason
        self._learn(host, HostNews.FAILED)
        return f"no new workers for {length:g} s: {reason}"

    def _recent(self, times: deque[float], now: float) -> int:
        while times and times[0] <= now - self._window:
            times.popleft()
        return len(times)
