"""Several hosts on this machine: the driver is killed, hosts change, and the next one goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from elastic_driver.contract import host_of_worker
from launcher.agent.command_line import SPARE_FLAG
from tests.support.job import JOBS, Hosts, RunningJob, elasticrun, eventually
from tests.support.processes import select

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ENV = {"STEPS": "100000", "STEP_MS": "20"}


def kept_ready(job: RunningJob) -> list[psutil.Process]:
    """The driver's processes for hosts that may come: what it imports for them, and a spare."""
    driver, agents = job.process.pid, set(job.agents())
    return [
        process
        for process in select(job.processes(), lambda p: is_spare(p) or p.ppid() == driver)
        if process.pid not in agents
    ]


def is_spare(process: psutil.Process) -> bool:
    return SPARE_FLAG in process.cmdline()


def hosts_of(job: RunningJob) -> set[str]:
    newest = max(record.round for record in job.steps())
    return {host_of_worker(r.worker) for r in job.steps() if r.round == newest}


def test_hosts_that_came_and_went_without_a_driver_are_seen_by_the_next_one(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost:1", "127.0.0.2:1")
    script = ("--host-discovery-script", str(hosts.script), "--discovery-interval", "0.2")
    args = (*script, "--min-np", "1", "--max-np", "3", "--heartbeat-timeout", "6")
    with elasticrun(*args, "--", str(JOBS / "train.py"), env=ENV) as job:
        job.until_size(2, 90)
        job.until(lambda: select(kept_ready(job), is_spare), "a spare")
        ready = kept_ready(job)
        job.kill_driver()
        eventually(
            lambda: not any(process.is_running() for process in ready),
            within=10,
            what="what the driver kept ready has ended with it",
        )
        assert len(job.live()) == 2
        hosts.set("localhost:1", "127.0.0.3:1")
        job.start("--resume")
        job.until(lambda: hosts_of(job) == {"localhost", "127.0.0.3"}, "the hosts of now train", 90)
        assert not job.events("agent_lost")
        before = max(record.round for record in job.steps())
        agent = next(e["pid"] for e in job.events("agent_started") if e["host"] == "localhost")
        os.kill(agent, signal.SIGKILL)
        job.until(lambda: job.events("agent_lost"), "the adopted agent is lost")
        job.until(lambda: max(r.round for r in job.steps()) > before, "another round")
        job.until_size(2, 90)
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130
        job.assert_nothing_left()
