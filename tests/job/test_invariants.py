"""The invariants see what is broken."""

from __future__ import annotations

import pytest

from elastic_driver.job.events import StopRequested
from elastic_driver.job.fleet import AgentNews
from elastic_driver.job.job import Job, NotAtRestError
from elastic_driver.job.rounds import RoundState
from elastic_driver.job.supply import Discovered
from elastic_driver.job.workers import WorkerState
from elastic_driver.settings import Settings
from elastic_driver.words import host_log_events as host_log
from elastic_driver.words import wire_events as ev
from tests.job.broken import BROKEN, Break
from tests.job.scenario import Scenario


def broken(s: Scenario, expected: str) -> None:
    found = s.job.check()
    assert any(expected in sentence for sentence in found), found


def training() -> Scenario:
    return Scenario(start_np=3, max_np=3, reset_limit=5).training(a=2, b=1)


def test_a_job_in_order_violates_nothing() -> None:
    assert training().job.check() == []
    assert Job(Settings()).check() == []


def test_a_worker_filed_wrongly_is_named() -> None:
    s = training()
    s.job.workers.workers["a.0.1"].state = WorkerState.READY
    broken(s, "a.0.1 is filed under running but is ready")


def test_two_processes_in_a_slot_are_named() -> None:
    s = training()
    s.job.workers.workers["a.1.1"].slot = 0
    broken(s, "2 processes share slot 0 of a")


def test_a_worker_without_an_agent_is_named() -> None:
    s = training()
    s.job.fleet.apply(s.job.fleet.agents["b"], AgentNews.LOST)
    broken(s, "b.0.1 has a process but its host has no agent")


def test_somebody_who_trains_in_no_round_is_named() -> None:
    s = training()
    s.job.rounds.current.members = ("a.0.1", "a.1.1")
    broken(s, "['b.0.1'] are running but are no members of round 1")
    s.job.rounds.current.state = RoundState.FORMING
    broken(s, "round 1 is forming but")


def test_ranks_that_repeat_are_named() -> None:
    s = training()
    workers = s.job.workers.workers
    workers["a.1.1"].place = workers["a.0.1"].place
    broken(s, "two members of round 1 have the same rank")


def test_a_waiting_round_without_a_deadline_is_named() -> None:
    s = training()
    s.job.rounds.current.state = RoundState.CLOSING
    broken(s, "round 1 is closing without a deadline")


def test_too_many_rounds_are_named() -> None:
    s = training()
    s.job.rounds.current.number = 9
    broken(s, "round 9 exceeds the reset limit of 5")


# ---- rules that are broken on purpose ----------------------------------------------------


def play_it_all() -> None:
    """A loss, a host in cool-down, fewer and more workers, and the end."""
    s = Scenario(start_np=3, min_np=2, max_np=3, host_failures=1).training(a=2, b=1)
    s.now += 60.0
    s.exit("b.0.1", 1)
    s.ready("a.0.1", "a.1.1", version=7)
    s.hosts(a=2, b=1, c=2)
    s.exit("a.1.1", -9)
    s.ready("a.0.1", version=8)
    s.wait(1.0)
    s.ready(*s.starting)
    s.wait(1.0)
    s.send(ev.ScaleRequested(2))
    s.wait(1.0)
    s.ready(*s.in_state("running"), version=9)
    assert len(s.members) == 2
    s.send(StopRequested("it is over", 0))


def test_a_job_of_which_nothing_is_broken_is_in_order() -> None:
    play_it_all()


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_rule_is_named(break_it: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match=BROKEN[break_it]):
        play_it_all()


def test_rules_that_do_not_come_to_rest_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def restless(self: Discovered, _now: float) -> tuple[()]:
        self.effects.announce(host_log.HostDiscovered(), "again and again")
        return ()

    monkeypatch.setattr(Discovered, "advance", restless)
    with pytest.raises(NotAtRestError, match=r"64 passes these rules still move: \['discovered'\]"):
        training()
