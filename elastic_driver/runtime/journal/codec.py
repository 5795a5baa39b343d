"""The events of journalled machines as bytes: msgpack, each with its tag.

The machines' declarations have the types, which check what is read. The watch over slow ranks is
not journalled: what it has seen is seconds old, its verdicts are events of the job, and it reads
every worker's progress four times a second. Nor is the search for the best size, which measures
anew; its proposals are events of the job.
"""

from collections.abc import Iterator
from typing import Any, Union

import msgspec

from elastic_driver.kernel.machine import Declaration, Requests
from elastic_driver.runtime.machines import MACHINES


def _tagged(machine: Declaration) -> Iterator[type[Any]]:
    """Yield the types of a machine's events that are written as they are."""
    packing = machine.packing
    packed = () if packing is None else (packing.event, *machine.together)
    return (kind for kind in machine.event_types() if kind not in packed)


_PACKINGS = [each.packing for each in MACHINES.journalled if each.packing is not None]
_BY_EVENT = {each.event: each for each in _PACKINGS}
_BY_KIND = {kind.__name__: each for each in _PACKINGS for kind in each.kinds}
_TAGGED = dict.fromkeys(kind for each in MACHINES.journalled for kind in _tagged(each))
_TYPES = (Requests, *_TAGGED)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Union[_TYPES]).decode  # noqa: UP007 - known at run time


def encode(event: object) -> bytes:
    """Return an event of a journalled machine as bytes."""
    packing = _BY_EVENT.get(type(event))
    return _encode(event if packing is None else packing.pack(event))


def decode(data: bytes) -> Any:
    """Return the event of these bytes; raises `ValueError` if they hold none."""
    found = _decode(data)
    if not isinstance(found, Requests):
        return found
    kind = found.requests[0][2] if found.requests else ""
    packing = _BY_KIND.get(kind)
    if packing is None:
        raise ValueError(f"no machine takes a request of the kind {kind!r}")
    return packing.read(found)
