"""A cluster without processes: agents are threads that speak real HTTP, workers do as told.

`Cluster` is the starter factory of a driver under test. Its agents obey orders as real ones do
(start, stop, shut down) and report; what happens to a worker beyond that is the test's to say.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from elastic_driver import contract
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.runtime.backend import OnLost
from elastic_driver.words.orders import (
    Order,
    ShutdownOrder,
    StartWorkerOrder,
    StopWorkerOrder,
    World,
    decode_order,
    decode_world,
    encode,
)
from elastic_driver.words.progress import Progress
from elastic_driver.words.wire_events import (
    AgentReady,
    WireEvent,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
    WorkerStepped,
)
from rendezvous.auth import read_token_file
from rendezvous.client import RendezvousClient
from rendezvous.errors import RendezvousError
from rendezvous.wire import Set
from tests.runtime.waiting import until


@dataclass
class FakeAgent:
    """One agent: a thread that follows its orders."""

    host: str
    incarnation: int
    on_lost: OnLost
    client: RendezvousClient
    orders: list[Order] = field(default_factory=list)
    workers: set[str] = field(default_factory=set)
    heeds_shutdown: bool = True
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            ready = AgentReady(self.host, self.incarnation, 1, "127.0.0.1", (20000, 20001))
            self.post(ready)
            while not self.stopping.is_set():
                number = len(self.orders) + 1
                key = contract.agent_order(self.host, self.incarnation, number)
                entry = self.client.get(key, wait=10.0)
                if entry is not None and self.obey(decode_order(entry.value)):
                    break
        except RendezvousError:
            pass
        finally:
            self.client.close()
        self.on_lost("exited with status 0")

    def obey(self, order: Order) -> bool:
        """Carry out one order; True when it was the last."""
        self.orders.append(order)
        match order:
            case StartWorkerOrder(worker=worker):
                self.workers.add(worker)
                self.post(WorkerStarted(worker, 1000 + len(self.orders)))
            case StopWorkerOrder(worker=worker) if worker in self.workers:
                self.exited(worker, -15)
            case ShutdownOrder() if self.heeds_shutdown:
                for worker in sorted(self.workers):
                    self.exited(worker, -15)
                return True
            case _:
                pass
        return False

    def exited(self, worker: str, code: int, tail: str = "", *, victim: bool = False) -> None:
        self.workers.discard(worker)
        self.post(WorkerExited(worker, code, tail, victim))

    def post(self, event: WireEvent) -> None:
        self.client.post_json(EVENTS_PATH, msgspec.json.encode(event))

    def die(self) -> None:
        self.stopping.set()
        self.client.abort()


class Cluster:
    """Starts fake agents (a `Backend`), and speaks for their workers."""

    def __init__(self) -> None:
        self.agents: dict[tuple[str, int], FakeAgent] = {}
        self.killed: list[tuple[str, int]] = []
        self.unreachable: set[str] = set()
        self.threads: list[threading.Thread] = []
        self.closed = 0
        self.endpoint = ""
        self.token = ""
        self.heeds_shutdown = True
        self._client: RendezvousClient | None = None

    # ---- MakeBackend and Backend -------------------------------------------------

    def __call__(self, endpoint: str, token_file: Path) -> Cluster:
        self.endpoint, self.token = endpoint, read_token_file(token_file)
        self._client = RendezvousClient(endpoint, self.token)
        return self

    def start(self, host: str, incarnation: int, on_lost: OnLost) -> None:
        if host in self.unreachable:
            on_lost(f"{host} cannot be reached")
            return
        client = RendezvousClient(self.endpoint, self.token, timeout=5.0)
        agent = FakeAgent(host, incarnation, on_lost, client, heeds_shutdown=self.heeds_shutdown)
        self.agents[host, incarnation] = agent
        thread = threading.Thread(target=agent.run, name=f"agent-{host}.{incarnation}")
        self.threads.append(thread)
        thread.start()

    def kill(self, host: str, incarnation: int) -> None:
        self.killed.append((host, incarnation))
        self.agents[host, incarnation].die()

    def close(self, grace: float) -> None:
        self.closed += 1
        for agent in self.agents.values():
            agent.die()
        for thread in self.threads:
            thread.join(10.0)
        if self._client is not None:
            self._client.close()

    # ---- what tests do -------------------------------------------------------------------

    @property
    def client(self) -> RendezvousClient:
        assert self._client is not None
        return self._client

    def agent_of(self, worker: str) -> FakeAgent:
        return next(agent for agent in self.agents.values() if worker in agent.workers)

    def workers(self) -> list[str]:
        """The workers that were started and have not ended, sorted."""
        return sorted(w for agent in list(self.agents.values()) for w in list(agent.workers))

    def until_workers(self, *names: str) -> None:
        until(lambda: self.workers() == sorted(names), f"workers {names}, not {self.workers()}")

    def post(self, event: WireEvent, deadline: float | None = None) -> None:
        self.client.post_json(EVENTS_PATH, msgspec.json.encode(event), deadline)

    def ready(self, *workers: str, left: int = 0, version: int = -1) -> None:
        for worker in workers:
            self.post(WorkerReady(worker, left, version, True, "waits"))

    def stepped(self, worker: str, round_id: int, step: int = 1) -> None:
        self.post(WorkerStepped(worker, round_id, step))

    def exits(
        self,
        worker: str,
        code: int,
        tail: str = "",
        *,
        victim: bool = False,
        deadline: float | None = None,
    ) -> None:
        agent = self.agent_of(worker)
        agent.workers.discard(worker)
        self.post(WorkerExited(worker, code, tail, victim), deadline)

    def progress(self, worker: str, round_id: int, step: int, step_time: float) -> None:
        """What a heartbeat does: renew the lease, say how far the worker is."""
        document = encode(Progress(round_id, step, step_time))
        self.client.batch(
            Set(contract.worker_lease(worker), b"", 30.0),
            Set(contract.worker_progress(worker), document),
        )

    def world(self, round_id: int, within: float = 10.0) -> World:
        """The world of a round, once it is complete."""

        def look() -> World | None:
            entry = self.client.get(contract.JOB_WORLD)
            world = None if entry is None else decode_world(entry.value)
            return world if world is not None and world.round >= round_id else None

        world = until(look, f"round {round_id} is complete", within)
        assert world is not None
        assert world.round == round_id
        return world

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.client.get_bytes("/v1/status"))
        return found

    def events(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.client.get_bytes("/v1/events"))["events"]
        return found

    def until_event(self, name: str, **facts: object) -> dict[str, Any]:
        """The first event of this name with these facts."""

        def look() -> dict[str, Any] | None:
            for event in self.events():
                if event["event"] == name and facts.items() <= event.items():
                    return event
            return None

        event = until(look, f"event {name} {facts}")
        assert event is not None
        return event


@contextmanager
def beating(cluster: Cluster, steps: dict[str, int], round_id: int) -> Iterator[None]:
    """Heartbeat threads in small: whoever sees a notice says at once how far it is."""
    stopping = threading.Event()

    def beat(worker: str, step: int) -> None:
        with RendezvousClient(cluster.endpoint, cluster.token) as client:
            seen = 0
            while not stopping.is_set():
                client.set(contract.worker_progress(worker), encode(Progress(round_id, step, 0.01)))
                entry = client.get(contract.JOB_NOTICE, wait=0.2, after=seen)
                seen = seen if entry is None else entry.revision

    threads = [threading.Thread(target=beat, args=item) for item in steps.items()]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join(10.0)
