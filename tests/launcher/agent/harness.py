"""A driver's side for tests of the agent: a real rendezvous server, orders out, events in."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from elastic_driver import contract
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.runtime.api import job_access
from elastic_driver.words.orders import (
    DriverTerm,
    JobSpec,
    Order,
    RanksOrder,
    ShutdownOrder,
    StartWorkerOrder,
    StopWorkerOrder,
    encode,
)
from elastic_driver.words.progress import OutputLines
from elastic_driver.words.wire_events import (
    AgentReady,
    AgentReturned,
    HostLeaving,
    WireEvent,
    WorkerExited,
    WorkerStarted,
)
from elastic_driver.words.world import SlotInfo
from rendezvous.auth import write_token_file
from rendezvous.server import Callbacks, RendezvousServer, Succession
from rendezvous.wire import Get, Set

T = TypeVar("T")
E = TypeVar("E", AgentReady, AgentReturned, HostLeaving, WorkerStarted, WorkerExited)
ROOT = Path(__file__).resolve().parents[3]
TOKEN = "a-token-for-tests"
HOST = "localhost"
WAIT = "import time\nprint('up', flush=True)\ntime.sleep(600)"
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("not yet", flush=True))
print("up", flush=True)
while True:
    time.sleep(0.1)
"""
DAEMON = """
import os, pathlib, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path("daemon").write_text(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
while not (pathlib.Path("daemon").exists() and pathlib.Path("daemon").read_text()):
    time.sleep(0.01)
print("up", flush=True)
if not os.environ.get("STAY"):
    raise SystemExit(0)
time.sleep(600)
"""
_decode_event = msgspec.json.Decoder(WireEvent).decode


def eventually(look: Callable[[], T], within: float = 10.0, what: str = "it") -> T:
    """The first truthy value of `look()`; fails after `within` seconds."""
    deadline = time.monotonic() + within
    while not (value := look()):
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        time.sleep(0.01)
    return value


def place(rank: int = 0, size: int = 1, slot: int | None = None) -> SlotInfo:
    """A place on a single host."""
    return SlotInfo(
        host=HOST,
        slot=rank if slot is None else slot,
        rank=rank,
        local_rank=rank,
        cross_rank=0,
        size=size,
        local_size=size,
        cross_size=1,
        node_rank=0,
        node_count=1,
    )


