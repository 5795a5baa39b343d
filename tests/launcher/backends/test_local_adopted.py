"""The local backend takes over real agents that another process has started, and which is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_driver import contract
from elastic_driver.runtime.run_dir import RunDir
from elastic_driver.words.wire_events import AgentReady, WorkerStarted
from launcher.agent.processes import become_subreaper, children
from launcher.backends import local
from launcher.backends import local as adopted
from launcher.backends.local import AdoptedProcess, LocalBackend, end_marked, find_agent
from launcher.launch.resume import agents_here
from tests.launcher.agent.harness import DAEMON, ROOT, STUBBORN, WAIT, Driver, eventually
from tests.launcher.backends.machine import command
from tests.support.processes import is_running, processes_with

OTHER = "127.0.0.2"


class Orphans(Driver):
    """A driver's side with agents that are not our children."""

    def leave_agent(self, host: str = "localhost", incarnation: int = 1) -> int:
        """The pid of an agent whose parent has ended."""
        argv = [sys.executable, "-m", "launcher.agent", "--endpoint", self.server.url]
        argv += ["--host", host, "--incarnation", str(incarnation), "--address", "127.0.0.1"]
        argv += ["--token-file", str(self.token_file)]
        env = {**os.environ, contract.JOB_MARK: str(self.token_file)}
        shell = ["setsid", "sh", "-c", '"$@" </dev/null & :', "sh", *argv]
        subprocess.run(shell, cwd=ROOT, env=env, check=True)
        ready = eventually(
            lambda: next((e for e in self.told(AgentReady) if e.host == host), None), 30.0
        )
        return ready.pid


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Orphans]:
    driver = Orphans(tmp_path)
    yield driver
    driver.close()


@pytest.fixture
def backend(driver: Orphans) -> Iterator[LocalBackend]:
    backend = LocalBackend(driver.server.url, driver.token_file)
    yield backend
    backend.close(0)


def with_mark(driver: Driver) -> list[psutil.Process]:
    """The live processes of this machine that were started with the job's variable."""
    return processes_with(f"{contract.JOB_MARK}={driver.token_file}")


def test_the_end_of_an_adopted_agent_is_told_once_and_nothing_of_it_is_left(
    driver: Orphans, backend: LocalBackend
) -> None:
    driver.python(DAEMON, env={"STAY": "1"})
    agent = driver.leave_agent()
    reasons: list[str] = []
    worker = driver.wait(WorkerStarted, driver.start_worker()).pid
    path = driver.folder / "daemon"
    daemon = int(eventually(lambda: path.exists() and path.read_text()))
    backend.adopt("localhost", 1, agent, reasons.append)
    os.kill(agent, signal.SIGKILL)
    eventually(lambda: reasons, 5)
    assert reasons == ["the agent on localhost has ended"]
    assert not is_running(worker)
    assert not is_running(daemon)


def test_the_death_of_an_adopted_agent_leaves_other_hosts_alone(
    driver: Orphans, backend: LocalBackend
) -> None:
    driver.python(WAIT)
    reasons: list[str] = []
    backend.start("localhost", 1, reasons.append)
    worker = driver.wait(WorkerStarted, driver.start_worker()).pid
    agent = driver.leave_agent(OTHER)
    backend.adopt(OTHER, 1, agent, reasons.append)
    backend.kill(OTHER, 1)
    eventually(lambda: reasons, 5)
    assert not is_running(agent)
    assert is_running(worker)


