"""The state that wins when a round forms, and the ranks that have to receive it.

Each worker applies this rule to the World document by itself, so that no messages are needed; the
driver applies it to its own records, for the event log. Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StateVersion(NamedTuple):
    """The state that a worker brings into a round.

    `steps`: committed steps it stands for (−1: nothing trained yet). `clean`: its tensors are
    exactly those, not the ones of a step that was broken off.
    """

    steps: int = -1
    clean: bool = True

    @property
    def trained(self) -> bool:
        """Return whether the worker has trained at all."""
        return self.steps >= 0


def source_of(states: Sequence[StateVersion]) -> int | None:
    """Return the rank whose state all ranks go on with; `states` are in the order of ranks.

    Only clean states count: one between two commits is nobody's. The one with the most steps wins,
    then the lowest rank. If no rank has trained, it is the lowest clean rank. None if the state was
    trained and no rank has it whole, or no rank is clean.
    """
    clean = [rank for rank, state in enumerate(states) if state.clean]
    trained = [rank for rank in clean if states[rank].trained]
    if trained:
        return max(trained, key=lambda rank: (states[rank].steps, -rank))
    lost = any(state.trained for state in states)
    return clean[0] if clean and not lost else None


def receivers_of(
    states: Sequence[StateVersion], source: int, *, repair: bool = False
) -> frozenset[int]:
    """Return the ranks that take over the state of `source`.

    A rank keeps its own state if it is clean and has as many steps. If no rank has trained, all
    others receive, because each has drawn its own first values. With `repair` they do so because
    ranks with the same number of steps were found to hold different states.
    """
    sent = states[source]
    if repair or not sent.trained:
        return frozenset(range(len(states))) - {source}
    return frozenset(rank for rank, state in enumerate(states) if state != sent) - {source}
