"""The events of machines as bytes: msgpack, each with its tag; the types check what is read.

Requests for shards and for the TensorFlow cluster have no tags on the wire, because their paths
tell them apart. They are written together with the name of their kind.
"""

from typing import Any, TypeAlias, Union, get_args

import msgspec
from msgspec import Struct

from elastic_driver.policies import shard_messages as shards
from elastic_driver.policies import tf_messages as tf
from elastic_driver.policies.messages import MachineName
from elastic_driver.policies.scaling.messages import LoadsSeen, PriorFound, SpeedSeen
from elastic_driver.policies.stragglers import RoundPublished
from elastic_driver.runtime.mailbox import MachineEvent

# The watch over slow ranks is not journalled: what it has seen is seconds old, and its verdicts
# are events of the job. It reads every worker's progress four times a second.
# Nor is the search for the best size, which measures anew; its proposals are events of the job.
JOURNALLED: tuple[MachineName, ...] = ("job", "check", "shards", "tf")
AnyEvent: TypeAlias = MachineEvent | shards.ShardBatch
# The ticket of a request, the data set (empty: the TensorFlow cluster), its kind, and itself.
_Request: TypeAlias = tuple[int, str, str, Any]


class _Requests(Struct, frozen=True, tag="requests"):
    """A `ShardBatch`, or one `TfRequest`."""

    requests: tuple[_Request, ...]
    owners: tuple[str, ...] = ()  # of each; (): all have none


_KINDS = {kind.__name__: kind for kind in get_args(shards.Request)}
_TF_KINDS = {kind.__name__: kind for kind in get_args(tf.TfRequest.__annotations__["request"])}
_OTHERS = (shards.ShardRequest, tf.TfRequest, RoundPublished, LoadsSeen, PriorFound, SpeedSeen)
_TAGGED = (_Requests, *(kind for kind in get_args(MachineEvent) if kind not in _OTHERS))
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Union[_TAGGED]).decode  # noqa: UP007 - known at run time


def encode(event: AnyEvent) -> bytes:
    """Return an event of a journalled machine as bytes."""
    if isinstance(event, shards.ShardBatch):
        asked = ((r.ticket, r.dataset, type(r.request).__name__, r.request) for r in event.requests)
        return _encode(_Requests(tuple(asked), tuple(r.owner for r in event.requests)))
    if isinstance(event, tf.TfRequest):
        request = event.request
        one = event.ticket, "", type(request).__name__, request
        return _encode(_Requests((one,), (event.owner,)))
    return _encode(event)


def decode(data: bytes) -> AnyEvent:
    """Return the event of these bytes; raises `ValueError` if they hold none."""
    event: Any = _decode(data)
    if not isinstance(event, _Requests):
        found: AnyEvent = event
        return found
    asked = []
    owners = event.owners or ("",) * len(event.requests)
    for (ticket, dataset, kind, body), owner in zip(event.requests, owners, strict=True):
        if kind in _TF_KINDS:
            return tf.TfRequest(ticket, msgspec.convert(body, _TF_KINDS[kind]), owner)
        request = msgspec.convert(body, _KINDS[kind])
        asked.append(shards.ShardRequest(ticket, dataset, request, owner))
    return shards.ShardBatch(tuple(asked))
