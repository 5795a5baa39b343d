"""Sends a whole state from one rank to those that need it.

`state` calls, on every rank of the world and in the same order: `send` on the source, `receive`
where the state is to be taken over, `stand_by` where it is right already. One document goes
first (what there is, and every plain value), then all tensors, into the receivers' own.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct
from torch import Tensor

from elastic_driver.errors import UsageError
from elastic_driver.worker.parts import Parcel, Part, Spec
from elastic_driver.worker.rng import RandomStates
from elastic_driver.worker.transfer import (
    apart,
    broadcast_bytes,
    broadcast_tensors,
    join,
    packed,
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
    """What goes first; the tensors follow in the order of the specs, parts before the rest."""

    parts: dict[str, Sealed]
    plain: dict[str, Sealed]
    random: bytes

    def specs(self) -> list[Spec]:
        """The specs of all tensors that follow."""
        sealed = (*self.parts.values(), *self.plain.values())
        return [spec for one in sealed for spec in one.specs]


def check_sendable(shared: Shared) -> None:
    """Raise `UsageError`, naming the attribute, where one could not be sent."""
    _seal(shared)


def send(shared: Shared, rank: int) -> None:
    """Send all of it from this rank."""
    envelope, tensors = _seal(shared)
    broadcast_bytes(msgspec.msgpack.encode(envelope), rank)
    broadcast_tensors(tensors, rank, receiving=False)


def stand_by(source: int) -> None:
    """Take part in the transfer without taking anything over."""
    envelope = msgspec.msgpack.decode(broadcast_bytes(None, source), type=Envelope)
    # Nothing is written here; only the sizes matter, and meta tensors have no more.
    sizes = [spec.room("meta") for spec in envelope.specs()]
    broadcast_tensors(sizes, source, receiving=False)


def receive(shared: Shared, source: int, newcomer: bool) -> None:
    """Take over the state of rank `source`; a newcomer its random generators as well.

    Raises `UsageError` where this script's state has other parts, or they are built differently.
    """
    envelope = msgspec.msgpack.decode(broadcast_bytes(None, source), type=Envelope)
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
    tensors = [tensor for group in (*places.values(), *fresh.values()) for tensor in group]
    broadcast_tensors(tensors, source, receiving=True)
    for name, part in shared.parts.items():
        part.accept(documents[name], places[name])
    for name, sealed in envelope.plain.items():
        shared.values[name] = join(unpacked(sealed.document), fresh[name])
    if newcomer:
        shared.random.put_portable(unpacked(envelope.random))


def _seal(shared: Shared) -> tuple[Envelope, list[Tensor]]:
    tensors: list[Tensor] = []

    def seal(parcel: Parcel, what: str) -> Sealed:
        document, own = parcel
        tensors.extend(own)
        return Sealed(packed(document, what), tuple(Spec.of(tensor) for tensor in own))

    envelope = Envelope(
        parts={n: seal(p.outgoing(), f"the state of {n!r}") for n, p in shared.parts.items()},
        plain={n: seal(apart(v), f"the attribute {n!r}") for n, v in shared.plain().items()},
        random=packed(shared.random.portable(), "the random state"),
    )
    return envelope, tensors
