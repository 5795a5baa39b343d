"""Where the states of some ranks differ, in words: the first leaf, and what each rank holds there.

`state_watch` asks one rank of each kind to describe its state leaf by leaf, in the order in which
the state is walked. Pure.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from elastic_driver.words.findings import StateValue
from elastic_driver.words.wire_events import MAX_LEAVES, LeafMark

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
