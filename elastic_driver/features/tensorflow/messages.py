"""The messages between an orchestrator of TensorFlow and the driver: plain data, fit for JSON.

`features.tensorflow.worker` sends the requests over HTTP, `features.tensorflow.machine` answers.
Times are seconds.
"""

from typing import Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct

from elastic_driver.kernel.services import RepeatableRequest
from elastic_driver.words.tf_config import Task

MAX_WAIT_S = 60.0  # of one cluster_spec request; a node that waits longer asks again
MAX_VALUE_BYTES = 1024 * 1024

Address = Annotated[str, Meta(min_length=3, max_length=300, pattern=r"^\S+:[0-9]{1,5}\Z")]
Nodes = Annotated[int, Meta(ge=1, le=100_000)]

CLUSTER_SPEC_PATH = "/v1/tf/cluster_spec"
WAITING_NODES_PATH = "/v1/tf/waiting_nodes"
BARRIER_PATH = "/v1/tf/barrier"
SYNCHRONIZE_PATH = "/v1/tf/synchronize"


class ClusterSpecRequest(RepeatableRequest, frozen=True, forbid_unknown_fields=True):
    """`address` (`host:port`) wants to be in a cluster of `min_nodes` to `max_nodes`.

    `wait`: the most seconds that this request may take. `gather`: the seconds in which others may
    still join once `min_nodes` have come. All nodes that wait together must give the same numbers.
    """

    address: Address
    min_nodes: Nodes
    max_nodes: Nodes
    wait: Annotated[float, Meta(ge=0.0, le=MAX_WAIT_S)] = MAX_WAIT_S
    gather: Annotated[float, Meta(ge=0.0, le=600.0)] = 3.0


class ClusterSpec(Struct, frozen=True):
    """A cluster that has formed; `cluster` and `task` are the two halves of TF_CONFIG."""

    generation: int
    cluster: dict[str, list[str]]
    task: Task


class WaitingNodes(Struct, frozen=True):
    """The answer to the question whether the cluster should form anew.

    `count`: above 0, the number of nodes that could join; below 0, the number of members that were
    lost; 0: go on. `waiting`: all nodes that have asked for the next cluster, also those for which
    there is no room.
    """

    count: int
    generation: int
    waiting: tuple[str, ...]
    lost: tuple[str, ...]


class TfStatus(Struct, frozen=True):
    """The cluster of the newest generation, for `/v1/status`; 0: none has formed.

    `members`: by address, without those that have left or are lost.
    """

    generation: int
    members: dict[str, Task]
    waiting: tuple[str, ...]
    lost: tuple[str, ...]


class BarrierRequest(RepeatableRequest, frozen=True, forbid_unknown_fields=True):
    """`address` has come to the barrier `tag`, or (`failure`) says why it does not come."""

    address: Address
    tag: Annotated[str, Meta(min_length=1, max_length=256)]
    timeout: Annotated[float, Meta(gt=0.0, le=600.0)]
    failure: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None


class SynchronizeRequest(BarrierRequest, frozen=True, forbid_unknown_fields=True):
    """A `BarrierRequest` with a value for all other members (bytes; base64 in JSON)."""

    value: Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)] = b""


class Passed(Struct, frozen=True):
    """Every member of this generation has come to the barrier."""

    generation: int


class Synchronized(Struct, frozen=True):
    """Every member's value, in the order of their indices."""

    generation: int
    values: dict[str, bytes]


class LookRequest(Struct, frozen=True):
    """`address` asks whether the cluster should form anew; None: the sender is no node."""

    address: Annotated[str, Meta(max_length=300)] | None = None


Request: TypeAlias = ClusterSpecRequest | BarrierRequest | SynchronizeRequest | LookRequest


class TfRequest(Struct, frozen=True, tag="tf_request"):
    """A request for the cluster, as an event."""

    machine: ClassVar[Literal["tf"]] = "tf"

    ticket: int
    request: Request
    owner: str = ""  # the slot of the worker that asks; "": a program with an operator's token
