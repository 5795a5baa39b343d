"""The reasons why hosts get no workers, in words for people. Times are monotonic seconds."""

from elastic_driver.core.rules.host_states import Hindrance
from elastic_driver.core.rules.hosts import TIMED, HostManager
from elastic_driver.words import counted


def reason_of(hosts: HostManager, name: str, now: float) -> str:
    """Return why the host gets no workers, or is the last choice; empty if neither is so."""
    kind = hosts.hindrance(name)
    if kind is None:
        return "slow: the last choice" if name in hosts.distrusted else ""
    host = hosts.hindered(kind)[name]
    drain = host.drain.reason if host.drain else ""
    gone, probe = now - (host.lost_at or now), max(0.0, host.probe_at - now)
    lost = f"gone for {gone:.0f} s, next probe in {probe:.1f} s: {host.reason}"
    others = {Hindrance.UNCHECKED: host.check, Hindrance.UNREACHABLE: lost}
    return {Hindrance.DRAINED: drain, **others}.get(kind, host.reason)


def outlook(hosts: HostManager, now: float) -> str:
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
