"""A whole driver without agents, for members that a benchmark simulates.

The agents of its hosts report that they are up and nothing else, so that the driver expects N
workers, h0.0.1 to h<k>.7.1, eight a host. It then prints a JSON line with the endpoint and the
token's file, and runs until its stdin closes.

    python -m benchmarks.peers.driver N FOLDER [--insecure]
"""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from queue import SimpleQueue

from elastic_driver.runtime.backend import Backend, OnLost
from elastic_driver.runtime.discovery import FixedDiscovery
from elastic_driver.runtime.driver import ElasticDriver
from elastic_driver.runtime.reporter import Level, Reporter
from elastic_driver.runtime.resources import DriverSetup
from elastic_driver.runtime.run_dir import RunDir
from elastic_driver.settings import DriverOptions, Settings
from elastic_driver.words.orders import JobSpec
from elastic_driver.words.wire_events import AgentReady

SLOTS = 8  # of each host


class SilentAgents(Backend):
    """A backend that starts nothing; `asked` has the agents that the driver wants."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[tuple[str, int]] = SimpleQueue()
        self.token_file = Path()

    def __call__(self, _endpoint: str, token_file: Path) -> SilentAgents:
        self.token_file = token_file
        return self

    def start(self, host: str, incarnation: int, _on_lost: OnLost) -> None:
        self.asked.put((host, incarnation))

    def kill(self, host: str, incarnation: int) -> None:
        """Do nothing: there is no process."""

    def close(self, grace: float) -> None:
        """Do nothing: there is no connection."""


def main() -> None:
    """Run the driver until it waits for its workers' READY, report that, and stay."""
    count, folder = int(sys.argv[1]), Path(sys.argv[2])
    hosts = tuple((f"h{n // SLOTS}", min(SLOTS, count - n)) for n in range(0, count, SLOTS))
    agents = SilentAgents()
    driver = ElasticDriver(
        DriverSetup(
            settings=Settings(start_np=count, min_np=1, heartbeat_timeout=30.0),
            spec=JobSpec("bench", ("true",), "/", {}, 30.0, 3),
            discovery=FixedDiscovery(hosts),
            starter=agents,
            run_dir=RunDir(folder, "bench"),
            options=DriverOptions(insecure="--insecure" in sys.argv),
            reporter=Reporter(io.StringIO(), level=Level.QUIET),
        )
    )
    driver.start()
    for _ in hosts:
        host, incarnation = agents.asked.get(timeout=60)
        driver.post(AgentReady(host, incarnation, 1, "127.0.0.1", (5000, 5001)))
    answers: SimpleQueue[bytes] = SimpleQueue()
    while True:
        driver.ask_status(answers.put)
        if answers.get(timeout=60).count(b'"state":"starting"') >= count:
            break
        time.sleep(0.05)
    place = {"endpoint": driver.endpoint, "token_file": str(agents.token_file)}
    print(json.dumps(place), flush=True)
    sys.stdin.read()
    for _ in range(2):  # the second time without waiting for agents that do not exist
        driver.request_stop("the benchmark is over", 143)
    driver.stop()


if __name__ == "__main__":
    main()
