"""For an orchestrator of TensorFlow: one line for each of the driver's `/v1/tf` routes.

    node = TfNode("10.0.0.1:5000", min_nodes=2, max_nodes=4)
    while not done:
        spec = node.cluster_spec(timeout=600)
        run_tensorflow(TF_CONFIG=tf_config(spec.cluster, spec.task), until=node.changed)

TensorFlow itself is not imported, and is not needed here. One node belongs to one thread. In a
process that `elasticrun` started the driver is found by itself; others name it. Times are seconds.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from elastic_driver import contract
from elastic_driver.core.tf_config import tf_config
from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.policies.tf.messages import (
    BarrierRequest,
    ClusterSpec,
    ClusterSpecRequest,
    Passed,
    Synchronized,
    SynchronizeRequest,
    WaitingNodes,
)
from elastic_driver.worker import context
from rendezvous.auth import read_token_file
from rendezvous.client import RendezvousClient
from rendezvous.errors import RequestError

__all__ = ["ClusterSpec", "TfClusterError", "TfNode", "WaitingNodes", "tf_config"]

SLICE_S = 20.0  # of a wait, so that a node that dies while it waits is forgotten soon
ANSWER_S = 10.0  # for the driver to answer, beyond the time that a call waits
_encode = msgspec.json.Encoder().encode
T = TypeVar("T")


class TfClusterError(ClusterError):
    """The driver's answer is no; `code` says which: `timed_out`, `member_gone`, `failed` …"""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TfNode:
    """One node of a TensorFlow cluster that forms over HTTP.

    Args:
        address: `host:port` of this node's TensorFlow server; no other node may have it.
        min_nodes, max_nodes: of the cluster, the same on every node.
        gather: how long others may still join once the minimum has come; the same on every node.
        endpoint: the driver's `http://host:port`, and `token_file`, the path of the file with the
            job's token; by default those of the job that this process belongs to.
    """

    def __init__(
        self,
        address: str,
        *,
        min_nodes: int,
        max_nodes: int,
        gather: float = 3.0,
        endpoint: str | None = None,
        token_file: str | None = None,
    ) -> None:
        if endpoint is None or token_file is None:
            born = context.from_environment()
            if born is None:
                raise UsageError(
                    "no driver is known here; start this with elasticrun, or give endpoint=… and "
                    "token_file=…"
                )
            endpoint, token_file = born.endpoint, born.token_file
        self.address = address
        self._bounds = (min_nodes, max_nodes)
        self._gather = gather
        self._client = RendezvousClient(endpoint, read_token_file(token_file), timeout=ANSWER_S)

    def cluster_spec(self, timeout: float) -> ClusterSpec:
        """Leave the cluster, if this node is in one, and wait for the next with this node in it.

        Raises TfClusterError, `timed_out` after `timeout` seconds.
        """
        until = time.monotonic() + timeout
        while True:
            wait = min(SLICE_S, max(0.0, until - time.monotonic()))
            request = ClusterSpecRequest(self.address, *self._bounds, wait, self._gather)
            try:
                return self._post(contract.TF_CLUSTER_SPEC_PATH, request, wait, ClusterSpec)
            except TfClusterError as error:
                if error.code != "timed_out" or time.monotonic() >= until:
                    raise

    def waiting_nodes(self) -> WaitingNodes:
        """Who waits and who was lost; says that this node lives, so ask several times a lease."""
        path = f"{contract.TF_WAITING_NODES_PATH}?{urlencode({'address': self.address})}"
        return msgspec.convert(self._client.get_json(path), WaitingNodes)

    def changed(self) -> bool:
        """Whether this node should ask for the next cluster; says that it lives, too."""
        return self.waiting_nodes().count != 0

    def barrier(self, tag: str, timeout: float, *, failure: str | None = None) -> None:
        """Wait until every member has come to `tag`; `failure`: why this one does not.

        Raises TfClusterError on every member alike, naming who failed or is missing.
        """
        request = BarrierRequest(self.address, tag, timeout, failure)
        self._post(contract.TF_BARRIER_PATH, request, timeout, Passed)

    def synchronize(
        self, tag: str, value: bytes, timeout: float, *, failure: str | None = None
    ) -> dict[str, bytes]:
        """Every member's value by address, in the order of their indices; else as `barrier`."""
        request = SynchronizeRequest(self.address, tag, timeout, value, failure)
        return self._post(contract.TF_SYNCHRONIZE_PATH, request, timeout, Synchronized).values

    def close(self) -> None:
        """Close the connection; a later call opens another."""
        self._client.close()

    def __enter__(self) -> TfNode:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _post(self, path: str, request: msgspec.Struct, wait: float, kind: type[T]) -> T:
        try:
            answer = self._client.post_json(path, _encode(request), wait + ANSWER_S)
        except RequestError as error:
            raise TfClusterError(error.code, str(error)) from error
        return msgspec.json.decode(answer, type=kind)
