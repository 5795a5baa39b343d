"""A second gloo in the place of NCCL: a device that only pretends to be one.

It behaves towards us as an accelerator with NCCL does. Collectives are queued and return at once;
a lost peer ends none of them; `settle` waits and never raises; only `abort`, which takes a while,
ends that wait, and whatever had not arrived is garbage then. Nothing but the device is pretended:
torch's process group really has two halves, and the peers really talk, fail and hang.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed import distributed_c10d as c10d

from elastic_driver import contract
from elastic_driver.worker.world.gloo import GroupConnections

DEVICE = torch.device("cuda")  # never touched: it only names the half in torch's group
ABORT_S = 0.2  # about what NCCL takes
_never_freed: list[Any] = []


class SecondGloo:
    """One worker's pretended device; `tell(what)` is called when it connects and when it ended."""

    backends = "cuda:gloo"

    def __init__(self, tell: Callable[[str], None] = lambda _what: None) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._tell = tell
        self._queue: list[tuple[Any, torch.Tensor]] = []
        self._backend: Any = None  # of this round, once it connects
        self._aborted = threading.Event()
        self._connections = GroupConnections()

    def identity(self) -> str:
        return f"second gloo of {os.getpid()}"

    # ---- what a script does with it ------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Queue the sum over all ranks, as a CUDA collective is queued."""
        if self._aborted.is_set():
            raise torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0.")
        self._queue.append((self._backend.allreduce([tensor]), tensor))

    # ---- what the worker does with it ----------------------------------------------------

    def open(self) -> None: ...

    def begin(self) -> None:
        self._connections.close()  # all members have left the round before
        port = urlsplit(os.environ.get(contract.RENDEZVOUS, "")).port
        self._connections = GroupConnections(exclude_port=port)
        self._queue.clear()
        self._aborted.clear()

    def connect(self, _is_over: Callable[[], bool] = lambda: False) -> None:
        self._tell("connects")
        self._connections.finish()
        self._backend = c10d._get_default_group()._get_backend(DEVICE)
        self._backend.barrier().wait()

    def settle(self) -> None:
        while self._queue and not self._aborted.is_set():
            work, _ = self._queue[0]
            if work.is_completed() and work.exception() is None:
                self._queue.pop(0)
            else:
                time.sleep(0.0005)

    def synchronize(self) -> None:
        self.settle()

    def abort(self) -> None:
        time.sleep(ABORT_S)
        for _, tensor in self._queue:
            tensor.fill_(math.nan)
        self._connections.shut_reads()
        self._connections.shut_writes()
        self._tell("ended")
        self._aborted.set()

    def forget(self) -> None:
        assert self._aborted.is_set()
        if not all(work.is_completed() for work, _ in self._queue):
            _never_freed.append(self._backend)  # gloo may forget a send: `TrainingThread`
        self._queue.clear()
        c10d._abort_process_group()  # as for NCCL; it aborts gloo's half as well
        self._backend = None
