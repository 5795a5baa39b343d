"""Several hosts on one machine: who imports what workers need, and that nobody depends on it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from elastic_driver import contract
from elastic_driver.core.events import AgentReady, WorkerExited, WorkerStarted
from elastic_driver.core.messages import StartWorkerOrder, encode
from launcher.agent.processes.descendants import children, variables
from launcher.agent.told import WHEN_TOLD
from launcher.backends import shared_parent
from launcher.backends.local import LocalBackend
from rendezvous.wire import Set
from tests.launcher.agent.harness import ROOT, Driver, eventually, lives, place
from tests.launcher.agent.test_agent import WAIT

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
            found = [pid for pid in children() if WHEN_TOLD in command(pid) and lives(pid)]
            agents = {event.pid for event in self.told(AgentReady)}
            return next((pid for pid in found if pid not in agents), 0)

        return eventually(look, what="a spare agent")

    def shared_parent(self) -> int:
        """The pid of the process that imports for all."""

        def look() -> int:
            found = [pid for pid in children() if "script.py" in command(pid) and lives(pid)]
            return found[0] if found else 0

        return eventually(look, what="a shared parent")


def command(pid: int) -> str:
    """What a process runs, a word apart; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    before = frozenset(children())
    machine = Machine(tmp_path)
    yield machine
    machine.backend.close(0)
    machine.close()
    eventually(lambda: not [pid for pid in children() if pid not in before and lives(pid)])


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
    own, other = variables(first), variables(second)
    assert other.pop("ELASTIC_BORN_WARM").count(",") == 4
    assert own == other
    eventually(lambda: kinds_of_files(first) == kinds_of_files(second), what="the same open files")
    assert signals(first) == signals(second)


def kinds_of_files(pid: int) -> list[str]:
    """What a process has open, but for numbers and for where the warm parent's words are kept."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            links.append(os.readlink(fd))
    kinds = [re.sub(r"\[\d+\]|elastic-mp-\w+", "", link) for link in links]
    return sorted(re.sub(r"/memfd:.*|/.*/#\d+ .*", "log", kind) for kind in kinds)


def signals(pid: int) -> list[str]:
    """Which signals a process blocks, ignores and catches."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return [line for line in lines if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]


# ---- the spare -------------------------------------------------------------------------------


def test_where_hosts_may_come_the_next_is_the_spare_and_another_is_forked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_parent, "CALM_S", 0.1)
    machine.expect_more()
    machine.publish_job(LOOK)
    machine.up(HOSTS[0])
    for host in HOSTS[1:]:
        spare = machine.spare()
        assert machine.up(host) == [spare]
        assert machine.seen(machine.work(host))[:2] == (spare, True)
    assert machine.spare()
    assert len(machine.importers) == 1
    assert machine.lost == {}


def test_hosts_that_come_together_do_not_wait_for_a_spare(machine: Machine) -> None:
    machine.expect_more()
    machine.publish_job()
    machine.up(HOSTS[0])
    spare = machine.spare()
    assert machine.up(*HOSTS[1:])[0] == spare
    assert machine.lost == {}