def test_a_process_whose_parent_ends_during_the_look_is_still_below_its_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A helper of another host's worker, whose own parent has just ended, comes to its agent."""
    marks = {contract.JOB_MARK: "a-job-of-this-test"}
    script = "sleep 600 <&- >&- & echo $!; read end"
    become_subreaper()
    with subprocess.Popen(
        ["sh", "-c", script], env=marks, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        helper = int(parent.stdout.readline())
        look = psutil.Process.ppid

        def ppid(process: psutil.Process) -> int:
            found = look(process)
            if process.pid == helper and parent.poll() is None:
                parent.kill()
                parent.wait()
            return found

        monkeypatch.setattr(psutil.Process, "ppid", ppid)
        asyncio.run(end_marked(marks, lambda: {os.getpid()}, 0.0))
        try:
            assert parent.poll() is not None, "it has ended during the look"
            assert is_running(helper)
        finally:
            become_subreaper(False)
            os.kill(helper, signal.SIGKILL)
            os.waitpid(helper, 0)


def test_an_agent_that_does_not_answer_is_killed_also_if_it_was_never_adopted(
    driver: Orphans, backend: LocalBackend
) -> None:
    driver.python(STUBBORN)
    agent = driver.leave_agent()
    worker = driver.wait(WorkerStarted, driver.start_worker()).pid
    os.kill(agent, signal.SIGSTOP)
    backend.kill("localhost", 2)  # another one
    backend.kill("localhost", 1)
    eventually(lambda: not is_running(agent), 5)
    eventually(lambda: not is_running(worker), 5)


def test_a_process_that_has_the_agents_number_by_chance_is_left_alone(
    driver: Orphans, backend: LocalBackend
) -> None:
    reasons: list[str] = []
    with subprocess.Popen(["sleep", "600"]) as bystander:
        backend.adopt("localhost", 1, bystander.pid, reasons.append)
        backend.adopt("localhost", 2, 2**22 + 1, reasons.append)  # beyond the kernel's numbers
        backend.kill("localhost", 1)
        backend.close(0)
        assert is_running(bystander.pid)
        bystander.kill()
    assert reasons == []


def test_close_waits_for_adopted_agents_and_kills_the_rest(driver: Orphans) -> None:
    backend = LocalBackend(driver.server.url, driver.token_file)
    driver.python(STUBBORN)
    agents = [driver.leave_agent(), driver.leave_agent(OTHER)]
    driver.wait(WorkerStarted, driver.start_worker())
    for host, pid in zip(("localhost", OTHER), agents, strict=True):
        backend.adopt(host, 1, pid, lambda _reason: None)
    assert len(with_mark(driver)) >= 3
    driver.shutdown()  # for the first agent, whose worker does not stop
    began = time.monotonic()
    backend.close(0.5)
    assert 0.5 <= time.monotonic() - began < 5
    assert with_mark(driver) == []


def test_close_ends_an_agent_that_never_reported_to_this_driver(driver: Orphans) -> None:
    backend = LocalBackend(driver.server.url, driver.token_file)
    driver.python(WAIT)
    agents = [driver.leave_agent(), driver.leave_agent(OTHER)]
    backend.adopt("localhost", 1, agents[0], lambda _reason: None)
    backend.close(0)
    eventually(lambda: not with_mark(driver), 5)


def test_with_agents_of_several_hosts_it_imports_before_one_of_them_is_lost(
    driver: Orphans, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "CALM_S", 0.1)
    driver.python(WAIT, preload=("json",))
    for host in ("localhost", OTHER):
        backend.adopt(host, 1, driver.leave_agent(host), lambda _reason: None)
    warm = eventually(lambda: [pid for pid in children() if "script.py" in command(pid)], 30)
    backend.start(OTHER, 2, lambda _reason: None)
    newer = eventually(
        lambda: next((e.pid for e in driver.told(AgentReady) if e.incarnation == 2), 0), 30
    )
    assert "ELASTIC_BORN_WARM" in psutil.Process(newer).environ()
    assert is_running(warm[0])


def test_a_host_of_an_adopted_agent_gets_a_new_one_that_stays(
    driver: Orphans, backend: LocalBackend
) -> None:
    driver.python(WAIT)
    agent = driver.leave_agent()
    reasons: list[str] = []
    backend.adopt("localhost", 1, agent, reasons.append)
    backend.start("localhost", 2, reasons.append)
    newer = eventually(
        lambda: next((e.pid for e in driver.told(AgentReady) if e.incarnation == 2), 0), 30
    )
    backend.kill("localhost", 1)
    eventually(lambda: reasons, 5)
    assert not is_running(agent)
    assert is_running(newer)


@pytest.mark.parametrize("error", [psutil.NoSuchProcess(1), psutil.AccessDenied(1)])
def test_a_process_that_may_not_be_looked_at_is_not_adopted_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, error: psutil.Error
) -> None:
    def refuse(_process: psutil.Process) -> bool:
        raise error

    closed: list[int] = []
    opened: list[int] = []
    pidfd_open, close = os.pidfd_open, os.close

    def note_open(pid: int) -> int:
        opened.append(pidfd_open(pid))
        return opened[-1]

    def note_close(descriptor: int) -> None:
        closed.append(descriptor)
        close(descriptor)

    monkeypatch.setattr(adopted, "is_of_this_user", refuse)
    monkeypatch.setattr(os, "pidfd_open", note_open)
    monkeypatch.setattr(os, "close", note_close)
    assert AdoptedProcess.open(os.getpid(), {}) is None
    assert len(opened) == 1
    assert opened[0] in closed


@pytest.mark.skipif(os.geteuid() != 0, reason="a process of another user needs root")
def test_a_process_of_another_user_with_the_job_s_variables_is_not_the_job_s(
    tmp_path: Path,
) -> None:
    """Root may read the variables of all users' processes."""
    run_dir = RunDir(tmp_path, "run")
    marks = {contract.JOB_MARK: str(run_dir.token_file)}
    for user, counts in ((None, True), (65534, False)):
        argv = ["/bin/sh", "-c", "sleep 60; :", "-m", "launcher.agent", "--host", "h"]
        argv += ["--incarnation", "1"]
        with subprocess.Popen(argv, env=marks, user=user) as process:
            eventually(lambda p=process: "launcher.agent" in psutil.Process(p.pid).cmdline())
            found = AdoptedProcess.open(process.pid, marks)
            try:
                assert (found is not None) is counts
                assert find_agent("h", 1, marks) == (process.pid if counts else 0)
                assert agents_here(run_dir) == ([process.pid] if counts else [])
            finally:
                if found is not None:
                    found.close()
                process.kill()
