"""The source and the receivers of the state when a round forms, read from the World document.

`state` asks after every rejoin. All ranks hold the same document, so all get the same answer
without a message, and a round in which nobody has to receive moves no tensors. Pure.
"""

from msgspec import Struct

from elastic_driver.core.documents import World
from elastic_driver.core.state_version import StateVersion, receivers_of, source_of
from elastic_driver.errors import ElasticError


class StateLostError(ElasticError):
    """Every worker that held the whole state is gone."""


class Agreement(Struct, frozen=True):
    """The rank that sends its state (`source`), and the ranks that take it over (`receivers`).

    `version` is the number of committed steps that every state stands for afterwards. `fresh`:
    nobody has trained yet, and training starts from the source's first values. `exact` is False
    where no clean state was left and the source's, between two commits, is used as it is.
    """

    source: int
    receivers: frozenset[int]
    version: int
    fresh: bool
    exact: bool


def agree(world: World, *, reloads: bool = False, afresh: int | None = None) -> Agreement:
    """Apply the rule of `core.state_version` to the members of `world`.

    Args:
        world: the members and what each said of its state.
        reloads: the source can load a checkpoint, so it need not have a whole state itself.
        afresh: take nobody as trained, and count from this number of committed steps: the members
            spoke of another state.

    Raises `StateLostError` where nobody has a whole state: the last one died while sending it.
    """
    states = [StateVersion(member.version, member.clean) for member in world.members]
    source = source_of(states)
    fresh = afresh is not None or source is None or not states[source].trained
    if fresh:
        states = [StateVersion(-1, state.clean or reloads) for state in states]
        source = source_of(states)
    if source is None:
        raise StateLostError(
            f"round {world.round}: the last worker with the whole state died while sending it; "
            "give the state a checkpoint_dir to survive this"
        )
    return Agreement(
        source=source,
        receivers=receivers_of(states, source),
        version=max(states[source].steps, afresh or 0),
        fresh=fresh,
        exact=states[source].clean,
    )
