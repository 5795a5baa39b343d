"""Where hosts may come, one more agent waits to be told its host."""

from __future__ import annotations

import os
import signal

import pytest

from elastic_driver.words.wire_events import WorkerStarted
from launcher.backends import local
from tests.launcher.agent.harness import eventually
from tests.launcher.backends.machine import HOSTS, LOOK, Machine, kinds_of_files, signals
from tests.support.processes import is_running


def test_where_hosts_may_come_the_next_is_the_spare_and_another_is_forked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "CALM_S", 0.1)
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
    assert not is_running(worker)
    assert is_running(first)


def test_a_spare_that_has_died_costs_no_host_anything(machine: Machine) -> None:
    machine.expect_more()
    machine.publish_job(LOOK)
    machine.up(HOSTS[0])
    spare = machine.spare()
    os.kill(spare, signal.SIGKILL)
    eventually(lambda: not is_running(spare))
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
    assert not is_running(spare)
