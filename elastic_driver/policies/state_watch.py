"""The comparison of what the ranks of a round hold: a part of the watch (`stragglers`).

All ranks mark their states after the same committed steps, with a digest of everything that they
keep, and their heartbeats carry the marks (`words.progress`). Equal digests mean equal states.
Where they differ, one rank of each kind is asked to describe its state leaf by leaf, and the first
leaf that differs is named (`state_difference`). What follows is the job's to decide
(`job.boundary`).

Pure. Times are seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from elastic_driver.policies.buffer_watch import BufferWatch, digest_of
from elastic_driver.policies.state_difference import (
    Described,
    Difference,
    Ranks,
    first_difference,
)
from elastic_driver.words.progress import BUFFERS_OF, StateMark
from elastic_driver.words.wire_events import LeafMark, StateDescribed

ALL_S = 2.5  # from the first difference on, for the marks of the other ranks: one heartbeat
ANSWER_S = 10.0  # for a rank to describe its state
AGAIN_S = 10.0  # between a difference and the next question in the same round
MAX_ASKED = 8  # ranks that are asked, each of another kind
MAX_TOLD = 8  # differences that are told of one round
OPEN_STEPS = 64  # marked steps that wait for the marks of more ranks; older ones are dropped
ATTEMPTS = 2  # to have one difference described


class Question(NamedTuple):
    """Ask these ranks to describe their states after `step`."""

    step: int
    ranks: Ranks


class Told(NamedTuple):
    """A difference that was found after `step`."""

    step: int
    difference: Difference


@dataclass(slots=True)
class _Marked:
    """The digests of one step."""

    ranks: dict[str, list[int]] = field(default_factory=dict)  # digest → ranks
    count: int = 0  # of the ranks that have marked this step
    differs_since: float | None = None
    buffers: dict[int, str] = field(default_factory=dict)  # by rank
    only: tuple[int, ...] = ()  # groups of buffers that differ, where nothing else does

    def add(self, rank: int, mark: StateMark, now: float) -> None:
        self.ranks.setdefault(mark.digest, []).append(rank)
        self.buffers[rank] = mark.buffers
        self.count += 1
        if self.differs_since is None and len(self.ranks) > 1:
            self.differs_since = now

    def kinds(self) -> list[tuple[str, Ranks]]:
        """Return each digest with its ranks, in the order of the lowest rank."""
        found = ((digest, tuple(sorted(ranks))) for digest, ranks in self.ranks.items())
        return sorted(found, key=lambda kind: kind[1])


class _Answer(Struct, frozen=True):
    leaves: tuple[LeafMark, ...] | None  # None: the rank has kept no description


@dataclass(slots=True)
class _Open:
    """A question that is open; `asked`: the rank of each digest, `answers`: by digest."""

    step: int
    marked: _Marked
    until: float
    asked: dict[int, str]
    attempt: int
    answers: dict[str, _Answer]


class StateWatch:
    """Compares the marks of one round; a new round gets a new watch. `size`: its ranks."""

    def __init__(self, size: int = 0) -> None:
        self.equal_step: int | None = None  # the newest at which all ranks were equal
        self._size = size
        self._latest = [-1] * size  # the newest step that each rank has marked
        # Ranks whose scripts have ended: they answer no question. What they held at their newest
        # mark, in short.
        self._over: dict[int, tuple[LeafMark, ...]] = {}
        self._steps: dict[int, _Marked] = {}
        self._buffers = BufferWatch()
        self._question: _Open | None = None
        self._ask_at = 0.0  # no question before
        self._told: set[str] = set()  # leaves

    # ---- in ------------------------------------------------------------------------------

    def report(self, rank: int, marks: Sequence[StateMark], now: float) -> None:
        """Record the newest marks of a rank; those that are repeated change nothing."""
        for mark in marks:
            if mark.step <= self._latest[rank]:
                continue
            self._latest[rank] = mark.step
            marked = self._steps.setdefault(mark.step, _Marked())
            marked.add(rank, mark, now)
            if len(marked.ranks) == 1 and marked.count == self._size:
                self._compare_buffers(mark.step, marked, now)
        while len(self._steps) > OPEN_STEPS:
            del self._steps[self._least_of_use()]

    def _compare_buffers(self, step: int, marked: _Marked, now: float) -> None:
        """Conclude a step after which all else was equal on all ranks."""
        differ = self._buffers.judge(list(marked.buffers.values()))
        if not differ:
            del self._steps[step]
            self.equal_step = max(step, self.equal_step or 0)
            return
        kinds: dict[str, list[int]] = {}
        for rank, row in marked.buffers.items():
            kinds.setdefault(" ".join(digest_of(row, each) for each in differ), []).append(rank)
        marked.ranks, marked.only, marked.differs_since = kinds, tuple(differ), now

    def _least_of_use(self) -> int:
        """Return the oldest step after which no ranks are known to differ, if there is one."""
        alike = (step for step, marked in self._steps.items() if marked.differs_since is None)
        return min(alike, default=min(self._steps))

    def ended(self, rank: int, leaves: tuple[LeafMark, ...] = ()) -> None:
        """Record that the script of a rank is over: no more marks and no answers come from it.

        `leaves`: its state after its newest mark, in short.
        """
        self._over[rank] = leaves

    def described(self, rank: int, event: StateDescribed) -> None:
        """Record an answer; one to a question that is not open changes nothing."""
        question = self._question
        if question is None or question.step != event.step or rank not in question.asked:
            return
        leaves = None if event.missing else event.leaves
        question.answers[question.asked[rank]] = _Answer(leaves)

    # ---- out -----------------------------------------------------------------------------

    def look(self, now: float) -> Question | Told | None:
        """Return what is to be asked or told now, if anything is."""
        if self._question is not None:
            return self._conclude(self._question, now)
        if now < self._ask_at or len(self._told) >= MAX_TOLD:
            return None
        step = min(self._differing(now), default=None)
        return None if step is None else self._ask(step, now)

    def _differing(self, now: float) -> list[int]:
        """Return the steps after which ranks differ; not until all ranks had time to mark them."""
        found = []
        for step, marked in self._steps.items():
            since = marked.differs_since
            if since is None:
                continue
            silent = sum(self._latest[rank] < step for rank in self._over)
            if marked.count + silent >= self._size or now >= since + ALL_S:
                found.append(step)
        return found

    def _ask(self, step: int, now: float, attempt: int = 1) -> Question | Told | None:
        asked: dict[int, str] = {}
        marked = self._steps[step]
        known = self._known_at_the_end(step, marked)
        for digest, ranks in marked.kinds():
            rank = next((rank for rank in ranks if rank not in self._over), None)
            if rank is not None and len(asked) < MAX_ASKED and not known:
                asked[rank] = digest
        self._question = _Open(step, marked, now + ANSWER_S, asked, attempt, known)
        if len(asked) <= 1:  # there is nothing to compare with
            return self._conclude(self._question, now)
        return Question(step, tuple(asked))

    def _known_at_the_end(self, step: int, marked: _Marked) -> dict[str, _Answer]:
        """Return what ended ranks have said of a step, if that is every kind; otherwise nothing.

        What they say in short does not compare with what others say leaf by leaf.
        """
        found: dict[str, _Answer] = {}
        for digest, ranks in marked.kinds():
            last = (self._over.get(rank) for rank in ranks if self._latest[rank] == step)
            if leaves := next(filter(None, last), None):
                found[digest] = _Answer(leaves)
        return found if len(found) == len(marked.ranks) else {}

    def _conclude(self, question: _Open, now: float) -> Question | Told | None:
        """Compare the answers, once all are there or the time for them is over."""
        asked, answers = question.asked, question.answers
        awaited = [r for r in asked if asked[r] not in answers and r not in self._over]
        if awaited and len(awaited) + len(answers) > 1 and now < question.until:
            return None
        self._question = None
        told = sum(answer.leaves is not None for answer in answers.values())
        if told <= 1 and question.attempt < ATTEMPTS:
            newer = max((step for step in self._differing(now) if step > question.step), default=0)
            if newer:  # perhaps that one is described
                return self._ask(newer, now, question.attempt + 1)
        nothing = _Answer(None)
        found = first_difference(
            [
                Described(ranks, _compared(answers.get(digest, nothing), question.marked.only))
                for digest, ranks in question.marked.kinds()
            ]
        )
        self._ask_at = now + AGAIN_S
        self._steps.clear()  # what comes next is compared anew
        if found.leaf in self._told:
            return None
        self._told.add(found.leaf)
        return Told(question.step, found)


def _compared(answer: _Answer, only: tuple[int, ...]) -> tuple[LeafMark, ...] | None:
    """Return the leaves that ranks have alike; of buffers those that differ and should not."""
    if answer.leaves is None:
        return None
    buffers = [leaf for leaf in answer.leaves if leaf.name.startswith(BUFFERS_OF)]
    known = {leaf.name for number, leaf in enumerate(buffers) if number not in only}
    return tuple(leaf for leaf in answer.leaves if leaf.name not in known)
