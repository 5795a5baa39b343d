"""A server that runs one machine on its own loop, in place of a driver."""

from __future__ import annotations

import asyncio
import time

from elastic_driver.features.shards.machine import DataSets
from elastic_driver.features.tensorflow.machine import TfCluster
from elastic_driver.job.events import Tick
from elastic_driver.kernel.machine import ForMachine, Reply
from elastic_driver.runtime.api import job_access
from elastic_driver.runtime.machine_api import OpenRequests
from elastic_driver.token_roles import RoundMembers
from rendezvous.server import RendezvousServer


def serve(machine: DataSets | TfCluster, token: str, port: int = 0) -> RendezvousServer:
    """Return a server, not yet started, whose requests this machine answers."""
    timers: list[asyncio.TimerHandle] = []

    def handle(event: ForMachine | Tick) -> bool:
        decisions = machine.handle(event, time.monotonic())  # type: ignore[arg-type]
        requests.answer(decision for decision in decisions if isinstance(decision, Reply))
        for timer in timers:
            timer.cancel()
        due = machine.deadline()
        loop = asyncio.get_running_loop()
        timers[:] = [] if due is None else [loop.call_at(due, handle, Tick())]
        return True

    requests = OpenRequests(handle, RoundMembers())
    return RendezvousServer(
        port=port,
        token=token,
        access=job_access(),
        routes=requests.add_to,
    )
