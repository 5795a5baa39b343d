"""The worker's line to the driver, against a real rendezvous server."""

from __future__ import annotations

import queue
import time
from pathlib import Path

from elastic_driver.worker.context import WorkerContext
from elastic_driver.worker.heartbeat.driver_connection import DriverConnection
from elastic_driver.worker.heartbeat.progress import TrainingProgress
from rendezvous.auth import write_token_file
from rendezvous.server import RendezvousServer

TOKEN = "t" * 32


def test_who_stops_on_purpose_is_never_taken_for_silent_or_lost(tmp_path: Path) -> None:
    expired: queue.SimpleQueue[str] = queue.SimpleQueue()
    with RendezvousServer(token=TOKEN, on_lease_expired=expired.put) as server:
        born = WorkerContext(
            run_id="job",
            worker="a.0.1",
            host="a",
            slot=0,
            endpoint=server.url,
            token_file=str(write_token_file(tmp_path / "token", TOKEN)),
            heartbeat_timeout=0.5,
        )
        connection = DriverConnection(
            born, TrainingProgress(), on_notice=lambda _notice: None, before_heartbeat=lambda: None
        )
        connection.heartbeat.start()
        connection.stop()
        deadline = time.monotonic() + 2 * born.heartbeat_timeout
        while time.monotonic() < deadline:  # its end may take long
            assert expired.empty(), expired.get()
            time.sleep(0.01)
