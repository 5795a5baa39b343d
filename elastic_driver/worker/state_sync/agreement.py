"""Whose state wins when a round forms, read from the World document alone.

`state` asks after every rejoin. All ranks hold the same document, so all come to the same answer
without exchanging a word, and a round in which nobody has to receive moves no tensors. Pure.
"""

from __future__ import annotations

from msgspec import Struct

from elastic_driver.core.documents import Member, World
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

    Among the members that hold a trained state, a clean one beats a dirty one, then the highest
    version wins, then the lowest rank. Whoever holds another version, or is not clean, receives.
    Raises `StateLostError` where all that is left was half received when its sender died, unless
    the source `reloads` a checkpoint.
    """
    trained = [member for member in world.members if member.version >= 0]
    if not trained:
        return agree_afresh(world, version=0, reloads=reloads)
    clean = [member for member in trained if member.clean]
    source = max(clean or trained, key=lambda member: (member.version, -member.place.rank))
    return Agreement(
        source=source.place.rank,
        receivers=frozenset(m.place.rank for m in world.members if _differs(m, source)),
        version=source.version,
        fresh=False,
        exact=source.clean,
    )


def agree_afresh(world: World, version: int, *, reloads: bool = False) -> Agreement:
    """Nobody has trained yet: the lowest rank's values are those everybody starts with."""
    whole = [member.place.rank for member in world.members if member.clean or reloads]
    if not whole:
        raise StateLostError(
            f"round {world.round}: the last worker with the whole state died while sending it; "
            "give the state a checkpoint_dir to survive this"
        )
    others = frozenset(range(world.size)) - {whole[0]}
    return Agreement(
        source=whole[0], receivers=others, version=max(version, 0), fresh=True, exact=True
    )


def _differs(member: Member, source: Member) -> bool:
    if member is source:
        return False
    return not source.clean or not member.clean or member.version != source.version
