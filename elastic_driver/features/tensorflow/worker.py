"""A client of the driver's `/v1/tf` routes, for an orchestrator of TensorFlow.

    node = TfNode("10.0.0.1:5000", min_nodes=2, max_nodes=4)
    while not done:
        spec = node.cluster_spec(timeout=600)
        run_tensorflow(TF_CONFIG=tf_config(spec.cluster, spec.task), until=node.changed)

TensorFlow is neither imported nor needed here. One node belongs to one thread. A process that
`elasticrun` started finds the driver in its environment; others name it. Times are seconds.
"""

import time
from contextlib import AbstractContextManager
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.features.tensorflow import messages
from elastic_driver.features.tensorflow.messages import ClusterSpec, WaitingNodes
from elastic_driver.words.tf_config import tf_config
from elastic_driver.worker import context
from rendezvous.auth import read_credentials
from rendezvous.client import RendezvousClient, new_request_id
from rendezvous.errors import RequestError

__all__ = ["ClusterSpec", "TfClusterError", "TfNode", "WaitingNodes", "tf_config"]

SLICE_S = 20.0  # the longest request that waits: a node that dies in it is dropped soon
ANSWER_S = 10.0  # for the driver to answer, beyond the time that a call waits
T = TypeVar("T")


class TfClusterError(ClusterError):
    """The driver refused; `code` says why: `timed_out`, `member_gone`, `failed` …"""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TfNode(AbstractContextManager["TfNode"]):
    """One node of a TensorFlow cluster that forms over HTTP.

    Args:
        address: `host:port` of this node's TensorFlow server; no other node may have it.
        min_nodes, max_nodes: of the cluster, the same on every node.
        gather: seconds for further nodes to join after the minimum; the same on every node.
        endpoint: the driver's `http(s)://host:port`; by default that of this process's job.
        token_file: path of the file with the job's token, and for https with the fingerprint of
            the driver's certificate in its second line; by default that of this process's job.

    Raises `UsageError` where no driver is named and the process belongs to no job.
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
        self._absence = 0.0  # seconds to wait for the next driver
        if endpoint is None or token_file is None:
            job = context.from_environment()
            if job is None:
                raise UsageError("no driver is known; use elasticrun, or endpoint= and token_file=")
            self._client, self._absence = job.client(ANSWER_S), job.driver_timeout
        else:
            token, known_by = read_credentials(token_file)
            self._client = RendezvousClient(endpoint, token, ANSWER_S, fingerprint=known_by)
        self.address, self._bounds, self._gather = address, (min_nodes, max_nodes), gather

    def cluster_spec(self, timeout: float) -> ClusterSpec:
        """Leave this node's cluster, wait for the next one with this node in it and return it.

        Raises `TfClusterError` with code `timed_out` after `timeout` seconds.
        """
        until, name = time.monotonic() + timeout, new_request_id()
        while True:
            wait = min(SLICE_S, max(0.0, until - time.monotonic()))
            bounds = (*self._bounds, wait, self._gather)
            request = messages.ClusterSpecRequest(self.address, *bounds, request=name)
            try:
                return self._post(messages.CLUSTER_SPEC_PATH, request, wait, ClusterSpec)
            except TfClusterError as error:
                if error.code != "timed_out" or time.monotonic() >= until:
                    raise

    def waiting_nodes(self) -> WaitingNodes:
        """Return the waiting and the lost nodes; renew this node's lease."""
        path = f"{messages.WAITING_NODES_PATH}?{urlencode({'address': self.address})}"
        answer = self._client.get_bytes(path, ANSWER_S + self._absence)
        return msgspec.json.decode(answer, type=WaitingNodes)

    def changed(self) -> bool:
        """Return whether this node should call `cluster_spec` again; renew its lease."""
        return self.waiting_nodes().count != 0

    def barrier(self, tag: str, timeout: float, *, failure: str | None = None) -> None:
        """Wait up to `timeout` seconds until every member calls this with `tag`.

        `failure`: the reason why this member cannot; it fails the barrier for all. Raises
        `TfClusterError` on every member, with the names of those that failed or are missing.
        """
        called = self.address, tag, timeout, failure
        request = messages.BarrierRequest(*called, request=new_request_id())
        self._post(messages.BARRIER_PATH, request, timeout, messages.Passed)

    def synchronize(
        self, tag: str, value: bytes, timeout: float, *, failure: str | None = None
    ) -> dict[str, bytes]:
        """Return every member's value by address, in the order of indices; else as `barrier`."""
        called = self.address, tag, timeout, failure, value
        request = messages.SynchronizeRequest(*called, request=new_request_id())
        path, answer = messages.SYNCHRONIZE_PATH, messages.Synchronized
        return self._post(path, request, timeout, answer).values

    def close(self) -> None:
        """Close the connection; a later call opens another."""
        self._client.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _post(self, path: str, request: msgspec.Struct, wait: float, kind: type[T]) -> T:
        deadline, body = wait + ANSWER_S + self._absence, msgspec.json.encode(request)
        try:
            answer = self._client.post_json(path, body, deadline)
        except RequestError as error:
            raise TfClusterError(error.code, str(error)) from error
        return msgspec.json.decode(answer, type=kind)
