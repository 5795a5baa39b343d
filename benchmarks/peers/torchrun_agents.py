"""torchrun's own rendezvous: agents, a thread each, wait for each other.

`DynamicRendezvousHandler` over the c10d backend, as `torchrun --rdzv-backend=c10d` uses it: each
agent adds itself to one shared state by compare-and-set until all are there. The figure contains
neither workers nor process groups.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

LIMIT = timedelta(seconds=120)


def host_agents(pipe: Connection, ranks: list[int], size: int, port: int) -> None:
    """Connect, meet when told to, and report when the last of these agents knew its rank."""
    pipe.recv()
    handlers = [_handler(size, port) for _ in ranks]
    gate, done = threading.Event(), []

    def meet(handler: DynamicRendezvousHandler) -> None:
        gate.wait()
        assert handler.next_rendezvous().world_size == size
        done.append(time.time())

    threads = [threading.Thread(target=meet, args=(h,), daemon=True) for h in handlers]
    for thread in threads:
        thread.start()
    pipe.send("connected")
    pipe.recv()
    gate.set()
    for thread in threads:
        thread.join(LIMIT.total_seconds())
    pipe.send(max(done) if len(done) == len(ranks) else None)
    pipe.recv()  # agents hold the rendezvous' server and send heartbeats until all have met


def _handler(size: int, port: int) -> DynamicRendezvousHandler:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    return DynamicRendezvousHandler.from_backend(
        run_id="bench",
        store=store,
        backend=C10dRendezvousBackend(store, "bench"),
        min_nodes=size,
        max_nodes=size,
        local_addr="127.0.0.1",
        timeout=RendezvousTimeout(join=LIMIT),
    )
