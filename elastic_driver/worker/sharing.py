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
from elastic_driver.worker.parts import Part, Spec
from elastic_driver.worker.rng import RandomStates
from elastic_driver.worker.transfer import (
    broadcast_bytes,
    broadcast_tensors,
    join,
    packed,
    split,
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


class Envelope(Struct, frozen=True):
    """The document that goes first; `bytes` are read by the safe unpickler only."""

    parts: dict[str, bytes]
    plain: dict[str, bytes]
    random: bytes
    specs: tuple[Spec, ...]  # of all tensors: those of the parts, then those of the plain values
    counts: dict[str, int]  # tensors of each part


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
    sizes = [spec.room("meta") for spec in envelope.specs]
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
    documents = {name: unpacked(data) for name, data in envelope.parts.items()}
    tensors, at = [], 0
    for name, part in shared.parts.items():
        count = envelope.counts[name]
        tensors += part.places(documents[name], envelope.specs[at : at + count])
        at += count
    tensors += [spec.room() for spec in envelope.specs[at:]]
    broadcast_tensors(tensors, source, receiving=True)
    at = 0
    for name, part in shared.parts.items():
        count = envelope.counts[name]
        part.accept(documents[name], tensors[at : at + count])
        at += count
    for name, data in envelope.plain.items():
        shared.values[name] = join(unpacked(data), tensors[at:])
    if newcomer:
        shared.random.put_portable(unpacked(envelope.random))


def _seal(shared: Shared) -> tuple[Envelope, list[Tensor]]:
    tensors: list[Tensor] = []
    parts, counts = {}, {}
    for name, part in shared.parts.items():
        before = len(tensors)
        parts[name] = packed(part.outgoing(tensors), f"the state of {name!r}")
        counts[name] = len(tensors) - before
    values: list[Tensor] = []
    plain = {
        name: packed(split(value, values), f"the attribute {name!r}")
        for name, value in shared.plain().items()
    }
    envelope = Envelope(
        parts=parts,
        plain=plain,
        random=packed(shared.random.portable(), "the random state"),
        specs=tuple(Spec.of(tensor) for tensor in [*tensors, *values]),
        counts=counts,
    )
    return envelope, tensors + values
