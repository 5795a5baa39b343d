"""Where every rank stands: asked for, collected, grouped, and the odd one named.

Asked for when a worker first says that it stands still (`hangs`), or when somebody wants to know
(`elasticctl stacks`). Workers answer for themselves, from their heartbeat thread; their agents
answer too, with what can be seen from outside, for a process that is stopped or holds the
interpreter lock says nothing. An answer of the worker's own counts before its agent's. When all
have answered, or after `ANSWER_S`, the event `stacks_collected` says who stands where.

Entered by `job`. Pure; times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from elastic_driver.core.decisions import AskStacks, StackGroup
from elastic_driver.core.documents import StacksOrder
from elastic_driver.core.events import WorkerStack
from elastic_driver.core.pending import Inquiry, Told
from elastic_driver.core.rules.workers import Worker, WorkerState
from elastic_driver.core.stack_location import SEEN_WAITING
from elastic_driver.core.state import JobState

ANSWER_S = 1.5  # a heartbeat thread answers within milliseconds, an agent within a second
MAX_STACK_CHARS = 8000  # of one group's stack in the event log
MAX_GROUPS = 16  # with their stacks; more of them, and the ranks alone are kept
NO_ANSWER = "no answer"
COLLECTIVE = "collective"


def ask(job: JobState, now: float, reason: str) -> None:
    """Ask every worker and every agent, unless a question is open already."""
    if job.inquiry is not None:
        return
    job.inquiries += 1
    job.inquiry = Inquiry(job.inquiries, now, reason)
    job.decide(AskStacks(job.inquiries, reason))
    for host in sorted({worker.host for worker in _asked(job)}):
        job.order(host, StacksOrder(job.inquiries), reason)


def told(job: JobState, event: WorkerStack, _now: float) -> None:
    """Enter an answer."""
    worker = job.registry.workers.get(event.worker)
    if job.inquiry is None or event.number != job.inquiry.number or worker is None:
        job.ignore(f"a stack of {event.worker} that nobody waits for")
        return
    note(job, event.worker, Told(event.where, event.stack, event.own))


def note(job: JobState, worker: str, answer: Told) -> None:
    """Take an answer, whichever way it came, where a question is open."""
    if job.inquiry is not None and (answer.own or worker not in job.inquiry.told):
        job.inquiry.told[worker] = answer


def look(job: JobState, now: float) -> None:
    """Settle the question when everybody has answered, or the time is over."""
    inquiry = job.inquiry
    if inquiry is None:
        return
    own = {worker for worker, answer in inquiry.told.items() if answer.own}
    all_told = own.issuperset(worker.id for worker in _asked(job))
    if all_told or job.passed(inquiry.since + ANSWER_S, now, ""):
        settle(job)


def settle(job: JobState) -> None:
    """Say what is known by now; before anybody is killed for it."""
    inquiry, job.inquiry = job.inquiry, None
    if inquiry is None:
        return
    unknown = Told(NO_ANSWER, "", own=False)
    places = {w.place.rank: inquiry.told.get(w.id, unknown) for w in _asked(job)}
    groups = group(places)
    job.announce(
        "stacks_collected",
        f"{inquiry.reason}: {describe(groups)}",
        stacks=groups[:MAX_GROUPS],
    )


def _asked(job: JobState) -> Sequence[Worker]:
    """The round's members; where none trains yet, every worker that has a process."""
    running = tuple(job.registry.having(WorkerState.RUNNING))
    return running or tuple(job.registry.having(WorkerState.STARTING, WorkerState.READY))


# ---- who stands where --------------------------------------------------------------------


def group(places: Mapping[int, Told]) -> tuple[StackGroup, ...]:
    """Ranks with the same stack together; the smallest group first, then by rank."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(places):
        groups.setdefault((places[rank].where, places[rank].stack), []).append(rank)
    found = [
        StackGroup(tuple(ranks), where, stack[-MAX_STACK_CHARS:])
        for (where, stack), ranks in groups.items()
    ]
    found.sort(key=lambda g: (len(g.ranks), g.ranks))
    odd = odd_ranks(found)
    return tuple(replace(g, odd=odd.issuperset(g.ranks)) for g in found)


def odd_ranks(groups: Sequence[StackGroup]) -> frozenset[int]:
    """The ranks that stand apart from the others; none where that cannot be said.

    Where some wait in a collective, it is those who are not in one, or silent: they are waited for.
    Where nobody speaks for itself, what is seen from outside says who waits. Otherwise, of two or
    more groups, the only smallest, if it is less than half of all.
    """
    ranks = sum(len(g.ranks) for g in groups)
    for waiting in (COLLECTIVE, SEEN_WAITING):
        apart = frozenset(rank for g in groups if g.where != waiting for rank in g.ranks)
        if 0 < len(apart) < ranks:
            return apart
    if len(groups) < 2 or len(groups[0].ranks) == len(groups[1].ranks):
        return frozenset()
    smallest = frozenset(groups[0].ranks)
    return smallest if len(smallest) < ranks / 2 else frozenset()


def describe(groups: Sequence[StackGroup]) -> str:
    """In a sentence, the odd ones first."""
    first = sorted(groups, key=lambda g: not g.odd)
    parts = [
        f"{_ranks(g.ranks)} {_where(g.where)}{' (apart from the others)' if g.odd else ''}"
        for g in first[:MAX_GROUPS]
    ]
    if len(groups) > MAX_GROUPS:
        parts.append(f"{len(groups) - MAX_GROUPS} more groups")
    return ", ".join(parts) or "there are no workers"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _where(where: str) -> str:
    return {COLLECTIVE: "in a collective", "elsewhere": "outside of collectives"}.get(where, where)
