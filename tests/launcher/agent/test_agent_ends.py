"""How an agent ends: told to, by a signal, without its driver, or before it began."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from elastic_driver.words.wire_events import WorkerExited, WorkerStarted
from launcher.agent.lifetime import ORPHAN_GRACE_S
from tests.launcher.agent.harness import (
    DAEMON,
    STUBBORN,
    WAIT,
    Driver,
    agent_of,
    eventually,
)
from tests.support.processes import is_running


def test_shutdown_reports_every_end_and_leaves_nothing(driver: Driver) -> None:
    driver.python(STUBBORN)
    with agent_of(driver) as agent:
        workers = [driver.start_worker(rank, 2) for rank in range(2)]
        eventually(lambda: agent.out.count("up") == 2)
        driver.shutdown(grace=0.3)
        assert agent.wait() == 0
        assert all(driver.told(WorkerExited, worker) for worker in workers)
        assert not any(is_running(e.pid) for e in driver.told(WorkerStarted))


def test_sigterm_stops_the_workers_and_their_daemons_and_reports_them(driver: Driver) -> None:
    driver.python(DAEMON, env={"STAY": "1"})
    with agent_of(driver) as agent:
        worker = driver.start_worker()
        eventually(lambda: "up" in agent.out)
        agent.process.terminate()
        assert agent.wait() == 143
        assert driver.told(WorkerExited, worker)[0].exit_code == -signal.SIGTERM
        assert not is_running(int((driver.folder / "daemon").read_text()))
        assert "got SIGTERM" in agent.err


def test_a_second_signal_leaves_workers_the_time_of_the_first(driver: Driver) -> None:
    driver.python(STUBBORN)
    with agent_of(driver) as agent:
        driver.start_worker()
        eventually(lambda: "up" in agent.out)
        began = time.monotonic()
        agent.process.terminate()
        eventually(lambda: "not yet" in agent.out)
        agent.process.terminate()
        assert agent.wait(15) == 143
        assert time.monotonic() - began >= ORPHAN_GRACE_S


def test_workers_die_with_an_agent_that_is_killed(driver: Driver) -> None:
    driver.python(WAIT)
    with agent_of(driver) as agent:
        pid = driver.wait(WorkerStarted, driver.start_worker()).pid
        eventually(lambda: "up" in agent.out)
        agent.process.kill()
        agent.wait()
        eventually(lambda: not is_running(pid), within=3)


def test_an_agent_whose_driver_does_not_answer_stops_its_workers(driver: Driver) -> None:
    driver.python(WAIT, heartbeat_timeout=1.0)
    with agent_of(driver) as agent:
        pid = driver.wait(WorkerStarted, driver.start_worker()).pid
        eventually(lambda: "up" in agent.out)
        driver.server.stop()
        assert agent.wait(10) == 75
        assert not is_running(pid)
        assert "the driver is gone" in agent.err
        assert driver.token_file.exists()  # not told to own it


def test_an_agent_notices_its_lifeline_closing_and_removes_the_drivers_files(
    driver: Driver,
) -> None:
    driver.python(WAIT)
    read, write = os.pipe2(os.O_CLOEXEC)
    newer = driver.folder / "newer"
    newer.write_text("the token of a driver that came after")
    files = [str(p) for p in (driver.token_file, driver.endpoint_file, newer)]
    extra = [word for path in files for word in ("--orphan-file", path)]
    with agent_of(driver, "--lifeline", *extra, stdin=read) as agent:
        os.close(read)
        pid = driver.wait(WorkerStarted, driver.start_worker()).pid
        eventually(lambda: "up" in agent.out)
        os.close(write)
        assert agent.wait(8) == 75
        assert not is_running(pid)
        assert [Path(p).exists() for p in files] == [False, False, True]


@pytest.mark.parametrize("resumable", [False, True])
def test_an_agent_that_has_not_joined_yet_leaves_the_files_to_the_next_driver(
    driver: Driver, resumable: bool
) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)  # the job's specification never comes
    extra = ["--lifeline", "--orphan-file", str(driver.token_file)]
    with agent_of(driver, *extra, *["--resumable"] * resumable, stdin=read) as agent:
        os.close(read)
        os.close(write)
        assert agent.wait(8) == 75
        assert "its pipe to us has closed" in agent.err
        assert driver.token_file.exists() == resumable


def test_a_refused_token_is_one_clear_line(driver: Driver) -> None:
    driver.python(WAIT)
    driver.token_file.write_text("another")
    with agent_of(driver) as agent:
        assert agent.wait() == 75
        assert "cannot join the job" in agent.err
        assert "token" in agent.err
        assert len(agent.err.splitlines()) == 1


def test_a_missing_token_file_and_a_wrong_option_are_usage_errors(driver: Driver) -> None:
    driver.token_file.unlink()
    with agent_of(driver) as agent:
        assert agent.wait() == 64
    with agent_of(driver, "--no-such-option") as agent:
        assert agent.wait() == 64
