"""Several hosts on one machine: one process imports for all, and ends with the job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from elastic_driver.words.wire_events import AgentReady, WorkerStarted
from launcher.agent.command_line import SPARE_FLAG
from launcher.agent.processes import children
from launcher.backends.local import LocalBackend
from tests.launcher.agent.harness import ROOT, eventually
from tests.launcher.backends.machine import HOSTS, LOOK, Machine, command, kinds_of_files, signals
from tests.support.processes import descendants, is_running


def test_three_hosts_that_come_one_by_one_import_twice_and_all_their_workers_are_warm(
    machine: Machine,
) -> None:
    machine.publish_job(LOOK)
    agents = machine.up(*HOSTS)
    for agent, host in zip(agents, HOSTS, strict=True):
        seen = machine.seen(machine.work(host))
        assert (seen.parent, seen.warm) == (agent, True)
        assert "BORN_WARM" not in seen.variables
        assert "WARM" not in seen.variables
    assert len(machine.importers) == 2
    assert machine.lost == {}


def test_hosts_that_are_known_beforehand_import_once(machine: Machine) -> None:
    machine.backend = LocalBackend(machine.server.url, machine.token_file, several=True)
    machine.publish_job(LOOK)
    agents = machine.up(*HOSTS)
    for agent, host in zip(agents, HOSTS, strict=True):
        assert machine.seen(machine.work(host))[:2] == (agent, True)
    assert len(machine.importers) == 1


def test_a_single_host_has_no_shared_parent_however_often_it_comes_back(machine: Machine) -> None:
    machine.publish_job()
    machine.up(HOSTS[0])
    machine.backend.kill(HOSTS[0], 1)
    (agent,) = machine.up(HOSTS[0], incarnation=2)
    assert [pid for pid in children() if "script.py" in command(pid)] == []
    assert psutil.Process(agent).ppid() == os.getpid()


def test_agents_that_are_started_again_import_no_more(machine: Machine) -> None:
    machine.publish_job(LOOK)
    machine.up(*HOSTS[:2])
    for host in HOSTS[:2]:
        assert machine.seen(machine.work(host)).warm
    imports = machine.importers
    for host in HOSTS[:2]:
        machine.backend.kill(host, 1)
        (agent,) = machine.up(host, incarnation=2)
        assert machine.seen(machine.work(host, 2))[:2] == (agent, True)
    assert machine.importers == imports


def test_an_agent_born_this_way_is_one_like_any_other(machine: Machine) -> None:
    machine.publish_job()
    first, second = machine.up(*HOSTS[:2])
    assert psutil.Process(second).ppid() == os.getpid()
    assert os.getsid(second) == os.getpgid(second) == second
    words = command(first).replace("localhost", HOSTS[1]).replace("127.0.0.1 --l", "127.0.0.2 --l")
    assert command(second) == words
    assert os.readlink(f"/proc/{second}/cwd") == os.readlink(f"/proc/{first}/cwd")
    own, other = psutil.Process(first).environ(), psutil.Process(second).environ()
    assert other.pop("ELASTIC_BORN_WARM").count(",") == 4
    stdin = [env.pop("ELASTIC_WORKER_STDIN") for env in (own, other)]  # descriptors of their own
    assert own == other
    files = [
        os.readlink(f"/proc/{agent}/fd/{fd}")
        for agent, fd in zip((first, second), stdin, strict=True)
    ]
    assert files[0] == files[1]
    eventually(lambda: kinds_of_files(first) == kinds_of_files(second), what="the same open files")
    assert signals(first) == signals(second)


# ---- ends ------------------------------------------------------------------------------------


def test_an_agent_that_is_killed_takes_its_warm_parent_along_to_the_last_zombie(
    machine: Machine,
) -> None:
    machine.publish_job()
    _, second = machine.up(*HOSTS[:2])
    worker = machine.wait(WorkerStarted, machine.work(HOSTS[1])).pid
    family = {child.pid for child in psutil.Process(second).children(recursive=True)} - {worker}
    assert family
    os.kill(second, signal.SIGKILL)
    eventually(lambda: machine.lost)
    assert machine.lost == {HOSTS[1]: f"the agent on {HOSTS[1]} was killed by SIGKILL"}
    assert not {second, *family} & set(psutil.pids())
    assert not is_running(worker)


def test_one_that_is_no_longer_wanted_is_never_born(machine: Machine) -> None:
    machine.publish_job()
    gate = machine.folder / "go"
    wait = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    (machine.folder / "counted.py").write_text(wait)
    machine.start(*HOSTS)
    machine.backend.kill(HOSTS[1], 1)
    eventually(lambda: machine.lost)
    assert "no longer wanted" in machine.lost[HOSTS[1]]
    gate.touch()
    machine.wait_for(HOSTS[0], HOSTS[2])
    assert [event.host for event in machine.told(AgentReady) if event.host == HOSTS[1]] == []


def test_closing_while_it_imports_ends_it_at_once_and_frees_everything(machine: Machine) -> None:
    me = psutil.Process()
    before = me.num_fds(), threading.active_count()
    machine.publish_job()
    (machine.folder / "counted.py").write_text("import time\ntime.sleep(600)\n")
    machine.start(*HOSTS)
    shared = machine.shared_parent()
    began = time.monotonic()
    machine.backend.close(0)
    assert time.monotonic() - began < 2.0
    assert not psutil.pid_exists(shared)
    assert machine.lost == {}
    eventually(lambda: me.num_fds() <= before[0])
    assert threading.active_count() == before[1]


SCRIPT = """
import sys, pathlib, time
from launcher.backends import local
from launcher.backends.local import LocalBackend
local.CALM_S = 0.1
backend = LocalBackend(sys.argv[1], pathlib.Path(sys.argv[2]), grows=sys.argv[3] == "works")
for host in "localhost", "127.0.0.2", "127.0.0.3":
    backend.start(host, 1, print)
time.sleep(600)
"""


@pytest.mark.parametrize("moment", ["imports", "works"])
def test_when_the_drivers_process_is_killed_everything_goes_with_it(
    machine: Machine, moment: str
) -> None:
    machine.publish_job()
    if moment == "imports":
        (machine.folder / "counted.py").write_text("import time\ntime.sleep(600)\n")
    argv = [sys.executable, "-c", SCRIPT, machine.server.url, str(machine.token_file), moment]
    with subprocess.Popen(argv, cwd=ROOT) as process:

        def everybody() -> list[int]:
            pids = [child.pid for child in descendants(process.pid)]
            mine = [pid for pid in pids if "script.py" in command(pid)]
            waiting = [pid for pid in pids if SPARE_FLAG in command(pid)]
            ready = len(mine) >= 2 if moment == "imports" else len(mine) >= 5 and waiting
            return pids if ready else []

        try:
            pids = eventually(everybody, 30.0)
        finally:
            process.kill()
    eventually(lambda: not any(map(is_running, pids)))
    eventually(lambda: not machine.token_file.exists() and not machine.endpoint_file.exists())
