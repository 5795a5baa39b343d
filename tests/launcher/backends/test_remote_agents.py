"""The ssh backend with real agents; its ssh is a stand-in that runs the commands on this machine.

What runs "on the host" survives that ssh's death, as with a real sshd. The real one is used in
tests/cluster, which needs root.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_driver.runtime.backend import BackendJob, UnreachableReason
from elastic_driver.token_roles import agent_token
from elastic_driver.words.wire_events import AgentReady, HostLeaving, WorkerExited, WorkerStarted
from launcher.agent import folders, remote
from launcher.backends.remote_agents import RemoteBackend, _first_of
from launcher.backends.shells import SshShell
from rendezvous.auth import read_token_file
from tests.launcher.agent.harness import (
    DAEMON,
    HOST,
    ROOT,
    STUBBORN,
    TOKEN,
    WAIT,
    Driver,
    eventually,
)
from tests.support.processes import is_running, read_words, select

SSH = """#!/bin/sh
TMPDIR={tmp}; export TMPDIR
test ! -e {tmp}/unreachable || {{ echo 'ssh: connect: Connection timed out' >&2; exit 255; }}
echo a banner; echo 'Warning: known hosts' >&2
while [ "$1" != -- ]; do shift; done
trap 'echo "Connection to $2 closed by remote host." >&2; exit 255' HUP
exec 3<&0
setsid -w sh -c "$3" <&3 3<&- &
exec 3<&-
wait $!
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    yield driver
    driver.close()


@pytest.fixture
def tmp(tmp_path: Path) -> Path:
    """The folder for temporary files on the host."""
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


@pytest.fixture
def backend(driver: Driver, tmp: Path) -> Iterator[RemoteBackend]:
    program = tmp.parent / "ssh"
    program.write_text(SSH.format(tmp=tmp))
    program.chmod(0o755)
    job = BackendJob(endpoint=driver.server.url, token_file=driver.token_file)
    backend = RemoteBackend(job, SshShell(program=str(program), home=ROOT))
    yield backend
    backend.close(0)


def keeper_and_agent(driver: Driver) -> tuple[psutil.Process, psutil.Process]:
    agent = psutil.Process(driver.wait(AgentReady, within=20).pid)
    keeper = agent.parent()
    assert keeper is not None
    return keeper, agent


def ssh_clients() -> list[psutil.Process]:
    return select(psutil.Process().children(), lambda process: process.name() == "ssh")


