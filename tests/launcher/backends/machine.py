"""A driver of several local hosts, for tests of the backend that starts their agents."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from elastic_driver import contract
from elastic_driver.words.orders import StartWorkerOrder, encode
from elastic_driver.words.wire_events import AgentReady, WorkerExited
from launcher.agent.command_line import SPARE_FLAG
from launcher.agent.processes import children
from launcher.backends.local import LocalBackend
from rendezvous.wire import Set
from tests.launcher.agent.harness import WAIT, Driver, eventually, place
from tests.support.processes import is_running, read_words, select, session_of, signal_each

HOSTS = ("localhost", "127.0.0.2", "127.0.0.3")
IMPORTED = "import os\nopen({log!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
LOOK = """
import json, os, sys
shown = open("/proc/self/environ").read()
seen = {"parent": os.getppid(), "warm": "counted" in sys.modules}
with open(os.environ["ELASTIC_WORKER_ID"], "w") as file:
    json.dump({**seen, "environ": str(os.environ), "shown": shown}, file)
"""


class Seen(NamedTuple):
    """How a worker found itself."""

    parent: int
    warm: bool
    variables: str  # as it has them, and as others are shown them


class Machine(Driver):
    """A driver of several local hosts whose job preloads a module that counts its imports."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.counts = folder / "imports"
        (folder / "counted.py").write_text(IMPORTED.format(log=str(self.counts)))
        self.lost: dict[str, str] = {}
        self.backend = LocalBackend(self.server.url, self.token_file)
        self.given: dict[tuple[str, int], int] = {}  # orders

    @property
    def importers(self) -> list[int]:
        """Pids of all processes that have imported the module for themselves."""
        return [int(line) for line in self.counts.read_text().split()]

    def publish_job(self, script: str = WAIT, **changes: object) -> None:
        self.python(script, preload=("counted",), **changes)

    def start(self, *hosts: str, incarnation: int = 1) -> None:
        for host in hosts:
            self.backend.start(host, incarnation, self.told_of(host))

    def told_of(self, host: str) -> Callable[[str], None]:
        return lambda reason: self.lost.__setitem__(host, reason)

    def up(self, *hosts: str, incarnation: int = 1) -> list[int]:
        """Start agents on these hosts; their pids once all are up."""
        self.start(*hosts, incarnation=incarnation)
        return self.wait_for(*hosts, incarnation=incarnation)

    def wait_for(self, *hosts: str, incarnation: int = 1) -> list[int]:
        """The pids of agents that were started, once all are up."""

        def pids() -> list[int]:
            ready = {e.host: e.pid for e in self.told(AgentReady) if e.incarnation == incarnation}
            return [ready[host] for host in hosts] if set(hosts) <= set(ready) else []

        return eventually(pids, 30.0, f"agents on {hosts}; lost: {self.lost}")

    def work(self, host: str, incarnation: int = 1) -> str:
        """Order a worker on a host; its name."""
        number = self.given[host, incarnation] = self.given.get((host, incarnation), 0) + 1
        worker = contract.worker_id(host, 0, 10 * incarnation + number)
        order = StartWorkerOrder(worker, place(), 1, 0, "127.0.0.1", 29500)
        self.server.apply([Set(contract.agent_order(host, incarnation, number), encode(order))])
        return worker

    def seen(self, worker: str) -> Seen:
        """What a worker of the `LOOK` script has written, once it has ended."""
        assert self.wait(WorkerExited, worker).exit_code == 0
        found = json.loads((self.folder / worker).read_text())
        return Seen(found["parent"], found["warm"], found["environ"] + found["shown"])

    def expect_more(self) -> None:
        """From now on hosts may come at any time; before the first one."""
        self.backend = LocalBackend(self.server.url, self.token_file, grows=True)

    def spare(self) -> int:
        """The pid of an agent that waits to be told its host."""

        def look() -> int:
            found = [pid for pid in children() if SPARE_FLAG in command(pid) and is_running(pid)]
            agents = {event.pid for event in self.told(AgentReady)}
            return next((pid for pid in found if pid not in agents), 0)

        return eventually(look, what="a spare agent")

    def shared_parent(self) -> int:
        """The pid of the process that imports for all."""

        def look() -> int:
            found = [
                p
                for p in children()
                if "script.py" in command(p) and session_of(p) == p and is_running(p)
            ]
            return found[0] if found else 0

        return eventually(look, what="a shared parent")

    def kill_shared_parent(self) -> None:
        """Kill the process that imports for all, and wait for its end; its spares stay."""
        shared = self.shared_parent()
        os.kill(shared, signal.SIGKILL)
        eventually(lambda: not is_running(shared))

    def stop_shared_parent(self) -> int:
        """Stop the process that imports for all, and its spares; its pid."""
        shared = self.shared_parent()
        family = select(psutil.Process().children(), lambda p: "script.py" in command(p.pid))
        signal_each((psutil.Process(shared), *family), signal.SIGSTOP)
        return shared


def command(pid: int) -> str:
    """What a process runs, a word apart; empty where it has ended."""
    return " ".join(read_words(pid, "cmdline"))


def kinds_of_files(pid: int) -> list[str]:
    """What a process has open, but for numbers and for where the warm parent's words are kept.

    Connections to one peer count once: it has one or two to the driver, as its requests happen to
    meet. More than two of them are listed.
    """
    peers: dict[str, str] = {}
    for found in psutil.Process(pid).net_connections("inet"):
        peers[str(found.fd)] = f"inet {found.status} {found.raddr}"
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            links.append(peers.get(fd.name) or os.readlink(fd))
    kinds = [re.sub(r"\[\d+\]|elastic-mp-\w+", "", link) for link in links]
    kinds = [re.sub(r"/memfd:.*|/.*/#\d+ .*", "log", kind) for kind in kinds]
    twice = {k for k, n in Counter(kinds).items() if n == 2 and "ESTABLISHED addr" in k}
    return sorted([kind for kind in kinds if kind not in twice] + list(twice))


def signals(pid: int) -> list[str]:
    """Which signals a process blocks, ignores and catches."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return [line for line in lines if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
