"""Real clients of a driver: the connections of workers and of agents, without their processes.

A worker here is the product's `DriverConnection` with its heartbeat thread, and a thread that
reports READY and waits for the world. An agent is the product's `Heartbeats`, and a loop that makes
the same request for orders as the agent does. Many live in one process, so they share a machine and
an interpreter with each other, which real ones do not: it counts against us.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from elastic_driver import contract
from elastic_driver.token_roles import agent_token, worker_token
from elastic_driver.words.world import StateVersion
from elastic_driver.worker.context import WorkerContext
from elastic_driver.worker.heartbeat.driver_connection import DriverConnection
from elastic_driver.worker.heartbeat.training_progress import StepCost, TrainingProgress
from launcher.agent.driver_link import ORDERS_AHEAD
from launcher.agent.lifetime import Heartbeats, Promise
from launcher.launch.plan import HEARTBEAT_S, HEARTBEATS_PER_S
from rendezvous.auth import read_credentials, write_token_file
from rendezvous.client import RendezvousClient
from rendezvous.wire import Get, Set, Watch

STEP_S = 0.1  # of a worker that trains
LATER = 1000  # the number of an order that is not given in a benchmark
TICK_S = 0.5  # between two looks at the steps of those that train


class Place(NamedTuple):
    """The address of a driver."""

    url: str
    token_file: str
    heartbeat_timeout: float


@dataclass
class WorkerClient:
    """The connection of one worker to the driver, and what it would report."""

    connection: DriverConnection
    progress: TrainingProgress

    @classmethod
    def connected(cls, name: str, place: Place) -> WorkerClient:
        """Return the connection of a worker after its first heartbeat."""
        driver = read_credentials(place.token_file)
        token = worker_token(agent_token(driver.token, contract.host_of_worker(name)), name)
        file = Path(f"{place.token_file}-{name}")
        context = WorkerContext(
            worker=name,
            endpoint=place.url,
            token_file=str(write_token_file(file, token, driver.fingerprint)),
            heartbeat_timeout=place.heartbeat_timeout,
            hang_timeout=0.0,
        )
        progress = TrainingProgress()
        connection = DriverConnection(context, progress, lambda _notice: None, lambda: None)
        connection.start()
        return cls(connection, progress)

    def meet(self) -> int:
        """Report READY and wait for the world; return its size, once rank and peers are known."""
        self.connection.report_ready(0, StateVersion(-1, True), "started", bound=False)
        world, _ = self.connection.await_world(0)
        return world.size

    def train(self, size: int, since: float) -> None:
        """Record the steps that a worker would have made by now, and their costs."""
        progress = self.progress
        if progress.round == 0:
            progress.enter(1, 0, size)
        cost = StepCost(STEP_S / 2, STEP_S / 2)
        for step in range(progress.version + 1, int((time.monotonic() - since) / STEP_S)):
            progress.samples.record(step, lambda: cost)
            progress.record_commit(step)
            progress.step_time = STEP_S
            progress.step_times.append(STEP_S)


def host_workers(pipe: Connection, names: list[str], place: Place) -> None:
    """Connect these workers, meet when told to, report when that was done, and stay.

    After the meeting they are idle, or train if the next message is true, until one more comes.
    """
    random.seed()
    workers = [WorkerClient.connected(name, place) for name in names]
    gate = threading.Event()

    def meet(worker: WorkerClient) -> tuple[float, int]:
        gate.wait()
        size = worker.meet()
        return time.time(), size

    with ThreadPoolExecutor(len(workers)) as threads:
        meetings = [threads.submit(meet, worker) for worker in workers]
        pipe.send("connected")
        pipe.recv()
        gate.set()
        done = [meeting.result() for meeting in meetings]
    size = min(size for _, size in done)
    pipe.send((max(at for at, _ in done), size))
    trains, began = pipe.recv(), time.monotonic()
    while not pipe.poll(TICK_S):
        if trains is True:
            for worker in workers:
                worker.train(size, began)
    pipe.recv()


def host_agents(pipe: Connection, hosts: list[str], place: Place) -> None:
    """Run the agents of these hosts, which have no orders, until told to end."""

    async def live() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(3 * len(hosts)))
        tasks = [asyncio.create_task(agent(host, len(hosts), place)) for host in hosts]
        await asyncio.to_thread(pipe.recv)
        for task in tasks:
            task.cancel()

    asyncio.run(live())


async def agent(host: str, hosts: int, place: Place) -> None:
    """Send an agent's heartbeats and wait for its orders, for ever."""
    token, fingerprint = read_credentials(place.token_file)
    client = RendezvousClient(place.url, agent_token(token, host), fingerprint=fingerprint)
    patience = place.heartbeat_timeout
    promise = Promise(max(HEARTBEAT_S, hosts / HEARTBEATS_PER_S), patience)
    await asyncio.sleep(random.random() * promise.interval)
    key = contract.agent_heartbeat(host, 1)
    beats = asyncio.create_task(Heartbeats(client.clone(), key, promise).run())
    lease = Set(contract.agent_lease(host, 1), lease=patience)
    keys = tuple(contract.agent_order(host, 1, LATER + n) for n in range(ORDERS_AHEAD))
    watch = Watch({keys[0]: 0}, wait=patience / 3)
    try:
        while True:
            await asyncio.to_thread(client.batch, lease, watch, Get(keys), deadline=patience)
    finally:
        beats.cancel()
