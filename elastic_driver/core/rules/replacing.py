"""Slow workers that are replaced by one on another host, where the user asked for it.

With `--replace-slow`, a rank that has computed slowly for long enough is replaced: a worker is
started on another host first, and when that is READY the slow one leaves at a step boundary, in
the same change of the world, as from a drained host. So no step is lost and the world never
shrinks. What bounds it: one replacement at a time, only out of a full world, only onto a host
that is not slow itself; a host once left is the last choice until a rank there has recovered, and
between two hosts there is a pause. Without room elsewhere nothing happens, and that is said once.

Called by the job machine; the verdict on a rank is `slowness.stragglers`', told by the shell and
forgotten with its round. Times are monotonic seconds.
"""

from __future__ import annotations

from elastic_driver.core.events import RankRecovered, RankSlow
from elastic_driver.core.pending import Replacement
from elastic_driver.core.rules import units
from elastic_driver.core.rules.outcome import Kind
from elastic_driver.core.rules.rounds import RoundState, Slow
from elastic_driver.core.rules.workers import ACTIVE, Worker, WorkerState
from elastic_driver.core.state import JobState

_HERE = (WorkerState.READY, WorkerState.RUNNING)
_GONE_AS_TOLD = (WorkerState.STOPPING, WorkerState.STOPPED)


def slow(job: JobState, event: RankSlow, now: float) -> None:
    """A rank has become slow; `look` decides what follows."""
    worker = job.registry.workers.get(event.worker)
    if event.round != job.round.number or worker is None or worker.state not in _HERE:
        job.ignore(f"{event.worker} was slow in round {event.round}, which is over for it")
        return
    job.round.slow.setdefault(event.worker, Slow(event.ratio, now))


def recovered(job: JobState, event: RankRecovered, now: float) -> None:
    """A rank is no longer slow: it stays, and its host counts like any other again."""
    worker = job.registry.workers.get(event.worker)
    if event.round != job.round.number or job.round.slow.pop(event.worker, None) is None:
        job.ignore(f"{event.worker} was not known to be slow in round {event.round}")
        return
    if job.replacing is not None and job.replacing.worker == event.worker:
        _abandon(job, now, "it is no longer slow")
    if worker is not None and not any(w.id in job.round.slow for w in _there(job, worker.host)):
        job.hosts.trust(worker.host)
        job.not_replaced.discard(worker.host)


def look(job: JobState, now: float) -> None:
    """Follow the replacement that goes on, or begin one; called before leavers are marked."""
    if not job.settings.replace_slow or job.kind is not Kind.ELASTIC:
        return
    if job.replacing is not None:
        _follow(job, job.replacing, now)
    elif job.round.slow and job.round.state is RoundState.COMPLETE and not job.finishing:
        _consider(job, now)


# ---- one that goes on --------------------------------------------------------------------


def _follow(job: JobState, replacement: Replacement, now: float) -> None:
    worker = job.registry.workers.get(replacement.worker)
    successor = _successor(job, replacement)
    ready = successor if successor is not None and successor.state in _HERE else None
    if worker is not None and ready is not None and worker.state in _GONE_AS_TOLD:
        _finish(job, worker, ready, now)
        return
    if worker is None or worker.state not in ACTIVE:
        why = f"{replacement.worker} is gone"
    elif job.finishing:
        why = "the job is finishing"
    elif job.round.number != replacement.round or _falls_apart(job):
        why = "the world has changed for another reason"
    elif not _makes_a_world(job, worker, replacement.target):
        why = "without it there are too few hosts"
    elif ready is None:
        why = _why_no_longer(job, replacement, successor, now)
    else:
        return  # they change places at the next boundary
    if why:
        _abandon(job, now, why)


def _falls_apart(job: JobState) -> bool:
    """Whether members leave because one was lost: then the slow one and its state are needed."""
    return job.round.state is RoundState.CLOSING and not job.round.at_boundary


def _why_no_longer(
    job: JobState, replacement: Replacement, successor: Worker | None, now: float
) -> str:
    """What stands against waiting for the successor; empty: nothing."""
    timeout = job.settings.start_timeout
    if job.round.state is not RoundState.COMPLETE:
        return "the world changes before its replacement is ready"
    if not job.hosts.usable(replacement.target):
        return f"host {replacement.target} cannot be used any more"
    if (job.wanted or 0) - job.registry.active() > (successor is None):
        return "more workers are wanted"
    if job.passed(replacement.until, now, ""):
        return f"no replacement is ready within {timeout:g} s"
    return ""


