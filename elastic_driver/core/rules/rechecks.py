"""Hosts that are checked before they get workers, while the others train.

Only in jobs that began with a node check. A host that comes in later, comes back, or has been in
cool-down is *held*: it is there, and gets nothing until a check has passed. Held hosts are checked
together, beside one host that is known to be good and has no workers (where there is one): the
hosts that train are left alone. What was usual in the first check is usual here too, so that a
host checked alone can be slow. One that fails goes into cool-down, and is checked again after it.

An agent that is lost for the first time is started again in place without a check, as its workers
would otherwise wait for it. Entered by `job`. Pure; times are monotonic seconds.
"""

from __future__ import annotations

from elastic_driver.core.decisions import CheckHosts
from elastic_driver.core.events import HostResult, HostsChecked
from elastic_driver.core.state import JobState


def hold(job: JobState, host: str, reason: str) -> bool:
    """Keep a host from being used until it was checked; False where the job checks no hosts."""
    if job.settings.checked_hosts is None:
        return False
    job.hosts.hold(host, reason)
    return True


def found(job: JobState, host: str) -> None:
    """Discovery has named a host that was not there: was it checked before the job began?"""
    checked = job.settings.checked_hosts
    if checked is not None and (host not in checked or host in job.ever_gone):
        again = "it has been away" if host in job.ever_gone else "it was not there before"
        hold(job, host, again)


def lost(job: JobState, host: str) -> None:
    """Discovery no longer names a host: whatever comes back under that name is checked."""
    job.ever_gone.add(host)


def look(job: JobState, now: float) -> None:
    """Have the held hosts checked, unless a check is going on; called at each look at the job."""
    held = job.hosts.held()
    if not held or job.checking or job.first_success is not None:
        return
    since = job.held_since = now if job.held_since is None else job.held_since
    if not job.passed(since + job.settings.last_call, now, ""):
        return  # hosts often come several at a time
    partner = next((h.name for h in job.hosts.order if _idle(job, h.name)), None)
    hosts = (*held, partner) if partner is not None else held
    beside = f", beside {partner}" if partner is not None else ""
    reason = f"{', '.join(f'{h}: {job.hosts.held_reason(h)}' for h in held)}{beside}"
    job.announce("host_check_started", reason)
    job.held_since = None
    job.host_checks += 1
    job.checking = {host: _position(job, host) for host in hosts}
    slots = tuple((host, job.hosts.slots(host)) for host in hosts)
    job.decide(CheckHosts(slots, reason, job.host_checks))


def _position(job: JobState, host: str) -> int:
    """Changes when a host goes away and comes back; −1 where it is not there."""
    known = job.hosts.get(host)
    return -1 if known is None else known.position


def _idle(job: JobState, host: str) -> bool:
    return job.hosts.usable(host) and not job.registry.on_host(host)


def checked(job: JobState, event: HostsChecked, now: float) -> None:
    """A check is over: release the hosts that passed, put the others in cool-down.

    An answer to another check than the one that is going on came late, or for the second time. A
    host that has been away since the check began is held anew; what was found before is void.
    """
    if event.number != job.host_checks or not job.checking:
        return
    began, job.checking = job.checking, {}
    job.capacity_changed = True
    results = {result.host: result for result in event.results}
    for host, position in began.items():
        if host in job.hosts and _position(job, host) == position:
            _judge(job, results.get(host) or HostResult(host, False, "it was not mentioned"), now)


def _judge(job: JobState, result: HostResult, now: float) -> None:
    host, held = result.host, bool(job.hosts.held_reason(result.host))
    job.hosts.release(host)
    if not result.passed:
        cooldown = job.hosts.check_failed(host, now, f"node check: {result.reason}")
        job.announce("host_blacklisted", cooldown, host=host)
    elif held:  # the others were its partners
        job.announce("host_checked", result.reason, host=host)
