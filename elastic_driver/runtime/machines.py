"""All machines that a driver may run, and their events as bytes.

The chapter `machine` of a feature has its declarations (`MACHINES`), perhaps `ENDS`: decisions
after which their machine is over, and with which no next driver goes on; and `REPORTED`: events
that agents and workers post at `/v1/events`, each about its `worker`.

The journal has the events of journalled machines as msgpack, each with its tag. The declarations
have the types, which check what is read. The watch over slow ranks is not journalled: what it has
seen is seconds old, its verdicts are events of the job, and it reads every worker's progress four
times a second. Nor is the search for the best size, which measures anew; its proposals are events
of the job.
"""

from collections.abc import Iterator
from typing import Any, Union

import msgspec

from elastic_driver.features import chapters
from elastic_driver.job import job
from elastic_driver.kernel.kernel import Catalog
from elastic_driver.kernel.machine import Declaration, Requests

# A next driver tells those that go on in this order that it has come.
MACHINES = Catalog(
    (
        job.DECLARATION,
        *(declared for chapter in chapters("machine") for declared in chapter.MACHINES),
    )
)


def _all(name: str) -> tuple[type[Any], ...]:
    return tuple(kind for chapter in chapters("machine") for kind in getattr(chapter, name, ()))


ENDS = _all("ENDS")
REPORTED = _all("REPORTED")
PASSING = {each.name for each in MACHINES if set(ENDS) & {*each.decision_types()}}


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


def encode_event(event: object) -> bytes:
    """Return an event of a journalled machine as bytes."""
    packing = _BY_EVENT.get(type(event))
    return _encode(event if packing is None else packing.pack(event))


def decode_event(data: bytes) -> Any:
    """Return the event of these bytes; raises `ValueError` if they hold none."""
    found = _decode(data)
    if not isinstance(found, Requests):
        return found
    kind = found.requests[0][2] if found.requests else ""
    packing = _BY_KIND.get(kind)
    if packing is None:
        raise ValueError(f"no machine takes a request of the kind {kind!r}")
    return packing.read(found)
