"""A server that runs one machine on its own loop, in place of a driver."""

from __future__ import annotations

import asyncio
import time

from elastic_driver.job.events import Tick
from elastic_driver.kernel.machine import Reply
from elastic_driver.policies.shards import DataSets
from elastic_driver.policies.tf_cluster import TfCluster
from elastic_driver.rights import job_access
from elastic_driver.round_members import RoundMembers
from elastic_driver.runtime.machine_api import OpenRequests, RequestEvent, add_machine_routes
from rendezvous.server import RendezvousServer


def serve(machine: DataSets | TfCluster, token: str, port: int = 0) -> RendezvousServer:
    """Return a server, not yet started, whose requests this machine answers."""
    timers: list[asyncio.TimerHandle] = []

    def handle(event: RequestEvent | Tick) -> bool:
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
        routes=lambda app: add_machine_routes(app, requests),
    )