def test_a_spare_that_was_told_is_an_agent_like_any_other(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.expect_more()
    machine.publish_job()
    (first,) = machine.up(HOSTS[0])
    machine.spare()
    (second,) = machine.up(HOSTS[1])
    assert os.getsid(second) == os.getpgid(second) == second
    eventually(lambda: kinds_of_files(first) == kinds_of_files(second), what="the same open files")
    assert signals(first) == signals(second)
    worker = machine.wait(WorkerStarted, machine.work(HOSTS[1])).pid
    os.kill(second, signal.SIGKILL)
    eventually(lambda: machine.lost)
    assert machine.lost == {HOSTS[1]: f"the agent on {HOSTS[1]} was killed by SIGKILL"}
    assert not lives(worker)
    assert lives(first)


def test_a_spare_that_has_died_costs_no_host_anything(machine: Machine) -> None:
    machine.expect_more()
    machine.publish_job(LOOK)
    machine.up(HOSTS[0])
    spare = machine.spare()
    os.kill(spare, signal.SIGKILL)
    eventually(lambda: not lives(spare))
    (second,) = machine.up(HOSTS[1])
    assert machine.seen(machine.work(HOSTS[1]))[:2] == (second, True)
    assert machine.lost == {}


def test_the_spare_outlives_an_agent_and_not_the_backend(machine: Machine) -> None:
    machine.expect_more()
    machine.publish_job()
    (first,) = machine.up(HOSTS[0])
    spare = machine.spare()
    os.kill(first, signal.SIGKILL)
    eventually(lambda: machine.lost)
    assert machine.up(HOSTS[0], incarnation=2) == [spare]
    spare = machine.spare()
    machine.backend.close(0)
    assert not lives(spare)


# ---- when it cannot be had -----------------------------------------------------------------


def test_when_the_shared_parent_is_killed_agents_go_on_and_the_next_but_one_is_forked(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    machine.publish_job(LOOK)
    machine.up(*HOSTS[:2])
    os.kill(machine.shared_parent(), signal.SIGKILL)
    third = machine.up(HOSTS[2])[0]
    assert machine.seen(machine.work(HOSTS[2]))[:2] == (third, True)
    assert len(machine.importers) == 3
    machine.up(HOSTS[2], incarnation=2)
    machine.up(HOSTS[2], incarnation=3)
    assert machine.seen(machine.work(HOSTS[2], 3)).warm
    assert len(machine.importers) == 4, "another process imports for all that come now"
    assert machine.seen(machine.work(HOSTS[1])).warm
    assert machine.lost == {}
    assert capfd.readouterr().err.count("an agent on this machine imports for itself") == 1


def test_one_that_dies_again_and_again_is_not_started_for_ever(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shared_parent, "MOST_LAUNCHES", 2)
    machine.publish_job()
    machine.up(*HOSTS[:2])
    for incarnation in (2, 4):
        os.kill(machine.shared_parent(), signal.SIGKILL)
        machine.up(HOSTS[1], incarnation=incarnation)  # for itself
        machine.up(HOSTS[1], incarnation=incarnation + 1)
    said = capfd.readouterr().err
    assert said.count("an agent on this machine imports for itself") == 1
    assert said.count("agents on this machine import for themselves from now on") == 1
    assert machine.lost == {}


def test_when_it_is_killed_while_it_imports_those_who_wait_are_executed(machine: Machine) -> None:
    machine.publish_job()
    (machine.folder / "counted.py").write_text("import time\ntime.sleep(600)\n")
    machine.start(*HOSTS)
    os.kill(machine.shared_parent(), signal.SIGKILL)
    machine.wait_for(*HOSTS)
    assert machine.lost == {}


def test_one_that_is_stopped_is_given_up_within_the_deadline(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    machine.publish_job()
    machine.up(*HOSTS[:2])
    monkeypatch.setattr(shared_parent, "ANSWER_S", 0.3)
    os.kill(machine.shared_parent(), signal.SIGSTOP)
    machine.up(HOSTS[2])
    assert "does not answer (nothing in 0.3 s)" in capfd.readouterr().err
    assert machine.lost == {}


def test_a_bug_of_ours_costs_nobody_an_agent(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(shared_parent, "plan_for", broken)
    machine.publish_job()
    machine.up(*HOSTS)
    assert capfd.readouterr().err.count("a bug of ours: RuntimeError('broken')") == 1


def test_closing_does_not_wait_for_one_that_is_stopped(machine: Machine) -> None:
    machine.publish_job()
    machine.up(*HOSTS[:2])
    shared = machine.shared_parent()
    os.kill(shared, signal.SIGSTOP)
    machine.start(HOSTS[2])
    began = time.monotonic()
    machine.backend.close(0)
    assert time.monotonic() - began < 2.0
    assert not psutil.pid_exists(shared)


def test_an_import_that_cannot_be_forked_leaves_every_agent_to_itself(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    machine.publish_job(LOOK)
    (machine.folder / "counted.py").write_text("import os\nheld = os.pipe()\n")
    machine.up(*HOSTS[:2])
    assert not machine.seen(machine.work(HOSTS[1])).warm
    said = capfd.readouterr().err
    assert "agent on 127.0.0.2: no warm workers: importing counted opened a pipe" in said
    assert "import for themselves" not in said


def test_a_job_without_warm_workers_has_no_shared_parent(machine: Machine) -> None:
    machine.publish_job(LOOK, warm=0)
    machine.up(*HOSTS)
    assert not machine.seen(machine.work(HOSTS[1])).warm
    assert not machine.counts.exists()


def test_an_agent_with_another_plan_does_not_use_what_it_was_born_with(machine: Machine) -> None:
    machine.publish_job(LOOK)
    machine.up(*HOSTS[:2])
    machine.publish_job(LOOK, env={"EARLY": "1"})
    third = machine.up(HOSTS[2])[0]
    seen = machine.seen(machine.work(HOSTS[2]))
    assert seen[:2] == (third, True)
    assert "EARLY" in seen.variables
    assert len(machine.importers) == 3
    families = {psutil.Process(pid).ppid() for pid in machine.importers if lives(pid)}
    assert third in families


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
    assert not lives(worker)


def test_one_that_is_no_longer_wanted_is_never_born(machine: Machine) -> None:
    machine.publish_job()
    gate = machine.folder / "go"
    wait = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    (machine.folder / "counted.py").write_text(wait)
    machine.start(*HOSTS)
    machine.backend.kill(HOSTS[1], 1)
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
from launcher.backends import shared_parent
from launcher.backends.local import LocalBackend
shared_parent.CALM_S = 0.1
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
        driver = psutil.Process(process.pid)

        def everybody() -> list[int]:
            pids = [child.pid for child in driver.children(recursive=True)]
            mine = [pid for pid in pids if "script.py" in command(pid)]
            waiting = [pid for pid in pids if WHEN_TOLD in command(pid)]
            ready = len(mine) >= 2 if moment == "imports" else len(mine) >= 5 and waiting
            return pids if ready else []

        try:
            pids = eventually(everybody, 30.0)
        finally:
            process.kill()
    eventually(lambda: not any(map(lives, pids)))
    eventually(lambda: not machine.token_file.exists() and not machine.endpoint_file.exists())
