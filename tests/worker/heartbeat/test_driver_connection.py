"""READY and the end of a worker's connection, against a real rendezvous server."""

from __future__ import annotations

import queue
import time
from typing import Any

import psutil

from elastic_driver import contract
from elastic_driver.words.orders import World, encode_world
from elastic_driver.words.world import Member, SlotInfo, StateVersion
from elastic_driver.worker.context import WorkerContext
from elastic_driver.worker.heartbeat.driver_connection import DriverConnection
from elastic_driver.worker.heartbeat.training_progress import TrainingProgress
from rendezvous.server import Callbacks, RendezvousServer
from rendezvous.wire import Set
from tests.support.job import eventually
from tests.worker.heartbeat.conftest import TOKEN, sending_heartbeats


def test_a_round_that_was_never_entered_has_no_first_step(
    server: RendezvousServer, token_file: str, events: queue.SimpleQueue[dict[str, Any]]
) -> None:
    progress = TrainingProgress()
    born = WorkerContext(worker="a.0.1", endpoint=server.url, token_file=token_file)
    connection = DriverConnection(born, progress, lambda _notice: None, lambda: None)
    progress.enter(1, 0)
    progress.record_commit(1)
    progress.leave()
    connection.report_ready(1, StateVersion(1), "the world changes", bound=False)
    assert [events.get()["type"] for _ in range(2)] == ["worker_stepped", "worker_ready"]
    connection.report_ready(2, StateVersion(1), "round 2 ended in its meeting", bound=False)
    assert events.get()["type"] == "worker_ready"
    connection.stop()


def test_a_newcomer_makes_one_connection_until_it_has_a_world(
    server: RendezvousServer, token_file: str
) -> None:
    born = WorkerContext(worker="a.0.1", endpoint=server.url, token_file=token_file)
    connection = DriverConnection(born, TrainingProgress(), lambda _notice: None, lambda: None)

    def connections() -> int:
        found = psutil.Process().net_connections("tcp4")
        return sum(bool(one.raddr) and one.raddr.port == server.port for one in found)

    connection.start()
    try:
        for left in range(3):
            connection.report_ready(left, StateVersion(0), "started", bound=False)
            assert connections() == 1
        member = Member("a.0.1", SlotInfo("a", 0, 0, 0, 0, 1, 1, 1, 0, 1))
        world = World(4, (member,), "all are ready")
        server.apply((Set(contract.JOB_WORLD, encode_world(world)),))
        assert connection.await_world(0)[1] == member
        eventually(lambda: connections() == 2, within=5.0, what="the heartbeats' connection")
    finally:
        connection.stop()


def test_who_stops_on_purpose_is_never_taken_for_silent_or_lost(token_file: str) -> None:
    expired: queue.SimpleQueue[str] = queue.SimpleQueue()
    timeout = 0.5
    with RendezvousServer(token=TOKEN, callbacks=Callbacks(on_lease_expired=expired.put)) as server:
        with sending_heartbeats(server, token_file, TrainingProgress(), heartbeat_timeout=timeout):
            pass
        deadline = time.monotonic() + 2 * timeout
        while time.monotonic() < deadline:  # its end may take long
            assert expired.empty(), expired.get()
            time.sleep(0.01)
