"""The place where every rank stands: asked for, collected, grouped, and the odd one named.

Asked for when a worker first says that it stands still (`hangs`), or when a user asks
(`elasticctl stacks`). Workers answer for themselves, from their heartbeat thread; their agents
answer too, with what can be seen from outside, for a process that is stopped or holds the
interpreter lock says nothing. An answer of the worker's own counts before its agent's. When all
have answered, or after `ANSWER_S`, the event `stacks_collected` says who stands where.

Times are monotonic seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from elastic_driver.core.decisions import AskStacks, StackGroup
from elastic_driver.core.documents import StacksOrder
from elastic_driver.core.events import StacksRequested, WorkerStack
from elastic_driver.core.rules.base import Rule
from elastic_driver.core.rules.workers import READY, RUNNING, STARTING, Worker
from elastic_driver.core.stack_location import SEEN_WAITING

ANSWER_S = 1.5  # a heartbeat thread answers within milliseconds, an agent within a second
MAX_STACK_CHARS = 8000  # of one group's stack in the event log
MAX_GROUPS = 16  # with their stacks; more of them, and the ranks alone are kept
NO_ANSWER = "no answer"
COLLECTIVE = "collective"


class StackAnswer(NamedTuple):
    """One worker's answer."""

    where: str
    stack: str
    own: bool  # said by the worker itself, not by its agent


@dataclass(slots=True)
class StackQuestion:
    """A question to all workers that is not settled yet."""

    number: int
    since: float
    reason: str
    answers: dict[str, StackAnswer] = field(default_factory=dict)


@dataclass(slots=True)
class Stacks(Rule):
    """Asks for stacks and collects the answers, one question at a time."""

    asked: int = 0  # questions so far
    _open: StackQuestion | None = None

    def ask(self, now: float, reason: str) -> None:
        """Ask every worker and every agent, unless a question is open already."""
        if self._open is not None:
            return
        self.asked += 1
        self._open = StackQuestion(self.asked, now, reason)
        self.effects.decide(AskStacks(self.asked, reason))
        for host in sorted({worker.host for worker in self._asked_workers()}):
            self.orders.give(host, StacksOrder(self.asked), reason)

    def on_requested(self, event: StacksRequested, now: float) -> None:
        """Ask every worker, as a user wishes."""
        self.ask(now, event.reason or "a user asks")

    def on_worker_stack(self, event: WorkerStack, now: float) -> None:
        """Record an answer."""
        number = None if self._open is None else self._open.number
        if event.number != number or event.worker not in self.workers.workers:
            self.effects.ignore(f"a stack of {event.worker} that nobody waits for")
            return
        self.note(event.worker, StackAnswer(event.where, event.stack, event.own))

    def note(self, worker: str, answer: StackAnswer) -> None:
        """Record an answer, whichever way it came, where a question is open."""
        if self._open is not None and (answer.own or worker not in self._open.answers):
            self._open.answers[worker] = answer

    def advance(self, now: float) -> None:
        """Settle the question when all workers have answered, or the time is over."""
        if self._open is None:
            return
        own = {worker for worker, answer in self._open.answers.items() if answer.own}
        complete = own.issuperset(worker.id for worker in self._asked_workers())
        if complete or self.effects.due_or_set_alarm(self._open.since + ANSWER_S, now):
            self.settle()

    def settle(self) -> None:
        """Announce the answers so far; called before a worker is killed for them."""
        question, self._open = self._open, None
        if question is None:
            return
        unknown = StackAnswer(NO_ANSWER, "", own=False)
        asked = self._asked_workers()
        groups = group({w.place.rank: question.answers.get(w.id, unknown) for w in asked})
        reason = f"{question.reason}: {describe(groups)}"
        self.effects.announce("stacks_collected", reason, stacks=groups[:MAX_GROUPS])

    def _asked_workers(self) -> Sequence[Worker]:
        """The round's members; where none trains yet, every worker that has a process."""
        running = tuple(self.workers.having(RUNNING))
        return running or tuple(self.workers.having(STARTING, READY))


# ---- who stands where --------------------------------------------------------------------


def group(places: Mapping[int, StackAnswer]) -> tuple[StackGroup, ...]:
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
    Where no rank speaks for itself, what is seen from outside says who waits. Otherwise, of two or
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
    said = {COLLECTIVE: "in a collective", "elsewhere": "outside of collectives"}
    apart = " (apart from the others)"
    first = sorted(groups, key=lambda g: not g.odd)
    parts = [
        f"{name_ranks(g.ranks)} {said.get(g.where, g.where)}{apart if g.odd else ''}"
        for g in first[:MAX_GROUPS]
    ]
    if len(groups) > MAX_GROUPS:
        parts.append(f"{len(groups) - MAX_GROUPS} more groups")
    return ", ".join(parts) or "there are no workers"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 3, 4"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