def test_an_agent_comes_up_its_output_arrives_and_its_end_is_told_once(
    driver: Driver, backend: RemoteBackend, tmp: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    driver.python("print('hello')")
    reasons: list[str] = []
    backend.start(HOST, 1, reasons.append)
    driver.start_worker()
    driver.wait(WorkerExited, within=20)
    driver.shutdown()
    eventually(lambda: reasons)
    backend.close(0)
    assert reasons == [f"the agent on {HOST} has ended"]
    assert list(tmp.iterdir()) == []
    said = capfd.readouterr()
    assert said.out == "[0]<stdout>:hello\n", "and neither a banner nor our own marks"
    assert "Warning" not in said.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_notice_to_the_agent_s_keeper_reaches_the_driver(
    driver: Driver, backend: RemoteBackend, number: signal.Signals
) -> None:
    driver.python(WAIT, grace_period=20.0)
    backend.start(HOST, 1, lambda _reason: None)
    keeper, _ = keeper_and_agent(driver)
    keeper.send_signal(number)
    assert number.name in driver.wait(HostLeaving).reason


def test_the_token_stands_in_a_private_file_and_in_no_argument_or_variable(
    driver: Driver, backend: RemoteBackend, tmp: Path
) -> None:
    driver.python(WAIT)
    backend.start(HOST, 1, lambda _reason: None)
    keeper, agent = keeper_and_agent(driver)
    (folder,) = tmp.glob(f"{remote.FOLDER_PREFIX}*")  # beside the agent's folder for sockets
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    assert read_token_file(folder / "token") == agent_token(TOKEN, HOST)
    for process in (keeper, agent, *ssh_clients()):
        shown = str([read_words(process.pid, name) for name in ("cmdline", "environ")])
        assert TOKEN not in shown
        assert "agent:" not in shown


def test_the_agent_survives_its_ssh_connection_and_its_end_is_told_all_the_same(
    driver: Driver, backend: RemoteBackend, tmp: Path
) -> None:
    driver.python(WAIT)
    reasons: list[str] = []
    backend.start(HOST, 1, reasons.append)
    worker = driver.wait(WorkerStarted, driver.start_worker(), within=20).pid
    _, agent = keeper_and_agent(driver)
    (client,) = ssh_clients()
    os.kill(client.pid, signal.SIGHUP)
    eventually(lambda: client.pid not in {p.pid for p in ssh_clients()})
    assert is_running(agent.pid)
    assert is_running(worker)
    driver.shutdown()
    eventually(lambda: reasons)
    assert not is_running(agent.pid)
    eventually(lambda: list(tmp.iterdir()) == [])


def test_a_wait_for_an_agent_that_is_given_up_leaves_no_task() -> None:
    async def given_up() -> set[asyncio.Task[Any]]:
        ended = asyncio.create_task(asyncio.sleep(60, 0))
        waiting = asyncio.create_task(_first_of(ended, asyncio.Event()))
        await asyncio.sleep(0)
        for task in (waiting, ended):
            task.cancel()
        await asyncio.wait((waiting, ended))
        left = asyncio.all_tasks() - {asyncio.current_task()}
        return (await asyncio.wait(left, timeout=1.0))[1] if left else left

    assert asyncio.run(given_up()) == set()


def test_a_killed_agent_takes_its_workers_and_their_daemons_along(
    driver: Driver, backend: RemoteBackend, tmp: Path
) -> None:
    driver.python(DAEMON, env={"STAY": "1"})
    reasons: list[str] = []
    backend.start(HOST, 1, reasons.append)
    worker = driver.wait(WorkerStarted, driver.start_worker(), within=20).pid
    path = driver.folder / "daemon"
    daemon = int(eventually(lambda: path.exists() and path.read_text()))
    _, agent = keeper_and_agent(driver)
    agent.kill()
    eventually(lambda: reasons)
    assert reasons == [f"the agent on {HOST} was killed by SIGKILL"]
    assert not is_running(worker)
    assert not is_running(daemon)
    assert list(tmp.iterdir()) == []


def test_an_agent_whose_keeper_is_killed_ends_and_leaves_no_token(
    driver: Driver, backend: RemoteBackend, tmp: Path
) -> None:
    driver.python(WAIT)
    reasons: list[str] = []
    backend.start(HOST, 1, reasons.append)
    worker = driver.wait(WorkerStarted, driver.start_worker(), within=20).pid
    keeper, agent = keeper_and_agent(driver)
    keeper.kill()
    eventually(lambda: reasons)
    eventually(lambda: not is_running(agent.pid) and not is_running(worker))
    assert not list(tmp.glob("*/token"))


def test_an_agent_that_hangs_can_be_killed(
    driver: Driver, backend: RemoteBackend, tmp: Path
) -> None:
    driver.python(STUBBORN)
    reasons: list[str] = []
    backend.kill(HOST, 1)
    backend.start(HOST, 1, reasons.append)
    worker = driver.wait(WorkerStarted, driver.start_worker(), within=20).pid
    _, agent = keeper_and_agent(driver)
    agent.suspend()
    backend.kill(HOST, 1)
    eventually(lambda: reasons)
    assert len(reasons) == 1
    assert reasons[0].startswith(f"the agent on {HOST} was killed")
    assert not is_running(worker)
    assert list(tmp.iterdir()) == []


def test_a_host_that_cannot_be_reached_any_more_is_given_up_once(
    driver: Driver, backend: RemoteBackend, tmp: Path
) -> None:
    driver.python(WAIT, heartbeat_timeout=2.0)
    reasons: list[str] = []
    backend.start(HOST, 1, reasons.append)
    _, agent = keeper_and_agent(driver)
    (tmp / "unreachable").touch()
    backend.kill(HOST, 1)
    eventually(lambda: reasons)
    assert len(reasons) == 1
    assert "ends by itself" in reasons[0]
    driver.close()
    eventually(lambda: not is_running(agent.pid), within=15, what="the agent has ended by itself")


def test_an_agent_that_a_bug_lets_nobody_kill_is_told_and_close_goes_on(
    driver: Driver, backend: RemoteBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise ValueError("a word that nobody expected")

    driver.python(WAIT, heartbeat_timeout=2.0)
    reasons: list[str] = []
    backend.start(HOST, 1, reasons.append)
    _, agent = keeper_and_agent(driver)
    monkeypatch.setattr(RemoteBackend, "_run", broken)
    backend.kill(HOST, 1)
    eventually(lambda: reasons)
    assert len(reasons) == 1
    assert "(a bug): ValueError('a word that nobody expected'), which ends by itself" in reasons[0]
    backend.kill("-oProxyCommand=x", 1)  # fails, too, and holds up nothing
    backend.close(0)
    driver.close()
    eventually(lambda: not is_running(agent.pid), within=15, what="the agent has ended by itself")


def test_what_cannot_be_started_is_told_with_what_to_try(
    driver: Driver, backend: RemoteBackend, tmp: Path
) -> None:
    (tmp / "unreachable").touch()
    reasons: list[str] = []
    backend.start(HOST, 1, reasons.append)
    backend.start("-oProxyCommand=x", 1, reasons.append)
    eventually(lambda: len(reasons) == 2)
    assert any("did not answer in time" in reason for reason in reasons)
    assert any("is not a host name" in reason for reason in reasons)


def test_close_ends_what_runs_and_leaves_no_thread_or_descriptor(
    driver: Driver, backend: RemoteBackend, tmp: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    me = psutil.Process()
    before = me.num_fds(), {t.name for t in threading.enumerate()}
    driver.python(WAIT)
    backend.start(HOST, 1, lambda _reason: None)
    worker = driver.wait(WorkerStarted, driver.start_worker(), within=20).pid
    keeper, agent = keeper_and_agent(driver)
    backend.close(0.1)
    backend.close(0.1)
    assert not any(is_running(pid) for pid in (worker, keeper.pid, agent.pid))
    assert list(tmp.iterdir()) == []
    eventually(lambda: me.num_fds() <= before[0])
    eventually(lambda: {t.name for t in threading.enumerate()} == before[1])


def test_folders_of_keepers_that_died_with_their_machine_are_removed_by_the_next_one(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote.tempfile, "tempdir", str(tmp))
    dead = remote.folder_of("dead")
    dead.mkdir()
    (dead / "keeper").write_text("1")
    beginning = remote.folder_of("beginning")
    beginning.mkdir()
    (tmp / "somebody-elses").mkdir()
    argv = [sys.executable, "-m", "launcher.agent.remote", "keep", "live", "--endpoint"]
    argv += ["http://127.0.0.1:1", "--host", "h", "--incarnation", "1"]
    with subprocess.Popen(
        argv,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        keeper.stdin.write(b"token\n")
        keeper.stdin.close()
        assert keeper.stdout.readline() == b"elastic-agent-up live 0\n"
        live = remote.folder_of("live")
        assert folders.holder_of(live) == keeper.pid
        folders.sweep(remote.FOLDER_PREFIX)
        assert sorted(tmp.iterdir()) == sorted([beginning, live, tmp / "somebody-elses"])
        assert remote.end("live") == 0
    assert not live.exists()


def test_an_agent_kept_apart_outlives_the_rank_that_started_it(tmp: Path) -> None:
    argv = [sys.executable, "-m", "launcher.agent.remote", "apart", "rank", "--endpoint"]
    argv += ["http://127.0.0.1:1", "--host", "h", "--incarnation", "1"]
    env = {**os.environ, "TMPDIR": str(tmp), "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
    folder = tmp / "elastic-agent-rank"
    with subprocess.Popen(
        argv, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        rank.stdin.write(b"token\n")
        rank.stdin.close()
        assert rank.stdout.readline() == b"elastic-agent-up rank 0\n"
        rank.kill()
        rank.wait()
        keeper = folders.holder_of(folder)
        assert keeper is not None
        assert keeper != rank.pid
        (agent,) = psutil.Process(keeper).children()
        assert not any(name.startswith(("OMPI_", "PMIX_")) for name in agent.environ())
        end = [*argv[:3], "end", "rank"]
        subprocess.run(end, cwd=ROOT, env=env, check=True)
    assert not is_running(agent.pid)
    assert not folder.exists()


def test_only_a_host_that_ssh_cannot_reach_is_said_to_be_unreachable(
    backend: RemoteBackend, tmp: Path
) -> None:
    reasons: list[str] = []
    (tmp / "unreachable").touch()
    backend.start(HOST, 1, reasons.append)
    eventually(lambda: reasons)
    (tmp / "unreachable").unlink()
    backend.start("no name", 2, reasons.append)
    eventually(lambda: len(reasons) == 2)
    assert [isinstance(reason, UnreachableReason) for reason in reasons] == [True, False]
