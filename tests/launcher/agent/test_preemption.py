"""An agent that is told of its host's end passes it on, and keeps its workers meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from elastic_driver.words.wire_events import HostLeaving, WorkerExited, WorkerStarted
from launcher.agent.processes import ignore_notices
from tests.launcher.agent.harness import Driver, agent_of, eventually
from tests.support.processes import is_running

WAIT = "import time\nprint('up', flush=True)\ntime.sleep(600)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_the_driver_is_told_and_the_agent_stays_until_it_is_let_go(
    driver: Driver, number: signal.Signals
) -> None:
    driver.python(WAIT, grace_period=20.0)
    with agent_of(driver) as agent:
        worker = driver.start_worker()
        pid = driver.wait(WorkerStarted, worker).pid
        eventually(lambda: "up" in agent.out)
        agent.process.send_signal(number)
        notice = driver.wait(HostLeaving)
        assert (notice.incarnation, notice.deadline) == (driver.incarnation, 20.0)
        assert number.name in notice.reason
        assert is_running(pid)
        driver.stop_worker(worker, 2.0)
        driver.wait(WorkerExited, worker)
        assert agent.process.poll() is None
        driver.shutdown()
        assert agent.wait() == 0
        assert f"got {number.name}: leaving this host within 20 s" in agent.err


def test_workers_that_have_not_left_when_the_time_is_over_are_stopped(driver: Driver) -> None:
    driver.python(WAIT, grace_period=1.0)
    with agent_of(driver) as agent:
        worker = driver.start_worker()
        driver.wait(WorkerStarted, worker)
        began = time.monotonic()
        agent.process.terminate()
        assert agent.wait(8) == 143
        assert time.monotonic() - began >= 0.5
        assert driver.told(WorkerExited, worker)[0].exit_code == -signal.SIGTERM
        assert "workers were still here" in agent.err


def test_repeated_announcements_are_about_the_same_leaving(driver: Driver) -> None:
    driver.python(WAIT, grace_period=60.0)
    with agent_of(driver) as agent:
        worker = driver.start_worker()
        pid = driver.wait(WorkerStarted, worker).pid
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2):
            agent.process.send_signal(number)
            driver.wait(HostLeaving)
        # It has handled the last one when it answers to what comes after that.
        driver.stop_worker(worker, 2.0)
        driver.wait(WorkerExited, worker)
        assert agent.process.poll() is None
        assert not is_running(pid)
        driver.shutdown()
        assert agent.wait() == 0
        assert len(driver.told(HostLeaving)) == 1


def test_ctrl_c_is_no_announcement(driver: Driver) -> None:
    driver.python(WAIT, grace_period=60.0)
    with agent_of(driver) as agent:
        driver.wait(WorkerStarted, driver.start_worker())
        agent.process.send_signal(signal.SIGINT)
        assert agent.wait(8) == 130
        assert driver.told(HostLeaving) == []


@pytest.mark.parametrize(("inside", "heard"), [(True, "SIG_IGN"), (False, "SIG_DFL")])
def test_workers_overlook_the_notices_of_a_slurm_step_alone(
    inside: bool, heard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    if inside:
        monkeypatch.setenv("SLURM_STEP_ID", "3")
    show = "import signal as s; print(*(s.getsignal(n).name for n in (s.SIGUSR1, s.SIGUSR2)))"
    argv = [sys.executable, "-c", show]
    done = subprocess.run(
        argv, preexec_fn=ignore_notices, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [heard, heard]
