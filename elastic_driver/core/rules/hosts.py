"""Which hosts there are, and which of them may receive new workers right now.

Discovery reports hosts, failures put them in cool-down, time brings them back. This module
only decides; `runtime.discovery` asks the cluster. Nothing here reads a clock: methods that
depend on time take `now`, in monotonic seconds. A host in cool-down keeps its healthy
workers; it only gets no new ones. A host that is drained is there, gets nothing, and its
workers leave: until it is told otherwise, or has been away and is found again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from elastic_driver.settings import DEFAULT_HOST_FAILURES, Settings


@dataclass(slots=True)
class Host:
    """A host that was discovered, with its record."""

    name: str
    slots: int
    position: int = 0  # in the stable order; a host that comes back goes to the end
    failures: deque[float] = field(default_factory=deque)  # times, within the window
    agent_losses: deque[float] = field(default_factory=deque)
    cooldowns: int = 0  # in a row; each doubles the next one
    until: float | None = None  # in cool-down up to this time
    reason: str = ""  # why it is in cool-down
    last_trouble: float | None = None
    stepped: bool = False  # a worker there has finished a step since the last trouble


@dataclass(frozen=True, slots=True)
class Drain:
    """Why a host is drained, and until when its workers may wait for their replacements.

    `leave_by`: when its agent, which has a notice of the host's end, stops them; None: never.
    Times are monotonic seconds.
    """

    reason: str
    replace_until: float
    leave_by: float | None = None


@dataclass(frozen=True, slots=True)
class HostChanges:
    """What a discovery changed: (host, slots), (host), (host, slots before, slots now)."""

    added: tuple[tuple[str, int], ...]
    removed: tuple[str, ...]
    resized: tuple[tuple[str, int, int], ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.resized)


class HostManager:
    """Discovered hosts in stable order, with their failures and cool-downs."""

    def __init__(self, settings: Settings) -> None:
        self._window = settings.host_failure_window
        self._threshold = (
            DEFAULT_HOST_FAILURES if settings.host_failures is None else settings.host_failures
        )
        self._shortest, self._longest = settings.blacklist_cooldown
        self._hosts: dict[str, Host] = {}
        self._positions = 0
        self._cooling: dict[str, Host] = {}
        self._drains: dict[str, Drain] = {}  # of hosts that are there
        self._held: dict[str, str] = {}  # host → why it is to be checked first
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
            self._drains.pop(name, None)
            self._held.pop(name, None)
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
        """Whether the host is there, not in cool-down, not drained and not held for a check."""
        kept_out = name in self._cooling or name in self._drains or name in self._held
        return name in self._hosts and not kept_out

    def hold(self, name: str, reason: str) -> None:
        """Keep a host from being used until `release`; harmless where it is not there."""
        if name in self._hosts:
            self._held[name] = reason

    def release(self, name: str) -> None:
        """End a hold."""
        self._held.pop(name, None)

    def held(self) -> tuple[str, ...]:
        """Hosts that wait for a check and could be used otherwise, in stable order."""
        return tuple(n for n in self._held if n not in self._cooling and n not in self._drains)

    def held_reason(self, name: str) -> str:
        """Why a host is to be checked; empty where it is not held."""
        return self._held.get(name, "")

    def drain(self, name: str, drain: Drain) -> bool:
        """Keep a host from being used; False where it is not there, or nothing is new.

        Of several drains the one that hurries most counts.
        """
        known = self._drains.get(name)
        if name not in self._hosts:
            return False
        if known is not None and known.replace_until <= drain.replace_until:
            if known.leave_by is not None or drain.leave_by is None:
                return False
            drain = replace(drain, replace_until=known.replace_until)
        self._drains[name] = drain
        return True

    def undrain(self, name: str) -> bool:
        """Let a drained host be used again; False where it is not drained."""
        return self._drains.pop(name, None) is not None

    def drained(self, name: str) -> Drain | None:
        """The host's drain, if it is drained."""
        return self._drains.get(name)

    def distrust(self, name: str) -> None:
        """Make a slow host the last choice; it stays usable."""
        self._distrusted.add(name)

    def trust(self, name: str) -> None:
        """Let a host count like any other again."""
        self._distrusted.discard(name)

    def distrusted(self, name: str) -> bool:
        """Whether the host is the last choice, being slow."""
        return name in self._distrusted

    def choice(self) -> tuple[Host, ...]:
        """Every discovered host in the order in which to use them: stable, slow ones last."""
        return tuple(sorted(self._hosts.values(), key=self.preference))

    def preference(self, host: Host) -> tuple[bool, int]:
        """Sorts hosts into that order."""
        return (host.name in self._distrusted, host.position)

    def cooldown_left(self, name: str, now: float) -> float:
        """Seconds until the host may receive workers again; 0 outside cool-down."""
        host = self._cooling.get(name)
        return max(0.0, host.until - now) if host and host.until is not None else 0.0

    def cooldown_reason(self, name: str) -> str:
        """Why the host is in cool-down; empty outside."""
        host = self._cooling.get(name)
        return host.reason if host else ""

    def cooling(self) -> int:
        """How many discovered hosts are in cool-down."""
        return sum(1 for name in self._cooling if name in self._hosts)

    def next_resurrection(self) -> float | None:
        """When the first cool-down ends."""
        return min((h.until for h in self._cooling.values() if h.until is not None), default=None)

    def suspect(self, name: str, now: float) -> bool:
        """Whether an agent was lost there within the window: do not rely on its next one."""
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
        if failures < self._threshold or name in self._cooling:
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
        if name in self._cooling:
            return host.reason
        return self._cool_down(host, now, reason)

    def check_failed(self, name: str, now: float, reason: str) -> str:
        """Put a host that failed a check in cool-down; the reason in words."""
        host = self._hosts[name]
        self._note_trouble(host, now)
        return self._cool_down(host, now, reason)

    def step_finished(self, name: str) -> None:
        """A worker there finished a step: trouble long after this starts a new count."""
        host = self._hosts.get(name)
        if host is not None:
            host.stepped = True

    def resurrect(self, now: float) -> list[str]:
        """End the cool-downs that are over; the hosts that are there and usable again."""
        over = [h for h in self._cooling.values() if h.until is not None and h.until <= now]
        for host in over:
            del self._cooling[host.name]
            host.until, host.reason = None, ""
        return [host.name for host in over if host.name in self._hosts]

    def _note_trouble(self, host: Host, now: float) -> None:
        """A step finished since, and a quiet window, wipe the doubling of the cool-downs."""
        quiet = host.last_trouble is not None and now - host.last_trouble > self._window
        if quiet and host.stepped:
            host.cooldowns = 0
        host.last_trouble, host.stepped = now, False

    def _cool_down(self, host: Host, now: float, reason: str) -> str:
        length = min(self._shortest * 2.0**host.cooldowns, self._longest)
        host.cooldowns = min(host.cooldowns + 1, 64)
        host.until = now + length
        host.reason = reason
        self._cooling[host.name] = host
        return f"no new workers for {length:g} s: {reason}"

    def _recent(self, times: deque[float], now: float) -> int:
        while times and times[0] <= now - self._window:
            times.popleft()
        return len(times)
