"""Who hangs, from what the workers' own heartbeat threads say of their training threads.

A worker that shows no progress for longer than its limit says so, with where its training thread
stands: in a collective, waiting for others, or elsewhere (`worker.heartbeat.watch`). Alone, that
proves little: who waits in a collective may wait for somebody else. So this module waits until all
members of the round have spoken, or `settle` seconds, and then:

- one stands elsewhere while the others wait: it is the one that hangs, and is given up;
- several stand elsewhere: the round is broken, and whoever does not leave it hangs;
- all wait in collectives: these do not match. The round is broken once, for a lost message heals
  that way; when it happens again without a step in between, the job fails and says who waits where;
- nobody waits for anybody, all stand elsewhere: most likely a long evaluation that does not report
  itself. It is announced, and only broken when it lasts (or at once, where the user set the limit).

A member that is busy and said so sends no word, so nobody is blamed for waiting for it. Entered by
`job`, asked by `elastic`. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_driver.core.events import WorkerResumed, WorkerSilent, WorkerStalled
from elastic_driver.core.pending import Told
from elastic_driver.core.rules import stacks
from elastic_driver.core.rules.rounds import RoundState, Stall
from elastic_driver.core.rules.workers import Worker, WorkerState
from elastic_driver.core.state import JobState

LEAVE_S = 5.0  # to leave a round that was broken; who can leave does so in well under a second
LONG_STALL = 8.0  # times as long as first told: then even an evaluation is taken for a hang
MAX_STACK_CHARS = stacks.MAX_STACK_CHARS


def stalled(job: JobState, worker: Worker, event: WorkerStalled, now: float) -> bool:
    """Enter a worker's word; False where it is late."""
    if worker.state is not WorkerState.RUNNING or event.round != job.round.number:
        return False
    earlier = job.round.stalls.get(worker.id)
    stack = event.stack[-MAX_STACK_CHARS:]
    job.round.stalls[worker.id] = Stall(
        waits=event.where == "collective",
        seconds=event.seconds,
        at=now if earlier is None else earlier.at,
        first_seconds=event.seconds if earlier is None else earlier.first_seconds,
        stack=stack,
    )
    if earlier is None:
        job.announce(
            "worker_stalled",
            f"no progress for {event.seconds:.1f} s, its training thread stands "
            f"{'in a collective' if event.where == 'collective' else 'elsewhere'}",
            worker,
            where=event.where,
            stack=stack,
        )
        if len(job.round.stalls) == 1:
            stacks.ask(job, now, f"{worker.id} makes no progress")
    stacks.note(job, worker.id, Told(event.where, stack, own=True))
    return True


def resumed(job: JobState, worker: Worker, event: WorkerResumed) -> bool:
    """A worker goes on after all; False where nobody knew that it stood still."""
    if event.round != job.round.number or job.round.stalls.pop(worker.id, None) is None:
        return False
    job.announce("worker_resumed", "it makes progress again", worker)
    return True


def silent(job: JobState, worker: Worker, event: WorkerSilent, now: float) -> None:
    """A member is not heard of: who may hang in C, with the interpreter lock, is looked at.

    Nothing else follows from it: its lease decides. But then it is killed, and would take with it
    what it hung in, where nobody has waited for it long enough to say so.
    """
    if worker.state is WorkerState.RUNNING:
        stacks.ask(job, now, f"{worker.id}: {event.reason}")


def culprits(job: JobState, now: float) -> list[tuple[Worker, str, Stall]]:
    """Members that hang, why, and the evidence; may also break the round, or end the job."""
    running = list(job.registry.having(WorkerState.RUNNING))
    stalls = job.round.stalls
    spoken = [worker for worker in running if worker.id in stalls]
    if not spoken:
        return []
    first = min(stalls[worker.id].at for worker in spoken)
    training = job.round.state is RoundState.COMPLETE or job.round.at_boundary
    if training and len(spoken) < len(running):
        waiting = f"{spoken[0].id} makes no progress; what do the others say?"
        if not job.passed(first + job.settings.settle, now, waiting):
            return []
    elsewhere = [worker for worker in spoken if not stalls[worker.id].waits]
    if training:
        stacks.settle(job)  # before anybody is killed: who stood where is evidence
    if not training:
        return _unmoved(job, elsewhere or spoken, now)
    if len(elsewhere) == 1 and len(running) > 1:
        return [_verdict(job, elsewhere[0], "while its peers wait for it")]
    if elsewhere and len(elsewhere) == len(running) and not _lasts(job, elsewhere):
        return []
    if elsewhere:
        _break_round(job, now, f"{len(elsewhere)} workers stand outside of collectives")
    elif len(spoken) == len(running):
        _break_mismatch(job, spoken, now)
    return []


def _unmoved(job: JobState, suspects: list[Worker], now: float) -> list[tuple[Worker, str, Stall]]:
    """Those who do not leave a round that is closing, though a while has passed."""
    since = max(job.round.since, *(job.round.stalls[worker.id].at for worker in suspects))
    if not job.passed(since + LEAVE_S, now, f"{suspects[0].id} does not leave the round"):
        return []
    return [_verdict(job, worker, "and does not leave the round") for worker in suspects]


def _verdict(job: JobState, worker: Worker, how: str) -> tuple[Worker, str, Stall]:
    stall = job.round.stalls[worker.id]
    return worker, f"no progress for {stall.seconds:.1f} s {how}: {stall.place}", stall


def _lasts(job: JobState, workers: Sequence[Worker]) -> bool:
    """Whether all stand still for so long that it can be no evaluation."""
    if job.settings.hang_timeout is not None:
        return True
    stalls = [job.round.stalls[worker.id] for worker in workers]
    return all(stall.seconds >= LONG_STALL * stall.first_seconds for stall in stalls)


def _break_round(job: JobState, now: float, reason: str) -> None:
    job.leave_round(now, f"no progress: {reason}")


def _break_mismatch(job: JobState, workers: Sequence[Worker], now: float) -> None:
    """All wait for each other: once may be an accident, twice is the script."""
    where = describe_groups(job, workers)
    if job.mismatches:
        job.fail(
            f"all {len(workers)} workers wait in collectives that do not match, again: {where}"
        )
        return
    job.mismatches += 1
    _break_round(job, now, f"collectives that do not match: {where}")


def describe_groups(job: JobState, workers: Sequence[Worker]) -> str:
    """Which ranks stand where, those at the same place named together."""
    places: dict[str, list[int]] = {}
    for worker in workers:
        places.setdefault(job.round.stalls[worker.id].place, []).append(worker.place.rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))} at {place}"
        for place, ranks in sorted(places.items(), key=lambda item: min(item[1]))
    )
