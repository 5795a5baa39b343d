"""Sends a whole state from one rank to those that need it.

`state` calls, on every rank of the world and in the same order: `send` on the source, `receive`
where the state is to be taken over, `stand_by` where it is right already and the route concerns
it. One document is sent first (the names of everything, and every plain value), then all
tensors, into the receivers' own.
"""

from typing import Any

import msgspec
from msgspec import Struct
from torch import Tensor

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.parts import StatePart, TensorSpec
from elastic_driver.worker.state_sync.rng import RandomStates
from elastic_driver.worker.state_sync.transfer import Route, carry_bytes, carry_tensors
from elastic_driver.worker.state_sync.values import apart, copied, join, packed, unpacked


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
    many committed steps.
    """

    parts: dict[str, PackedValue]
    plain: dict[str, PackedValue]
    random: bytes
    resumed: int | None = None

    def attributes(self) -> dict[str, PackedValue]:
        """Return all attributes, in the order in which their tensors are sent."""
        return self.parts | self.plain


def check_sendable(state: LiveState) -> None:
    """Raise `UsageError`, naming the attribute, where one could not be sent."""
    split(state).envelope(state.random.portable())


def send(state: LiveState, route: Route, resumed: int | None = None) -> None:
    """Send all of it from this rank; `resumed` as in `Envelope`."""
    contents = split(state)
    envelope = contents.envelope(state.random.portable(), resumed)
    carry_bytes(msgspec.msgpack.encode(envelope), route)
    carry_tensors(list(contents.tensors.values()), route)


def stand_by(route: Route) -> None:
    """Take part in the transfer without taking anything over."""
    envelope = msgspec.msgpack.decode(carry_bytes(None, route), type=Envelope)
    specs = [spec for value in envelope.attributes().values() for spec in value.specs]
    # Nothing is written here; only the sizes matter, and meta tensors have no more.
    carry_tensors([spec.allocate("meta") for spec in specs], route)


def receive(state: LiveState, route: Route, newcomer: bool) -> int | None:
    """Take over the state of the route's source; a newcomer its random generators as well.

    Returns the envelope's `resumed`. Raises `UsageError` where this script's state has other
    parts, or they are built differently.
    """
    envelope = msgspec.msgpack.decode(carry_bytes(None, route), type=Envelope)
    incoming = IncomingState(state, envelope)
    carry_tensors(incoming.tensors, route)
    incoming.take_over(with_random=newcomer or envelope.resumed is not None)
    return envelope.resumed


class IncomingState:
    """The contents of an envelope on their way into a state; fill `tensors`, then `take_over`.

    Raises `UsageError` where this script's state has other parts, or they are built differently.
    """

    def __init__(self, state: LiveState, envelope: Envelope) -> None:
        if list(envelope.parts) != list(state.parts):
            raise UsageError(
                f"this worker's state has the parts {', '.join(state.parts) or '(none)'}, the "
                f"trained one {', '.join(envelope.parts) or '(none)'}; run the same script on "
                "every worker"
            )
        self._state, self._envelope = state, envelope
        self._documents: dict[str, Any] = {}
        self._places: dict[str, list[Tensor]] = {}
        for name, value in envelope.attributes().items():
            document = self._documents[name] = unpacked(value.document)
            part = state.parts.get(name)
            self._places[name] = (
                part.places(document, value.specs)
                if part is not None
                else [spec.allocate() for spec in value.specs]
            )

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors to receive into, in the order in which they are sent."""
        return [tensor for places in self._places.values() for tensor in places]

    def take_over(self, *, with_random: bool) -> None:
        """Make it the state's, once the tensors are filled."""
        for name, document in self._documents.items():
            if (part := self._state.parts.get(name)) is not None:
                part.accept(document, self._places[name])
            else:
                self._state.values[name] = join(document, self._places[name])
        if with_random:
            self._state.random.put_portable(unpacked(self._envelope.random))


class SplitState(Struct, frozen=True):
    """A state with its tensors taken out: a document of each attribute, and the tensors by name.

    `counts` says how many tensors each document refers to, in their order.
    """

    documents: dict[str, Any]
    counts: dict[str, int]
    tensors: dict[str, Tensor]
    parts: frozenset[str]  # attributes that are handled by a part; the others go by value

    def detached(self) -> "SplitState":
        """Return the same with copies of the documents, and the live tensors."""
        return msgspec.structs.replace(self, documents=copied(self.documents))

    def envelope(self, random: dict[str, Any], resumed: int | None = None) -> Envelope:
        """Return what is sent first, with these states of the random generators.

        Raises `UsageError`, naming the attribute, where one could not be read safely.
        """
        specs = iter([TensorSpec.of(tensor) for tensor in self.tensors.values()])
        values = {}
        for name, document in self.documents.items():
            what = f"the state of {name!r}" if name in self.parts else f"the attribute {name!r}"
            own = tuple(next(specs) for _ in range(self.counts[name]))
            values[name] = PackedValue(packed(document, what), own)
        return Envelope(
            parts={name: value for name, value in values.items() if name in self.parts},
            plain={name: value for name, value in values.items() if name not in self.parts},
            random=packed(random, "the random state"),
            resumed=resumed,
        )


def split(state: LiveState) -> SplitState:
    """Take the live tensors out of a state, those of parts before those of plain values.

    A tensor's name is the attribute and its path in there, as `torch.distributed.checkpoint` would
    name it: `model.0.weight`, `optimizer.state.0.exp_avg`.
    """
    outgoing = {name: part.outgoing() for name, part in state.parts.items()}
    outgoing |= {n: apart(v, n) for n, v in state.values.items() if n not in state.parts}
    tensors: dict[str, Tensor] = {}
    for _, own in outgoing.values():
        for path, tensor in own:
            name = path
            while name in tensors:  # keys with dots in them can make two paths look alike
                name += "+"
            tensors[name] = tensor
    return SplitState(
        documents={name: document for name, (document, _) in outgoing.items()},
        counts={name: len(own) for name, (_, own) in outgoing.items()},
        tensors=tensors,
        parts=frozenset(state.parts),
    )
