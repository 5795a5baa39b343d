"""A second ssh backend takes over the agents of a first one, whose process was killed.

The ssh is the stand-in of `test_remote`, everything else is real.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_driver.runtime.backend import BackendJob
from elastic_driver.words.wire_events import AgentReady, WorkerStarted
from launcher.backends.remote_agents import RemoteBackend
from launcher.backends.shells import SshShell
from tests.launcher.agent.harness import HOST, ROOT, STUBBORN, WAIT, Driver, eventually
from tests.launcher.backends.test_remote_agents import SSH
from tests.support.processes import is_running, processes_with, select

_FIRST = """
import sys, time
from pathlib import Path
from elastic_driver.runtime.backend import BackendJob
from launcher.backends.remote_agents import RemoteBackend
from launcher.backends.shells import SshShell
url, token, program, home, host, adopts = sys.argv[1:]
job = BackendJob(endpoint=url, token_file=Path(token))
backend = RemoteBackend(job, SshShell(program=program, home=Path(home)))
if adopts:
    backend.adopt(host, 1, int(adopts), print)
else:
    backend.start(host, 1, print)
time.sleep(600)
"""


class Host(Driver):
    """A driver's side, and a host behind a stand-in of ssh."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tmp = folder / "tmp"  # of the host
        self.tmp.mkdir()
        self.ssh = folder / "ssh"
        self.ssh.write_text(SSH.format(tmp=self.tmp))
        self.ssh.chmod(0o755)
        self.lost: list[str] = []
        self.closed: list[str] = []
        job = BackendJob(endpoint=self.server.url, token_file=self.token_file)
        self.backend = RemoteBackend(job, SshShell(program=str(self.ssh), home=ROOT))
        self.backend.report_connections(lambda _host, _number, reason: self.closed.append(reason))

    def adopt(self, pid: int) -> None:
        self.backend.adopt(HOST, 1, pid, self.lost.append)

    @contextlib.contextmanager
    def first_backend(self, adopts: int | str = "") -> Iterator[None]:
        """A process with a backend of its own, which starts the agent or adopts it; then killed."""
        words = (self.server.url, self.token_file, self.ssh, ROOT, HOST, adopts)
        argv = [sys.executable, "-c", _FIRST, *map(str, words)]
        with subprocess.Popen(argv, cwd=ROOT) as process:
            try:
                yield
            finally:
                process.kill()

    def orphan(self, script: str) -> tuple[int, int]:
        """The pids of an agent and its worker, whose driver was killed."""
        self.python(script)
        with self.first_backend():
            agent = self.wait(AgentReady, within=30).pid
            worker = self.wait(WorkerStarted, self.start_worker()).pid
        assert is_running(agent)
        assert is_running(worker)
        return agent, worker

    def commands(self, word: str) -> list[psutil.Process]:
        """The commands of ours that run on the host."""
        argv = ["-m", "launcher.agent.remote", word]
        ours = processes_with(f"TMPDIR={self.tmp}")
        return select(ours, lambda process: process.cmdline()[1:4] == argv)

    def waiting(self) -> list[psutil.Process]:
        """The commands that wait for the agent's end: each has opened the keeper's file."""

        def waits(process: psutil.Process) -> bool:
            return any(file.path.endswith("/keeper") for file in process.open_files())

        return select(self.commands("wait"), waits)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.backend.close(0)
    host.close()


def test_the_end_of_an_adopted_agent_is_told_and_nothing_is_left(host: Host) -> None:
    agent, worker = host.orphan(WAIT)
    host.adopt(agent)
    eventually(host.waiting)
    psutil.Process(agent).kill()
    eventually(lambda: host.lost, what="the driver has heard of the end")
    assert host.lost == [f"the agent on {HOST} has ended"]
    assert not is_running(worker)
    eventually(lambda: list(host.tmp.iterdir()) == [])
    eventually(lambda: host.commands("keep") == [], what="the process that kept the agent ends")


def test_an_adopted_agent_that_hangs_can_be_killed(host: Host) -> None:
    agent, worker = host.orphan(STUBBORN)
    host.adopt(agent)
    eventually(host.waiting)
    psutil.Process(agent).suspend()
    host.backend.kill(HOST, 1)
    eventually(lambda: host.lost)
    assert host.lost == [f"the agent on {HOST} was killed"]
    assert not is_running(agent)
    assert not is_running(worker)
    assert list(host.tmp.iterdir()) == []


def test_an_agent_that_never_came_back_can_be_killed_and_started_anew(host: Host) -> None:
    agent, worker = host.orphan(WAIT)
    host.backend.kill(HOST, 1)
    eventually(lambda: not is_running(agent) and not is_running(worker))
    host.backend.start(HOST, 2, host.lost.append)
    eventually(lambda: [e for e in host.told(AgentReady) if e.incarnation == 2], 20)
    assert host.lost == []


def test_a_new_agent_of_the_same_number_takes_the_place_of_the_old_one(host: Host) -> None:
    agent, worker = host.orphan(WAIT)
    host.backend.start(HOST, 1, host.lost.append)
    eventually(lambda: len(host.told(AgentReady)) == 2, 20)
    assert not is_running(agent)
    assert not is_running(worker)
    assert host.lost == []


def test_close_ends_adopted_agents(host: Host) -> None:
    agent, worker = host.orphan(STUBBORN)
    host.adopt(agent)
    host.backend.close(0.1)
    assert not is_running(agent)
    assert not is_running(worker)
    assert list(host.tmp.iterdir()) == []
    eventually(lambda: host.commands("wait") == [])


def test_a_host_that_cannot_be_reached_is_no_end_of_its_agent(host: Host) -> None:
    agent, _ = host.orphan(WAIT)
    (host.tmp / "unreachable").touch()
    host.adopt(agent)
    (host.tmp / "unreachable").unlink()
    (wait,) = eventually(host.waiting, what="it was tried again")
    assert host.lost == []
    ssh = wait.parent()
    while ssh is not None and ssh.name() != "ssh":
        ssh = ssh.parent()
    assert ssh is not None
    ssh.send_signal(signal.SIGHUP)  # the connection breaks, which is evidence and no verdict
    eventually(lambda: host.closed)
    assert "connection has closed and said" in host.closed[0]
    assert f"Connection to {HOST} closed by remote host." in host.closed[0]
    eventually(lambda: [p for p in host.waiting() if p.pid != wait.pid])
    assert host.lost == []
    psutil.Process(agent).kill()
    eventually(lambda: host.lost)


def test_a_backend_that_dies_leaves_nobody_waiting_on_the_host(host: Host) -> None:
    agent, _ = host.orphan(WAIT)
    with host.first_backend(adopts=agent):
        eventually(host.waiting)
    eventually(lambda: host.commands("wait") == [], what="nobody waits any more")
    assert is_running(agent)
    host.adopt(agent)
