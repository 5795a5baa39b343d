"""Orchestrators of TensorFlow in threads, against a driver's real routes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from elastic_driver.features.tensorflow.machine import TfCluster
from elastic_driver.features.tensorflow.worker import ClusterSpec, TfNode
from rendezvous.auth import write_token_file
from tests.runtime.waiting import until
from tests.support.machines import serve

TOKEN = "secret"
T = TypeVar("T")


class Orchestrators:
    """A server with the routes, and nodes by name; each node's calls run in its own thread."""

    def __init__(self, folder: Path, *, lease: float = 10.0, gather: float = 0.2) -> None:
        self.server = serve(TfCluster(lease), TOKEN)
        self.gather = gather
        self._token_file = folder / "token"
        self._nodes: dict[str, TfNode] = {}
        self._threads: dict[str, ThreadPoolExecutor] = {}

    def __enter__(self) -> Orchestrators:
        write_token_file(self._token_file, TOKEN)
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        for thread in self._threads.values():
            thread.shutdown()
        for node in self._nodes.values():
            node.close()

    def add(self, name: str, address: str, *, least: int = 2, most: int = 3) -> TfNode:
        """A node that asks for a cluster of this size."""
        self._threads[name] = ThreadPoolExecutor(1)
        self._nodes[name] = TfNode(
            address,
            min_nodes=least,
            max_nodes=most,
            gather=self.gather,
            endpoint=self.server.url,
            token_file=str(self._token_file),
        )
        return self._nodes[name]

    def call(self, name: str, method: Callable[[TfNode], T]) -> Future[T]:
        """Have a node do something, in its own thread."""
        return self._threads[name].submit(method, self._nodes[name])

    def join(self, name: str, timeout: float = 20.0) -> Future[ClusterSpec]:
        """Have a node ask for a cluster."""
        return self.call(name, lambda node: node.cluster_spec(timeout))

    def together(self, *names: str) -> dict[str, ClusterSpec]:
        """Have these nodes ask at the same time, and wait until all are answered."""
        asked = {name: self.join(name) for name in names}
        return {name: future.result(30.0) for name, future in asked.items()}

    def until_waiting(self, name: str, count: int) -> None:
        """Wait until this node hears that so many wait (or, below 0, were lost)."""
        node = self._nodes[name]
        until(lambda: node.waiting_nodes().count == count, f"{name} hears {count}", 20.0)
