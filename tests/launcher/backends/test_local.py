"""The local backend with real agents, workers and kills."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_driver.errors import ClusterError
from elastic_driver.words.wire_events import AgentReady, WorkerExited, WorkerStarted
from launcher.agent import processes
from launcher.backends.local import LocalAgents, LocalBackend
from tests.launcher.agent.harness import DAEMON, ROOT, STUBBORN, WAIT, Driver, eventually
from tests.support.processes import is_running


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    yield driver
    driver.close()


@pytest.fixture
def backend(driver: Driver) -> Iterator[LocalBackend]:
    backend = LocalBackend(driver.server.url, driver.token_file)
    yield backend
    backend.close(0)


def grandchild(driver: Driver) -> int:
    """The pid of the daemon that the DAEMON script has left."""
    path = driver.folder / "daemon"
    return int(eventually(lambda: path.exists() and path.read_text()))


def test_the_plan_is_pure_and_names_everything_an_agent_needs(tmp_path: Path) -> None:
    token = tmp_path / "token"
    backend = LocalBackend("http://127.0.0.1:1", token)
    plan = backend.plan("127.0.0.2", 3)
    assert plan.argv == (
        *(sys.executable, "-m", "launcher.agent", "--endpoint", "http://127.0.0.1:1"),
        *("--host", "127.0.0.2", "--incarnation", "3", "--token-file", str(token)),
        *("--address", "127.0.0.2", "--lifeline", "--orphan-file", str(token)),
        *("--orphan-file", str(tmp_path / "endpoint.json")),
    )
    assert plan.env == {"ELASTIC_JOB_MARK": str(token)}
    other = LocalBackend("http://127.0.0.1:1", token, resumable=True)
    assert other.plan("127.0.0.2", 3).argv == (*plan.argv, "--resumable")


def test_another_machine_is_a_clear_error_told_and_not_raised(tmp_path: Path) -> None:
    backend = LocalBackend("http://127.0.0.1:1", tmp_path / "token")
    with pytest.raises(ClusterError, match="node17 is not this machine"):
        backend.plan("node17", 1)
    reasons: list[str] = []
    backend.start("node17", 1, reasons.append)
    backend.close(0)
    assert len(reasons) == 1
    assert "choose another --backend" in reasons[0]


def test_an_agent_comes_up_and_its_end_is_told_once(driver: Driver, backend: LocalBackend) -> None:
    driver.python(WAIT)
    reasons: list[str] = []
    backend.start("localhost", 1, reasons.append)
    assert driver.wait(AgentReady).address == "127.0.0.1"
    driver.shutdown()
    eventually(lambda: reasons)
    backend.close(0)
    assert reasons == ["the agent on localhost has ended"]


def test_the_end_waits_for_a_start_that_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = threading.Event(), threading.Event()

    async def warm(*_: object) -> None:
        began.set()
        try:
            await asyncio.sleep(30.0)
        finally:  # as one that closes what it has opened
            await asyncio.sleep(0.05)
            ended.set()

    monkeypatch.setattr(LocalAgents, "_warm", warm)
    backend = LocalBackend("http://127.0.0.1:1", tmp_path / "token", several=True)
    backend.start("localhost", 1, lambda _reason: None)
    assert began.wait(10.0)
    backend.close(0)
    assert ended.is_set()


def test_an_agent_that_a_bug_lets_nobody_follow_is_ended_and_told(
    driver: Driver, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> str:
        raise ValueError("a file that nobody expected")

    monkeypatch.setattr(LocalAgents, "_end_of", broken)
    driver.python(WAIT)
    reasons: list[str] = []
    before = set(processes.children())
    backend.start("localhost", 1, reasons.append)
    eventually(lambda: reasons)
    assert "cannot follow the agent on localhost (a bug)" in reasons[0]
    assert "a file that nobody expected" in reasons[0]
    eventually(lambda: not [pid for pid in set(processes.children()) - before if is_running(pid)])


def test_an_agent_that_cannot_join_is_told(driver: Driver, backend: LocalBackend) -> None:
    driver.python(WAIT)
    driver.token_file.write_text("wrong")
    reasons: list[str] = []
    backend.start("localhost", 1, reasons.append)
    eventually(lambda: reasons)
    assert "exit status 75" in reasons[0]


def test_a_killed_agent_takes_workers_and_daemons_with_it_and_spares_other_children(
    driver: Driver, backend: LocalBackend
) -> None:
    driver.python(DAEMON, env={"STAY": "1"})
    reasons: list[str] = []
    with subprocess.Popen(["sleep", "600"]) as bystander:
        backend.start("localhost", 1, reasons.append)
        worker = driver.wait(WorkerStarted, driver.start_worker()).pid
        daemon = grandchild(driver)
        began = time.monotonic()
        os.kill(driver.wait(AgentReady).pid, signal.SIGKILL)
        eventually(lambda: reasons)
        assert time.monotonic() - began < 2.0
        assert reasons == ["the agent on localhost was killed by SIGKILL"]
        assert not is_running(worker)
        assert not is_running(daemon)
        assert is_running(bystander.pid)
        bystander.kill()


def test_one_agents_death_leaves_the_other_hosts_workers_alone(
    driver: Driver, backend: LocalBackend, tmp_path: Path
) -> None:
    driver.python(WAIT)
    reasons: list[str] = []
    backend.start("localhost", 1, reasons.append)
    backend.start("127.0.0.2", 1, reasons.append)
    worker = driver.wait(WorkerStarted, driver.start_worker()).pid
    eventually(lambda: len(driver.told(AgentReady)) == 2)
    other = next(e.pid for e in driver.told(AgentReady) if e.host == "127.0.0.2")
    backend.kill("127.0.0.2", 1)
    eventually(lambda: reasons)
    assert not is_running(other)
    assert is_running(worker)


def test_a_stopped_agent_can_be_killed_and_unknown_ones_are_no_mistake(
    driver: Driver, backend: LocalBackend
) -> None:
    driver.python(STUBBORN)
    reasons: list[str] = []
    backend.kill("localhost", 1)
    backend.start("localhost", 1, reasons.append)
    worker = driver.wait(WorkerStarted, driver.start_worker()).pid
    os.kill(driver.wait(AgentReady).pid, signal.SIGSTOP)
    backend.kill("localhost", 1)
    eventually(lambda: reasons, within=3)
    assert not is_running(worker)
    backend.kill("localhost", 1)


def test_close_waits_for_agents_that_were_told_to_end(
    driver: Driver, backend: LocalBackend
) -> None:
    driver.python(STUBBORN)
    backend.start("localhost", 1, lambda _reason: None)
    worker = driver.start_worker()
    driver.wait(WorkerStarted, worker)
    driver.shutdown(grace=0.3)
    backend.close(10)
    assert driver.told(WorkerExited, worker)


def test_close_kills_what_does_not_end_and_leaves_no_thread_or_descriptor(
    driver: Driver, capfd: pytest.CaptureFixture[str]
) -> None:
    me = psutil.Process()
    driver.python(DAEMON, env={"STAY": "1"})
    before = me.num_fds(), threading.active_count()
    backend = LocalBackend(driver.server.url, driver.token_file)
    backend.start("localhost", 1, lambda _reason: None)
    worker = driver.wait(WorkerStarted, driver.start_worker()).pid
    daemon = grandchild(driver)
    began = time.monotonic()
    backend.close(0.2)
    backend.close(0.2)
    assert time.monotonic() - began < 5
    assert not any(is_running(pid) for pid in (worker, daemon, driver.wait(AgentReady).pid))
    # The server may still be closing the agent's connections.
    eventually(lambda: me.num_fds() <= before[0])
    assert threading.active_count() == before[1]


def test_when_the_drivers_process_is_killed_everything_goes_with_it(driver: Driver) -> None:
    driver.python(DAEMON, env={"STAY": "1"})
    script = (
        "import sys, pathlib, time\n"
        "from launcher.backends.local import LocalBackend\n"
        "backend = LocalBackend(sys.argv[1], pathlib.Path(sys.argv[2]))\n"
        "backend.start('localhost', 1, print)\n"
        "time.sleep(600)\n"
    )
    argv = [sys.executable, "-c", script, driver.server.url, str(driver.token_file)]
    with subprocess.Popen(argv, cwd=ROOT) as process:
        worker = driver.wait(WorkerStarted, driver.start_worker()).pid
        agent = driver.wait(AgentReady).pid
        daemon = grandchild(driver)
        process.kill()
    began = time.monotonic()
    eventually(lambda: not any(map(is_running, (agent, worker, daemon))), within=8)
    assert time.monotonic() - began < 5
    eventually(lambda: not driver.token_file.exists() and not driver.endpoint_file.exists())


def test_ctrl_c_in_the_terminal_does_not_reach_the_agent(
    driver: Driver, backend: LocalBackend
) -> None:
    driver.python(WAIT)
    backend.start("localhost", 1, lambda _reason: None)
    agent = driver.wait(AgentReady).pid
    assert os.getsid(agent) == os.getpgid(agent) == agent != os.getsid(0)
