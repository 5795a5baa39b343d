"""The comparison of what the ranks of a round hold: a part of the watch (`machine`).

All ranks mark their states after the same committed steps, with a digest of everything that they
keep, and their heartbeats carry the marks (`words.progress`). Equal digests mean equal states.
Where they differ, one rank of each kind is asked to describe its state leaf by leaf, and the first
leaf that differs is named, with what each rank holds there. What follows is the job's to decide
(`job.boundary`).

A floating-point buffer may be a running statistic, which each rank computes from its own batches,
or an average of the weights, which all have alike; its name does not tell. So it is learned:
buffers that have moved, and were equal on all ranks after each of these moves, are alike by nature.
What was different once is each rank's own. What has never moved may become a statistic any time.

Ranks that commit while others only train, or the other way round, show that the script is wrong.
Every rank has to call `commit()` after the same steps. A rank that never does is not seen by
anything else until the world changes: then its state is that of the round's beginning.

Pure. Times are seconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from msgspec import Struct

from elastic_driver.words.findings import StateValue
from elastic_driver.words.progress import (
    BUFFERS_DIGEST_CHARS,
    BUFFERS_OF,
    ODD_STEPS,
    Progress,
    StateMark,
)
from elastic_driver.words.wire_events import MAX_LEAVES, LeafMark, StateDescribed

MAX_RUNS = 6  # of ranks that are named in a sentence
MISSING = "missing"
Ranks = tuple[int, ...]


class Difference(NamedTuple):
    """A difference between ranks: the leaf ("": not known), what they hold there, and a sentence.

    `values` are in the order of the lowest rank that holds each.
    """

    leaf: str
    values: tuple[StateValue, ...]
    reason: str


class Described(NamedTuple):
    """The state that some ranks hold; `leaves` None: it was not described."""

    ranks: Ranks
    leaves: Sequence[LeafMark] | None


def first_difference(states: Sequence[Described]) -> Difference:
    """Return the first difference of two or more states, in the order of their lowest ranks."""
    known = [state for state in states if state.leaves is not None]
    if len(known) <= 1:
        groups = _listed([name_ranks(state.ranks) for state in states])
        return Difference("", (), f"{groups} differ; where could not be read")
    found = _compare(known)
    unknown = sorted(rank for state in states if state.leaves is None for rank in state.ranks)
    if unknown:
        more = f"what {name_ranks(unknown)} hold{'' if len(unknown) > 1 else 's'} is not known"
        found = found._replace(reason=f"{found.reason}; {more}")
    return found


def _compare(states: Sequence[Described]) -> Difference:
    for number, leaves in enumerate(zip_longest(*(state.leaves or () for state in states))):
        if len({None if leaf is None else leaf.name for leaf in leaves}) > 1:
            return _by_name(states, number)
        if len({leaf.digest for leaf in leaves}) > 1:
            return _by_value(states, leaves)
    groups = _listed([name_ranks(state.ranks) for state in states])
    alike = "all their parts are alike"
    if len(states[0].leaves or ()) == MAX_LEAVES:
        alike = f"their first {MAX_LEAVES} parts are alike"
    return Difference("", (), f"{groups} differ, but {alike}")


def _by_value(states: Sequence[Described], leaves: Sequence[LeafMark]) -> Difference:
    """Return a difference in the value of a leaf that all ranks have."""
    holders: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    for state, leaf in zip(states, leaves, strict=True):
        holders.setdefault(leaf.digest, []).extend(state.ranks)
        texts.setdefault(leaf.digest, leaf.text)
    ranks = {digest: tuple(sorted(each)) for digest, each in holders.items()}
    values = tuple(StateValue(ranks[digest], texts[digest]) for digest in ranks)
    name = leaves[0].name
    if len(set(texts.values())) < len(texts):  # too short to tell them apart
        groups = _listed([name_ranks(value.ranks) for value in values])
        return Difference(name, values, f"{name} is not the same on {groups}")
    parts = [f"{value.value} on {name_ranks(value.ranks)}" for value in values]
    return Difference(name, values, f"{name} is {_listed(parts)}")


def _by_name(states: Sequence[Described], number: int) -> Difference:
    """Return a difference in the leaves that there are, from the one with this number on."""
    names = [{leaf.name for leaf in state.leaves or ()} for state in states]
    here = [(state.leaves or ())[number : number + 1] for state in states]
    for leaf in (leaf for there in here for leaf in there):
        lacking = [s for s, known in zip(states, names, strict=True) if leaf.name not in known]
        if lacking:
            return Difference(leaf.name, *_lacking(leaf.name, states, lacking))
    first = here[0][0].name if here[0] else ""
    groups = _listed([name_ranks(state.ranks) for state in states])
    return Difference(first, (), f"from {first} on, the parts are in another order on {groups}")


def _lacking(
    name: str, states: Sequence[Described], lacking: Sequence[Described]
) -> tuple[tuple[StateValue, ...], str]:
    """Return who has a leaf, with the value, and who lacks it; and a sentence."""

    def held() -> Iterator[StateValue]:
        for state in states:
            leaves = (leaf.text for leaf in state.leaves or () if leaf.name == name)
            yield StateValue(state.ranks, next(leaves, MISSING))

    ranks = sorted(rank for state in lacking for rank in state.ranks)
    return tuple(held()), f"{name} is missing on {name_ranks(ranks)}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0, 1` or `ranks 0 to 5, 8` for ranks in ascending order.

    Of many runs only the first are named.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [word for first, last in runs[:MAX_RUNS] for word in _run(first, last)]
    rest = sum(last - first + 1 for first, last in runs[MAX_RUNS:])
    more = f" and {rest} more" if rest else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}{more}"


def _run(first: int, last: int) -> list[str]:
    if last - first <= 1:
        return [str(rank) for rank in range(first, last + 1)]
    return [f"{first} to {last}"]


def _listed(parts: Sequence[str]) -> str:
    """Return `a`, `a and b`, or `a, b and c`."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