def _successor(job: JobState, replacement: Replacement) -> Worker | None:
    """The worker that was started for it, if there is one now."""
    return next(
        (
            worker
            for worker in _there(job, replacement.target)
            if worker.number > replacement.after and not worker.leaving
        ),
        None,
    )


def _there(job: JobState, host: str) -> list[Worker]:
    return [worker for worker in job.registry.on_host(host) if worker.state in ACTIVE]


def _finish(job: JobState, worker: Worker, successor: Worker, now: float) -> None:
    assert job.replacing is not None  # noqa: S101 - the caller has looked
    job.announce(
        "worker_replaced",
        f"by {successor.id}: {job.replacing.reason}",
        worker,
        replacement=successor.id,
    )
    job.replacing, job.capacity_changed = None, True
    if not _there(job, worker.host):  # workers left on the slow host may follow at once
        job.replace_after = now + job.settings.replace_pause


def _abandon(job: JobState, now: float, why: str) -> None:
    """Everybody stays; whoever is one too many then is stopped like any other."""
    assert job.replacing is not None  # noqa: S101 - the caller has looked
    worker = job.registry.workers.get(job.replacing.worker)
    job.announce("replacement_abandoned", why, worker)
    if worker is not None:
        worker.leaving = ""
    job.replacing, job.capacity_changed = None, True
    job.replace_after = now + job.settings.replace_pause


# ---- one that begins ---------------------------------------------------------------------


def _consider(job: JobState, now: float) -> None:
    """Replace the rank that has been slow for longest, if it is time and there is room."""
    worker_id, verdict = next(iter(job.round.slow.items()))
    worker = job.registry.workers.get(worker_id)
    if worker is None or worker.state is not WorkerState.RUNNING or worker.leaving:
        return  # it leaves as it is; the round's end forgets it
    if not job.passed(verdict.since + job.settings.slow_for, now, ""):
        return
    job.hosts.distrust(worker.host)
    if not job.passed(job.replace_after, now, ""):
        return
    target = _room_elsewhere(job, worker, now)
    if target is not None and _full(job):
        _begin(job, worker, verdict, target, now)
    elif target is None and worker.host not in job.not_replaced:
        job.not_replaced.add(worker.host)
        job.announce("worker_not_replaced", _why_not(job), worker)


def _full(job: JobState) -> bool:
    """Whether all who are wanted train; otherwise free slots are being filled already."""
    return job.size == job.registry.active() == job.wanted


def _begin(job: JobState, worker: Worker, verdict: Slow, target: str, now: float) -> None:
    until = now + job.settings.start_timeout
    reason = f"it took {verdict.ratio:.1f} times the usual time on {worker.host}"
    started = job.registry.started
    job.replacing = Replacement(worker.id, target, job.round.number, started, until, reason)
    job.capacity_changed = True
    job.announce("replacement_started", f"on {target}: {reason}", worker, target=target)


def _room_elsewhere(job: JobState, worker: Worker, now: float) -> str | None:
    """The host that may take the worker's place."""
    if job.wanted is None or _last_change(job):
        return None
    slow_now = {w.host for w in job.registry.having(*_HERE) if w.id in job.round.slow}
    for host in job.hosts.order:
        distrusted = host.name in slow_now or job.hosts.distrusted(host.name)
        if distrusted or not job.hosts.usable(host.name):
            continue
        if host.name not in job.fleet.agents and job.hosts.suspect(host.name, now):
            continue
        free = len(job.registry.on_host(host.name)) < host.slots
        if free and _makes_a_world(job, worker, host.name):
            return host.name
    return None


def _last_change(job: JobState) -> bool:
    """Whether a failure may need the changes that the reset limit leaves."""
    limit = job.settings.reset_limit
    return limit is not None and job.round.number >= limit


def _makes_a_world(job: JobState, worker: Worker, target: str) -> bool:
    """Whether those who stay, and those who take others' places, are on whole units of hosts."""
    if not units.limited(job.settings):
        return True
    staying = [w for w in job.registry.having(*ACTIVE) if w is not worker and not w.leaving]
    hosts = tuple({target, *(w.host for w in staying)})
    return len(units.whole(hosts, job.settings)) == len(hosts)


def _why_not(job: JobState) -> str:
    if _last_change(job):
        return "it is slow, but the reset limit leaves no change for that"
    return "it is slow, but no other host that is not has a free slot (--max-np below all slots?)"
