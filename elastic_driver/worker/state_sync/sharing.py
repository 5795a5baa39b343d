"""Sends a whole state from one rank to those that need it.

`state` calls, on every rank of the world and in the same order: `send` on the source, `receive`
where the state is to be taken over, `stand_by` where it is right already and the route concerns
it. One document goes first (what there is, and every plain value), then all tensors, into the
receivers' own.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct
from torch import Tensor

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.copying import copied
from elastic_driver.worker.state_sync.parts import Part, Spec
from elastic_driver.worker.state_sync.rng import RandomStates
from elastic_driver.worker.state_sync.transfer import (
    Route,
    apart,
    carry_bytes,
    carry_tensors,
    join,
    packed,
    paths,
    unpacked,
)


class Shared(Struct, frozen=True):
    """The contents of a state: `values` are all attributes, `parts` handle some of them."""

    parts: dict[str, Part]
    values: dict[str, Any]
    random: RandomStates

    def plain(self) -> dict[str, Any]:
        """The attributes that go by value."""
        return {name: value for name, value in self.values.items() if name not in self.parts}


class Sealed(Struct, frozen=True):
    """One attribute: a document for the safe unpickler only, and the specs of its tensors."""

    document: bytes
    specs: tuple[Spec, ...]


class Envelope(Struct, frozen=True):
    """What goes first; the tensors follow in the order of the specs, parts before the rest.

    `resumed`: the sender has read this state from a checkpoint, of this many committed steps.
    """

    parts: dict[str, Sealed]
    plain: dict[str, Sealed]
    random: bytes
    resumed: int | None = None

    def specs(self) -> list[Spec]:
        """The specs of all tensors that follow."""
        sealed = (*self.parts.values(), *self.plain.values())
        return [spec for one in sealed for spec in one.specs]


def check_sendable(shared: Shared) -> None:
    """Raise `UsageError`, naming the attribute, where one could not be sent."""
    taken_apart(shared).envelope(shared.random.portable())


def send(shared: Shared, route: Route, resumed: int | None = None) -> None:
    """Send all of it from this rank; `resumed` as in `Envelope`."""
    contents = taken_apart(shared)
    envelope = contents.envelope(shared.random.portable(), resumed)
    carry_bytes(msgspec.msgpack.encode(envelope), route)
    carry_tensors(list(contents.tensors.values()), route)


def stand_by(route: Route) -> None:
    """Take part in the transfer without taking anything over."""
    envelope = msgspec.msgpack.decode(carry_bytes(None, route), type=Envelope)
    # Nothing is written here; only the sizes matter, and meta tensors have no more.
    carry_tensors([spec.room("meta") for spec in envelope.specs()], route)


def receive(shared: Shared, route: Route, newcomer: bool) -> int | None:
    """Take over the state of the route's source; a newcomer its random generators as well.

    Returns the envelope's `resumed`. Raises `UsageError` where this script's state has other
    parts, or they are built differently.
    """
    envelope = msgspec.msgpack.decode(carry_bytes(None, route), type=Envelope)
    room = make_room(shared, envelope)
    carry_tensors(room.tensors(), route)
    room.take_over(shared, with_random=newcomer or envelope.resumed is not None)
    return envelope.resumed


class Room(Struct, frozen=True):
    """The documents of an envelope, and the tensors that wait for their contents."""

    envelope: Envelope
    documents: dict[str, Any]
    places: dict[str, list[Tensor]]
    fresh: dict[str, list[Tensor]]

    def tensors(self) -> list[Tensor]:
        """All of them, in the order in which they are sent."""
        return [t for group in (*self.places.values(), *self.fresh.values()) for t in group]

    def take_over(self, shared: Shared, *, with_random: bool) -> None:
        """Make it the state's, once the tensors are filled."""
        for name, part in shared.parts.items():
            part.accept(self.documents[name], self.places[name])
        for name, sealed in self.envelope.plain.items():
            shared.values[name] = join(unpacked(sealed.document), self.fresh[name])
        if with_random:
            shared.random.put_portable(unpacked(self.envelope.random))


def make_room(shared: Shared, envelope: Envelope) -> Room:
    """Where the tensors of an envelope go in this state.

    Raises `UsageError` where this script's state has other parts, or they are built differently.
    """
    if list(envelope.parts) != list(shared.parts):
        raise UsageError(
            f"this worker's state has {', '.join(shared.parts) or 'nothing'} to load, the trained "
            f"one {', '.join(envelope.parts) or 'nothing'}; run the same script on every worker"
        )
    documents = {name: unpacked(sealed.document) for name, sealed in envelope.parts.items()}
    places = {
        name: part.places(documents[name], envelope.parts[name].specs)
        for name, part in shared.parts.items()
    }
    fresh = {
        name: [spec.room() for spec in sealed.specs] for name, sealed in envelope.plain.items()
    }
    return Room(envelope, documents, places, fresh)


class Contents(Struct, frozen=True):
    """A state with its tensors taken out: a document of each attribute, and the tensors by name.

    `held` says how many tensors each document refers to, in their order.
    """

    documents: dict[str, Any]
    held: dict[str, int]
    tensors: dict[str, Tensor]
    parts: frozenset[str]  # attributes that are handled by a part; the others go by value

    def without_ties(self) -> Contents:
        """The same, with documents that no later change of the state reaches; tensors are live."""
        return msgspec.structs.replace(self, documents=copied(self.documents))

    def envelope(self, random: dict[str, Any], resumed: int | None = None) -> Envelope:
        """What is sent first, together with the states of the random generators.

        Raises `UsageError`, naming the attribute, where one could not be read safely.
        """
        specs = iter([Spec.of(tensor) for tensor in self.tensors.values()])
        sealed = {}
        for name, document in self.documents.items():
            what = f"the state of {name!r}" if name in self.parts else f"the attribute {name!r}"
            own = tuple(next(specs) for _ in range(self.held[name]))
            sealed[name] = Sealed(packed(document, what), own)
        return Envelope(
            parts={name: one for name, one in sealed.items() if name in self.parts},
            plain={name: one for name, one in sealed.items() if name not in self.parts},
            random=packed(random, "the random state"),
            resumed=resumed,
        )


def taken_apart(shared: Shared) -> Contents:
    """The contents of a state; the tensors are the live ones, parts' before those of the rest.

    A tensor's name is the attribute and its path in there, as `torch.distributed.checkpoint` would
    name it: `model.0.weight`, `optimizer.state.0.exp_avg`.
    """
    parcels = {name: part.outgoing() for name, part in shared.parts.items()}
    parcels |= {name: apart(value) for name, value in shared.plain().items()}
    tensors: dict[str, Tensor] = {}
    for name, (document, own) in parcels.items():
        tree = document["tensors"] if isinstance(document, dict) else document
        for path, tensor in zip(paths(tree, name), own, strict=True):
            while path in tensors:  # keys with dots in them can make two paths look alike
                path += "+"  # noqa: PLW2901
            tensors[path] = tensor
    return Contents(
        documents={name: document for name, (document, _) in parcels.items()},
        held={name: len(own) for name, (_, own) in parcels.items()},
        tensors=tensors,
        parts=frozenset(shared.parts),
    )
