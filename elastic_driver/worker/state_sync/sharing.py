"""Finds the rank with the newest state, and sends that state to the ranks that need it.

`state` asks `agree` after every rejoin, then calls, on every rank of the world and in the same
order: `send` on the source, `receive` on ranks that need the state, `stand_by` on ranks that have
it already, where all ranks take part. One document is sent first (the names of everything, and
every plain value), then all tensors, into the receivers' own.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
from msgspec import Struct
from torch import Tensor

from elastic_driver.core.documents import World
from elastic_driver.core.state_version import StateVersion, receivers_of, source_of
from elastic_driver.errors import ElasticError, UsageError
from elastic_driver.worker.state_sync.parts import Outgoing, StatePart
from elastic_driver.worker.state_sync.rng import RandomStates
from elastic_driver.worker.state_sync.transfer import Route, carry_bytes, carry_tensors
from elastic_driver.worker.state_sync.values import TensorSpec, apart, join, packed, unpacked

# ---- the newest state --------------------------------------------------------------------


class StateLostError(ElasticError):
    """Every worker that held the whole state is gone."""


class Agreement(Route, frozen=True):
    """The way of the newest state to the ranks that lack it; empty if every rank has it already.

    `version` is the number of committed steps that every state stands for afterwards. `fresh`:
    no rank has trained yet, and training starts from the source's first values. `exact` is False
    where no clean state was left and the source's, between two commits, is used as it is.
    """

    version: int
    fresh: bool
    exact: bool


def agree(world: World, *, reloads: bool = False, afresh: int | None = None) -> Agreement:
    """Apply the rule of `core.state_version` to the members of `world`. Pure.

    All ranks hold the same document, so all get the same answer without a message, and a round in
    which no rank has to receive moves no tensors.

    Args:
        world: the members and the version of each one's state.
        reloads: the source can load a checkpoint, so it need not have a whole state itself.
        afresh: treat every rank as untrained, and count from this number of committed steps: the
            members have reported another state.

    Raises `StateLostError` where no rank has a whole state: the last one died while sending it.
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
    newest, receivers = states[source], receivers_of(states, source)
    version = max(newest.steps, afresh or 0)
    return Agreement(source, receivers, version, fresh, exact=newest.clean)


# ---- the state as a message --------------------------------------------------------------


class LiveState(Struct, frozen=True):
    """A state as it is: `values` are all attributes, `parts` handle some of them."""

    parts: dict[str, StatePart]
    values: dict[str, Any]
    random: RandomStates


class PackedValue(Struct, frozen=True):
    """One attribute: a document for the safe unpickler only, and the specs of its tensors."""

    document: bytes
    specs: tuple[TensorSpec, ...]


class Envelope(Struct, frozen=True):
    """All of a state but its tensors, which follow in the order of the specs, `parts` first.

    Checkpoints store it too. `resumed`: the sender has read this state from a checkpoint, of this
    many committed steps. `durable`: what parts add to checkpoints only (`checkpoints.durable`).
    """

    parts: dict[str, PackedValue]
    plain: dict[str, PackedValue]
    random: bytes
    resumed: int | None = None
    durable: dict[str, bytes] = {}


def split(state: LiveState) -> dict[str, Outgoing]:
    """Take the live tensors out of each attribute: first of the parts, then of plain values.

    A tensor's name is the attribute and its path in there, as `torch.distributed.checkpoint` would
    name it: `model.0.weight`, `optimizer.state.0.exp_avg`.
    """
    contents = {name: part.outgoing() for name, part in state.parts.items()}
    return contents | {n: apart(v, n) for n, v in state.values.items() if n not in state.parts}


def make_envelope(
    contents: Mapping[str, Outgoing],
    parts: Collection[str],
    random: dict[str, Any],
    resumed: int | None = None,
) -> Envelope:
    """Return the envelope of a split state, with these states of the random generators.

    Raises `UsageError`, naming the attribute, where one could not be read safely.
    """
    packed_parts: dict[str, PackedValue] = {}
    plain: dict[str, PackedValue] = {}
    for name, (document, tensors) in contents.items():
        specs = tuple(TensorSpec.of(tensor) for _, tensor in tensors)
        kind, target = ("state of", packed_parts) if name in parts else ("attribute", plain)
        target[name] = PackedValue(packed(document, f"the {kind} {name!r}"), specs)
    return Envelope(packed_parts, plain, packed(random, "the random state"), resumed)


def unpack(data: bytes) -> Envelope:
    """Return the envelope in these bytes."""
    return msgspec.msgpack.decode(data, type=Envelope)


def take_over(
    state: LiveState, envelope: Envelope, fill: Callable[[list[Tensor]], None], with_random: bool
) -> None:
    """Load the contents of an envelope into a state.

    `fill` writes the tensors of the sender into the given ones, which are in the same order. Raises
    `UsageError` where this script's state has other parts, or they are built differently.
    """
    if list(envelope.parts) != list(state.parts):
        raise UsageError(
            f"this worker's state has the parts {', '.join(state.parts) or '(none)'}, the "
            f"trained one {', '.join(envelope.parts) or '(none)'}; run the same script on "
            "every worker"
        )
    arrived = []
    for name, value in (envelope.parts | envelope.plain).items():
        document, part = unpacked(value.document), state.parts.get(name)
        if part is not None:
            places = part.places(document, value.specs)
        else:
            places = [spec.allocate() for spec in value.specs]
        arrived.append((name, part, document, places))
    fill([tensor for *_, places in arrived for tensor in places])
    for name, part, document, places in arrived:
        if part is not None:
            part.accept(document, places)
        else:
            state.values[name] = join(document, places)
    if with_random:
        state.random.put(unpacked(envelope.random))


# ---- the transfer ------------------------------------------------------------------------


def send(state: LiveState, route: Route, resumed: int | None = None) -> None:
    """Send the whole state from this rank; `resumed`: see `Envelope`."""
    contents = split(state)
    envelope = make_envelope(contents, state.parts, state.random.portable(), resumed)
    carry_bytes(msgspec.msgpack.encode(envelope), route)
    carry_tensors([tensor for _, own in contents.values() for _, tensor in own], route)


def stand_by(route: Route) -> None:
    """Take part in the transfer, and keep this rank's own state."""
    envelope = unpack(carry_bytes(None, route))
    specs = [spec for v in (envelope.parts | envelope.plain).values() for spec in v.specs]
    # Only the sizes matter here, and meta tensors take no memory.
    carry_tensors([spec.allocate("meta") for spec in specs], route)


def receive(state: LiveState, route: Route, newcomer: bool) -> int | None:
    """Take over the state of the route's source; a newcomer its random generators as well.

    Returns the envelope's `resumed`. Raises `UsageError` as `take_over` does.
    """
    envelope = unpack(carry_bytes(None, route))
    with_random = newcomer or envelope.resumed is not None
    take_over(state, envelope, lambda tensors: carry_tensors(tensors, route), with_random)
    return envelope.resumed