ALIKE = 3  # moves after which all ranks were equal; then a difference is one
LASTING = 3  # marked steps in a row: a broadcast of buffers ends others before


class BufferWatch:
    """Compares the groups of buffers that each rank has marked, by their numbers."""

    def __init__(self) -> None:
        self._last: list[str] = []  # of each group, when all ranks were equal
        self._moves: list[int] = []
        self._own: set[int] = set()  # groups that each rank has for itself
        self._odd: list[int] = []  # marked steps in a row after which ranks differed

    def judge(self, rows: Sequence[str]) -> list[int]:
        """Return the groups that are alike by nature, and are not any more.

        `rows`: what each rank has marked after one step, a digest of each group.
        """
        count, rest = divmod(len(rows[0]), BUFFERS_DIGEST_CHARS)
        if rest or any(len(row) != len(rows[0]) for row in rows):
            return []
        if count != len(self._last):  # buffers came or went: all are learned anew
            self._last, self._moves, self._odd = [""] * count, [0] * count, [0] * count
            self._own.clear()
        return [number for number in range(count) if self._differs(number, rows)]

    def _differs(self, number: int, rows: Sequence[str]) -> bool:
        found = {digest_of(row, number) for row in rows}
        if number in self._own:
            return False
        if len(found) > 1:
            if self._moves[number] < ALIKE:
                self._own.add(number)
                return False
            self._odd[number] += 1
            return self._odd[number] >= LASTING
        (now,) = found
        self._moves[number] += self._last[number] not in ("", now)
        self._last[number], self._odd[number] = now, 0
        return False


def digest_of(row: str, number: int) -> str:
    """Return the digest of one group."""
    return row[number * BUFFERS_DIGEST_CHARS : (number + 1) * BUFFERS_DIGEST_CHARS]


LATE = 3.0  # times the steps that other ranks take for a commit


class Oddity(NamedTuple):
    """What is wrong, and the ranks that are to blame."""

    kind: str  # no_commits or no_steps
    ranks: tuple[int, ...]
    reason: str


def find_oddity(progress: Mapping[int, Progress]) -> Oddity | None:
    """Return what is wrong with the commits of a round; `progress` by rank, of this round."""
    if all(bool(each.commits) == bool(each.optimizer_steps) for each in progress.values()):
        return None  # as in nearly all looks
    commits = {rank: each for rank, each in progress.items() if each.commits >= ODD_STEPS}
    if not commits:
        return None
    others = f"{_have(sorted(commits))} made {min(c.commits for c in commits.values())} commits"
    a_commit = max(each.optimizer_steps / each.commits for each in commits.values())
    least = max(ODD_STEPS, LATE * a_commit)
    silent = [
        rank for rank, p in sorted(progress.items()) if not p.commits and p.optimizer_steps >= least
    ]
    if silent:
        return Oddity(
            "no_commits",
            tuple(silent),
            f"{_have(silent)} trained at least {int(least)} steps in this round without a commit, "
            f"{others}; every rank has to call state.commit() after the same steps",
        )
    trains = any(each.optimizer_steps >= ODD_STEPS for each in commits.values())
    idle = [rank for rank, each in sorted(commits.items()) if not each.optimizer_steps]
    if trains and idle:
        steps = max(each.optimizer_steps for each in commits.values())
        return Oddity(
            "no_steps",
            tuple(idle),
            f"{_have(idle)} committed at least {ODD_STEPS} times in this round and stepped no "
            f"optimizer, others have made {steps} steps; every rank has to train",
        )
    return None


def _have(ranks: list[int]) -> str:
    return f"{name_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'}"


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
