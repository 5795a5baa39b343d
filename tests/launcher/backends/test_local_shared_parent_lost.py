"""Nobody depends on the process that imports for all: it dies, hangs, or is never to be had."""

from __future__ import annotations

import time

import psutil
import pytest

from launcher.agent.warm import starter
from launcher.backends import local
from tests.launcher.backends.machine import HOSTS, LOOK, Machine
from tests.support.processes import is_running


def test_when_the_shared_parent_is_killed_agents_go_on_and_the_next_but_one_is_forked(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    machine.publish_job(LOOK)
    machine.up(*HOSTS[:2])
    machine.kill_shared_parent()
    third = machine.up(HOSTS[2])[0]
    assert machine.seen(machine.work(HOSTS[2]))[:2] == (third, True)
    machine.up(HOSTS[2], incarnation=2)
    machine.up(HOSTS[2], incarnation=3)
    assert machine.seen(machine.work(HOSTS[2], 3)).warm
    assert len(machine.importers) == 4, "another process imports for all that come now"
    assert machine.seen(machine.work(HOSTS[1])).warm
    assert machine.lost == {}
    assert capfd.readouterr().err.count("elasticrun: the warm parent is lost: it ended") == 1


def test_one_that_dies_again_and_again_is_not_started_for_ever(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(starter, "MOST_LAUNCHES", 2)
    machine.publish_job()
    machine.up(*HOSTS[:2])
    for incarnation in (2, 4):
        machine.kill_shared_parent()
        machine.up(HOSTS[1], incarnation=incarnation)  # for itself
        machine.up(HOSTS[1], incarnation=incarnation + 1)
    said = capfd.readouterr().err
    assert said.count("elasticrun: the warm parent is lost: it ended") == 1
    assert said.count("elasticrun: no warm workers from now on: it ended") == 1
    assert machine.lost == {}


@pytest.mark.parametrize("launches", [1, 4])
def test_when_it_is_killed_while_it_imports_those_who_wait_are_executed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, launches: int
) -> None:
    monkeypatch.setattr(starter, "MOST_LAUNCHES", launches)
    machine.publish_job()
    (machine.folder / "counted.py").write_text("import time\ntime.sleep(600)\n")
    machine.start(*HOSTS)
    machine.kill_shared_parent()
    machine.wait_for(*HOSTS)
    assert machine.lost == {}


def test_one_that_is_stopped_is_given_up_within_the_deadline(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    machine.publish_job()
    machine.up(*HOSTS[:2])
    monkeypatch.setattr(starter, "START_S", 0.3)
    machine.stop_shared_parent()
    machine.up(HOSTS[2])
    assert "the warm parent is lost: it does not answer: timed out" in capfd.readouterr().err
    assert machine.lost == {}


def test_a_bug_of_ours_costs_nobody_an_agent(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(local, "warm_plan_for", broken)
    machine.publish_job()
    machine.up(*HOSTS)
    said = capfd.readouterr().err
    assert said.count("agents on this machine import for themselves: RuntimeError('broken')") == 1


def test_closing_does_not_wait_for_one_that_is_stopped(machine: Machine) -> None:
    machine.publish_job()
    machine.up(*HOSTS[:2])
    shared = machine.stop_shared_parent()
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
    assert "elasticrun: no warm workers: importing counted opened a pipe" in said


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
    families = {psutil.Process(pid).ppid() for pid in machine.importers if is_running(pid)}
    assert third in families
