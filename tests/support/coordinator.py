"""A driver in miniature for tests of workers: a real rendezvous server, worlds, notices.

It forms a round when every live worker that takes part is READY, as the real driver does, but acts
only when the test says so: start, kill, let in, tell to leave. Workers are real processes, forked
from a server that has imported torch once. What workers write down, one JSON line a step, is read
back with `records`. Every wait has a deadline; whatever still runs at the end is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import psutil
from aiohttp import web

from elastic_driver import contract
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.runtime.api import job_access
from elastic_driver.words.orders import DriverTerm, Notice, World, decode, encode, encode_world
from elastic_driver.words.progress import Progress
from elastic_driver.words.wire_events import WireEvent, WorkerReady, WorkerStepped
from elastic_driver.words.world import Member, SlotInfo
from rendezvous.auth import make_token, write_token_file
from rendezvous.server import RendezvousServer, Succession
from rendezvous.wire import DeletePrefix, Entries, Get, Set

HOST = "testhost"
LIMIT_S = 60.0
HEARTBEAT_S = 30.0
T = TypeVar("T")


def eventually(look: Callable[[], T], what: str, within: float = LIMIT_S) -> T:
    """The first truthy value of `look()`; fails after `within` seconds, saying `what`."""
    deadline = time.monotonic() + within
    while True:
        value = look()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        time.sleep(0.005)


class Coordinator:
    """Forms rounds of the workers it starts, each running `function(out_path, *args)`."""

    def __init__(self, folder: Path, function: Callable[..., Any], *args: Any) -> None:
        self.folder, self.function, self.args = folder, function, args
        self.processes: dict[str, Any] = {}
        self.ready: dict[str, WorkerReady] = {}
        self.events: list[Any] = []
        self.worlds: list[World] = []
        self.waiting_for: set[str] = set()  # who must be READY before a round is complete
        self.automatic = True  # whether a round forms as soon as it can
        self.environment: dict[str, str] = {}  # more variables of workers that are started
        self._lock = threading.RLock()
        self._born = 0
        self._token = make_token()
        self._token_file = write_token_file(folder / "token", self._token)
        self.term = 0
        self.server = self._next_driver(0)

    def __enter__(self) -> Coordinator:
        self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._ask_where_they_are()
            print(self.describe())
        for process in self.processes.values():
            process.kill()
            process.join()
        self.server.stop()

    def come_back(self) -> None:
        """A driver of the next term at the address of the one that was stopped, with empty keys."""
        self.server = self._next_driver(self.server.port)
        self._begin()

    def _next_driver(self, port: int) -> RendezvousServer:
        self.term += 1
        return RendezvousServer(
            port=port,
            token=self._token,
            access=job_access(),
            routes=self._routes,
            succession=Succession(first_revision=self.term << 40),
        )

    def _begin(self) -> None:
        self.server.start()
        driver = DriverTerm(self.term, self.server.url)
        self.server.apply([Set(contract.JOB_DRIVER, encode(driver))])

    # ---- workers -------------------------------------------------------------------------

    def start(self, count: int = 1, expected: bool = True) -> list[str]:
        """Start workers; the next round waits for them if they are `expected`."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "torch.nn.parallel"])
        started = []
        for _ in range(count):
            slot, self._born = self._born, self._born + 1
            worker = contract.worker_id(HOST, slot, 1)
            environment = {
                contract.WORKER_ID: worker,
                contract.RENDEZVOUS: self.server.url,
                contract.TOKEN_FILE: str(self._token_file),
                contract.HEARTBEAT_TIMEOUT: str(HEARTBEAT_S),
                "LOCAL_RANK": str(slot),
                **self.environment,
            }
            with self._lock:
                if expected:
                    self.waiting_for.add(worker)
            target = (environment, str(self.folder / worker), self.function, self.args)
            process = context.Process(target=_main, args=target, daemon=False)
            process.start()
            self.processes[worker] = process
            started.append(worker)
        return started

    def pid(self, worker: str) -> int:
        return int(self.processes[worker].pid)

    def kill(self, worker: str, notice: bool = True) -> float:
        """SIGKILL, as a failure would; what the driver then does, if `notice`. When it was."""
        killed_at = time.time()
        self.processes[worker].kill()
        self.forget(worker)
        if notice:
            self.leave_now(f"{worker} was killed")
        return killed_at

    def stop(self, worker: str) -> None:
        """SIGSTOP: it is there, and does nothing any more."""
        os.kill(self.pid(worker), signal.SIGSTOP)

    def start_three_and_stop_one(self) -> list[str]:
        """Stop a worker of a world that trains; return the others once they train without it."""
        alive = self.start(3)
        self.until_step(10, alive)
        stopped = alive.pop()
        self.stop(stopped)
        reached = self.furthest()
        self.forget(stopped)
        self.leave_now(f"{stopped} is hung")
        self.until_step(reached + 10, alive, 2)
        return alive

    def forget(self, worker: str) -> None:
        """Rounds go on without this worker."""
        with self._lock:
            self.waiting_for.discard(worker)
            self.ready.pop(worker, None)
        self._form_if_complete()

    def let_in(self, workers: list[str], margin: int = 15) -> int:
        """Have the members leave at a boundary, so that these workers join; which step."""
        eventually(lambda: all(w in self.ready for w in workers), "the newcomers are READY")
        with self._lock:
            self.waiting_for.update(workers)
        step = self.furthest() + margin
        self.publish(Notice(self.worlds[-1].round, step, "newcomers are ready"))
        return step

    def leave_now(self, reason: str) -> None:
        if self.worlds:
            self.publish(Notice(self.worlds[-1].round, None, reason))

    def publish(self, notice: Notice) -> None:
        self.server.apply([Set(contract.JOB_NOTICE, encode(notice))])

    def furthest(self) -> int:
        """The furthest step a worker has written to the rendezvous or to its records."""
        steps = [r["step"] for r in self.records()]
        for worker in list(self.processes):
            (found,) = self.server.apply([Get((contract.worker_progress(worker),))])
            assert isinstance(found, Entries)
            steps += [decode(Progress, e.value).step for e in found.entries.values()]
        return max(steps, default=0)

    # ---- rounds --------------------------------------------------------------------------

    def form(self) -> None:
        """Publish the next world, of everybody who is READY."""
        with self._lock:
            number = self.worlds[-1].round + 1 if self.worlds else 1
            order = [w for w in self.processes if w in self.ready and w in self.waiting_for]
            members = tuple(
                Member(w, _place(w, rank, len(order)), self.ready[w].version, self.ready[w].clean)
                for rank, w in enumerate(order)
            )
            world = World(number, members, "test")
            self.worlds.append(world)
            self.ready.clear()
        seal = DeletePrefix(contract.round_prefix(number - 1), seal=True)
        self.server.post([seal, Set(contract.JOB_WORLD, encode_world(world))])

    def _form_if_complete(self) -> None:
        with self._lock:
            if self.automatic and self.waiting_for and self.waiting_for <= set(self.ready):
                self.form()

    def _routes(self, app: web.Application) -> None:
        app.router.add_post(EVENTS_PATH, self._post_event)

    async def _post_event(self, request: web.Request) -> web.Response:
        event = msgspec.json.decode(await request.read(), type=WireEvent)
        with self._lock:
            self.events.append(event)
            if isinstance(event, WorkerReady):
                self.ready[event.worker] = event
        self._form_if_complete()
        return web.json_response({})

    # ---- what is seen --------------------------------------------------------------------

    def stepped(self, round_id: int) -> set[str]:
        """Who has told of its first step in a round."""
        found = [e for e in list(self.events) if isinstance(e, WorkerStepped)]
        return {e.worker for e in found if e.round == round_id}

    def records(self, worker: str | None = None) -> list[dict[str, Any]]:
        """All lines that workers (or one of them) wrote, in the order of their time."""
        names = [worker] if worker is not None else list(self.processes)
        lines = []
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                text = (self.folder / name).read_text()
                whole = [x for x in text.splitlines(keepends=True) if x.endswith("\n")]
                lines += [{"worker": name, **json.loads(x)} for x in whole]
        return sorted(lines, key=lambda line: line["t"])

    def newest(self, worker: str) -> dict[str, Any]:
        """The last line of a worker, or an empty dict."""
        found = self.records(worker)
        return found[-1] if found else {}

    def until_step(self, step: int, workers: list[str], round_id: int = 1) -> None:
        """Wait until these workers have finished `step` in a round not before `round_id`."""

        def look() -> bool:
            newest = [self.newest(w) for w in workers]
            return all(n.get("step", 0) >= step and n.get("round", 0) >= round_id for n in newest)

        eventually(look, f"{workers} at step {step} of round {round_id}")

    def wait(self, workers: list[str]) -> list[int]:
        """Exit statuses of these workers, once they have ended."""
        for worker in workers:
            self.processes[worker].join(LIMIT_S)
        return [self.processes[worker].exitcode for worker in workers]

    def said(self, worker: str) -> str:
        """What a worker wrote to its stderr."""
        path = self.folder / f"{worker}.err"
        return path.read_text() if path.exists() else ""

    def usage(self, worker: str) -> tuple[int, int, float]:
        """Threads, open descriptors, and MiB of memory that are the worker's own."""
        process = psutil.Process(self.pid(worker))
        return process.num_threads(), process.num_fds(), process.memory_full_info().uss / 2**20

    def _ask_where_they_are(self) -> None:
        """Have living workers write their threads' stacks to their stderr."""
        for worker, process in self.processes.items():
            size = len(self.said(worker))
            if process.is_alive() and psutil.Process(process.pid).status() != "stopped":
                os.kill(process.pid, signal.SIGUSR1)
                with contextlib.suppress(AssertionError):
                    eventually(lambda w=worker, s=size: len(self.said(w)) > s, "a stack", within=2)

    def describe(self) -> str:
        said = "\n".join(f"--- {w}\n{self.said(w)[-3000:]}" for w in self.processes)
        return f"worlds {self.worlds[-3:]}\nevents {self.events[-10:]}\n{said}"


class Recorder:
    """A worker's own file of JSON lines."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the process

    def note(self, **facts: Any) -> None:
        self._file.write(json.dumps({"t": time.time(), "pid": os.getpid(), **facts}) + "\n")


def _main(environment: dict[str, str], path: str, function: Callable[..., Any], args: Any) -> None:
    descriptor = os.open(f"{path}.err", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    try:
        function(path, *args)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    import elastic_driver

    elastic_driver.shutdown()  # a multiprocessing child does not run atexit functions
    os._exit(0)


def _place(worker: str, rank: int, size: int) -> SlotInfo:
    slot = int(worker.split(".")[1])
    return SlotInfo(HOST, slot, rank, rank, 0, size, size, 1, 0, 1)