class Driver:
    """The server, what was posted to it, and a way to give orders to one agent."""

    def __init__(self, folder: Path, incarnation: int = 1, term: int = 0, port: int = 0) -> None:
        self.folder, self.incarnation, self.term = folder, incarnation, term
        self.token_file = write_token_file(folder / "token", TOKEN)
        self.endpoint_file = folder / "endpoint.json"
        self.events: list[WireEvent] = []
        self.output: list[OutputLines] = []
        self.expired: queue.Queue[str] = queue.Queue()
        self.orders = 0
        self.server = RendezvousServer(
            port=port,
            token=TOKEN,
            access=job_access(),
            routes=self._routes,
            callbacks=Callbacks(on_lease_expired=self.expired.put),
            succession=Succession(first_revision=term << 40),
        ).start()
        self.endpoint_file.write_text(f'{{"url": "{self.server.url}"}}')
        if term:
            self.server.apply([Set(contract.JOB_DRIVER, encode(DriverTerm(term, self.server.url)))])

    def replaced(self, term: int, *, elsewhere: bool = False) -> Driver:
        """A driver with this term after the end of this one, at its address unless `elsewhere`."""
        self.close()
        return Driver(self.folder, self.incarnation, term, 0 if elsewhere else self.server.port)

    def _routes(self, app: web.Application) -> None:
        async def take(request: web.Request) -> web.Response:
            self.events.append(_decode_event(await request.read()))
            return web.json_response({})

        async def take_output(request: web.Request) -> web.Response:
            self.output.append(msgspec.json.decode(await request.read(), type=OutputLines))
            return web.json_response({})

        app.router.add_post(EVENTS_PATH, take)
        app.router.add_post(contract.OUTPUT_PATH, take_output)

    # ---- out -----------------------------------------------------------------------------

    def publish(self, *command: str, **changes: object) -> JobSpec:
        spec = JobSpec(
            run_id="run-for-tests",
            command=command,
            cwd=str(self.folder),
            env={},
            heartbeat_timeout=6.0,
            max_restarts=3,
        )
        spec = dataclasses.replace(spec, **changes)
        self.server.apply([Set(contract.JOB_SPEC, encode(spec))])
        return spec

    def python(self, script: str, **changes: object) -> JobSpec:
        """Publish a job that runs this script."""
        path = self.folder / "script.py"
        path.write_text(script)
        return self.publish(sys.executable, str(path), **changes)

    def order(self, order: Order) -> None:
        self.orders += 1
        key = contract.agent_order(HOST, self.incarnation, self.orders)
        self.server.apply([Set(key, encode(order))])

    def start_worker(self, rank: int = 0, size: int = 1, round_id: int = 1) -> str:
        worker = contract.worker_id(HOST, rank, self.orders + 1)
        self.order(StartWorkerOrder(worker, place(rank, size), round_id, 0, "127.0.0.1", 29500))
        return worker

    def stop_worker(self, worker: str, grace: float) -> None:
        self.order(StopWorkerOrder(worker, grace, "the test says so"))

    def ranks(self, round_id: int, ranks: dict[str, int]) -> None:
        self.order(RanksOrder(round_id, ranks))

    def shutdown(self, grace: float = 2.0) -> None:
        self.order(ShutdownOrder(grace, "the test is over"))

    # ---- in ------------------------------------------------------------------------------

    def told(self, kind: type[E], worker: str | None = None) -> list[E]:
        found = [e for e in self.events if isinstance(e, kind)]
        return [e for e in found if worker is None or getattr(e, "worker", None) == worker]

    def wait(self, kind: type[E], worker: str | None = None, within: float = 15.0) -> E:
        what = f"{kind.__name__} of {worker}; events: {self.events}"
        return eventually(lambda: self.told(kind, worker), within, what)[0]

    def has_lease(self) -> bool:
        key = contract.agent_lease(HOST, self.incarnation)
        (found,) = self.server.apply([Get((key,))])
        return key in found.entries  # type: ignore[union-attr]

    def printed_lines(self) -> list[str]:
        """The lines that were posted, each number once."""
        numbered = {
            batch.first + n: line for batch in self.output for n, line in enumerate(batch.lines)
        }
        return [numbered[number].text for number in sorted(numbered)]

    def close(self) -> None:
        self.server.stop()


class AgentProcess:
    """A real `python -m launcher.agent`, whose output goes to two files unless told otherwise."""

    def __init__(self, driver: Driver, *extra: str, **popen: object) -> None:
        self.driver = driver
        self.out_file, self.err_file = driver.folder / "out", driver.folder / "err"
        argv = [sys.executable, "-m", "launcher.agent", "--endpoint", driver.server.url]
        argv += ["--host", HOST, "--incarnation", str(driver.incarnation)]
        argv += ["--token-file", str(driver.token_file), "--address", "127.0.0.1", *extra]
        with self.out_file.open("ab") as out, self.err_file.open("ab") as err:
            options = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, **popen}
            self.process = subprocess.Popen(argv, cwd=ROOT, **options)  # type: ignore[call-overload]
        self.pid: int = self.process.pid

    @property
    def out(self) -> str:
        return self.out_file.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self.err_file.read_text(errors="replace")

    def wait(self, within: float = 15.0) -> int:
        return int(self.process.wait(within))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(8)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        for started in self.driver.told(WorkerStarted):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(started.pid, signal.SIGKILL)


@contextlib.contextmanager
def agent_of(driver: Driver, *extra: str, **popen: object) -> Iterator[AgentProcess]:
    """A running agent, stopped at the end."""
    agent = AgentProcess(driver, *extra, **popen)
    try:
        yield agent
    finally:
        agent.close()
