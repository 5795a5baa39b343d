"""Whose state wins when a round forms, read from the World document alone.

`state` asks after every rejoin. All ranks hold the same document, so all come to the same answer
without exchanging a word, and a round in which nobody has to receive moves no tensors. Pure.
"""

from __future__ import annotations

from msgspec import Struct

from elastic_driver.core.documents import World
from elastic_driver.core.state_version import StateVersion, receivers_of, source_of
from elastic_driver.errors import ElasticError


class StateLostError(ElasticError):
    """Every worker that held the whole state is gone."""


class Agreement(Struct, frozen=True):
    """Who sends its state (`source`, a rank), who takes it over (`receivers`), and as what.

    `version` is the number of committed steps everybody's state stands for afterwards. `fresh`:
    nobody has trained yet, rank 0's model is where training starts. `exact` is False where no
    clean holder was left and the source's state stands in as it is, between two commits.
    """

    source: int
    receivers: frozenset[int]
    version: int
    fresh: bool
    exact: bool


def agree(world: World, *, reloads: bool = False) -> Agreement:
    """The rule of architecture section 6.

    `core.state_version` says whose state wins and who receives it. Raises `StateLostError` where
    all that is left was half received when its sender died, unless the source `reloads` a
    checkpoint.
    """
    states = [StateVersion(member.version, member.clean) for member in world.members]
    source = source_of(states)
    if source is None or not states[source].trained:
        return agree_afresh(world, version=0, reloads=reloads)
    return Agreement(
        source=source,
        receivers=receivers_of(states, source),
        version=states[source].steps,
        fresh=False,
        exact=states[source].clean,
    )


def agree_afresh(world: World, version: int, *, reloads: bool = False) -> Agreement:
    """Nobody has trained yet: the lowest rank's values are those everybody starts with."""
    states = [StateVersion(-1, member.clean or reloads) for member in world.members]
    source = source_of(states)
    if source is None:
        raise StateLostError(
            f"round {world.round}: the last worker with the whole state died while sending it; "
            "give the state a checkpoint_dir to survive this"
        )
    return Agreement(
        source=source,
        receivers=receivers_of(states, source),
        version=max(version, 0),
        fresh=True,
        exact=True,
    )
