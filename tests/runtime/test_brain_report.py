"""What the Brain hears of a job: no slot counts as free while a process may live there."""

from __future__ import annotations

from elastic_driver.brain.grants import MOST_WORKERS, JobReport, Kind
from elastic_driver.features.stragglers.machine import Stragglers
from elastic_driver.job.events import HostsGranted, HostStarved
from elastic_driver.runtime.brain_link import BrainLink
from elastic_driver.runtime.brain_report import BrainReports
from elastic_driver.words import wire_events as ev
from rendezvous.client import RendezvousClient
from tests.job.conftest import scenario
from tests.job.scenario import MakeScenario, Scenario
from tests.support.brain import PlayedBrain, played_brain, token_of

__all__ = ["scenario"]


class Reported:
    """A job of the core that reports to a played Brain."""

    def __init__(self, s: Scenario, brain: PlayedBrain, lives_on: float = 30.0) -> None:
        self.s, self.brain, self.watch = s, brain, Stragglers()
        link = BrainLink(RendezvousClient(brain.url, token_of("j"), 5.0), "j", [].append)
        kind = Kind(name="j", command="")
        self.reports = BrainReports(link=link, began=5.0, weight=2.0, kind=kind, lives_on=lives_on)

    def look(self) -> JobReport:
        """Look at the job a moment later; return the report that arrives."""
        self.s.wait(0.2)
        before = len(self.brain.reports)
        self.reports.look(self.s.job, self.watch, self.s.now)
        self.brain.until(lambda _: len(self.brain.reports) > before, "a report")
        return self.brain.reports[-1][1]


def trained(s: Scenario, **slots: int) -> Scenario:
    s.send(HostsGranted(3, tuple(slots.items()), "a test says so", began=5.0))
    s.ready(*s.starting)
    s.wait(1.0)
    s.step(*s.members)
    return s


def test_a_report_has_the_limits_the_grant_and_the_slots_in_use(scenario: MakeScenario) -> None:
    s = trained(scenario(start_np=1, max_np=4), a=2, b=1)
    with played_brain() as brain:
        job = Reported(s, brain)
        report = job.look()
        assert (report.least, report.most, report.weight, report.held) == (1, 4, 2.0, None)
        assert (report.carried_out, report.holding) == (3, {"a": 2, "b": 1})
        s.send(ev.ScaleRequested(2))
        assert job.look().held == 2
        job.reports.end(None)
        assert brain.over == []


def test_a_report_says_what_a_worker_lacked(scenario: MakeScenario) -> None:
    s = trained(scenario(start_np=1, max_np=4), a=2, b=1)
    with played_brain() as brain:
        job = Reported(s, brain)
        report = job.look()
        assert (report.memory_need, report.room, report.starved) == (0, {}, {})
        s.send(HostStarved("a", 1, "its processors are too few"))
        assert job.look().starved == {"a": 1}
        lacked = ev.OutOfMemory(2 * 2**30, 2**20)
        s.send(ev.WorkerExited(s.members[-1], -9, "", out_of_memory=lacked))
        report = job.look()
        assert (report.memory_need, report.room) == (3 * 2**30, {"b": 0})
        job.reports.end(None)


def test_a_report_says_what_a_user_s_plan_allows(scenario: MakeScenario) -> None:
    s = trained(scenario(start_np=1, max_np=4), a=2, b=1)
    with played_brain() as brain:
        job = Reported(s, brain)
        assert job.look().planned == {}
        s.send(ev.PlanApplied(number=1, slots_per_host=1))
        assert job.look().planned == {"a": 1, "b": 1}
        s.send(ev.ScaleRequested(None))
        assert job.look().planned == {}
        job.reports.end(None)


def test_a_worker_that_needs_next_to_nothing_makes_no_report_that_is_refused(
    scenario: MakeScenario,
) -> None:
    s = trained(scenario(start_np=1, max_np=4), a=2, b=1)
    s.job.limits.record_equipment("a", 8, 2**50)
    with played_brain() as brain:
        job = Reported(s, brain)
        s.send(ev.WorkerExited(s.members[-1], -9, "", out_of_memory=ev.OutOfMemory(2, 2**20)))
        assert job.look().room["a"] == MOST_WORKERS
        job.reports.end(None)


def test_a_worker_that_is_to_leave_holds_its_slot_until_its_process_is_gone(
    scenario: MakeScenario,
) -> None:
    s = trained(scenario(start_np=1), a=2, b=1)
    with played_brain() as brain:
        job = Reported(s, brain)
        s.send(HostsGranted(4, (("a", 2),), "a test says so"))
        report = job.look()
        assert (report.carried_out, report.holding) == (4, {"a": 2, "b": 1})
        s.ready(*s.members, version=5)
        assert job.look().holding == {"a": 2, "b": 1}
        s.obey_stops()
        assert job.look().holding == {"a": 2}
        job.reports.end(0)
        assert [over.exit_code for _, over in brain.over] == [0]


def test_the_workers_of_a_host_that_cannot_be_reached_count_until_they_have_ended(
    scenario: MakeScenario,
) -> None:
    s = trained(scenario(start_np=1), a=1, b=1)
    s.silent.add("b")
    with played_brain() as brain:
        job = Reported(s, brain, lives_on=20.0)
        assert job.look().holding == {"a": 1, "b": 1}
        s.agent_lost("b", "its host is silent", unreachable=True)
        assert job.look().holding["b"] == 1, "the job has written it off, but it may live"
        s.wait(21.0)
        assert "b" not in job.look().holding


def test_no_end_is_told_while_a_process_may_live_on_a_lost_host(scenario: MakeScenario) -> None:
    s = trained(scenario(start_np=1), a=1, b=1)
    s.silent.add("b")
    with played_brain() as brain:
        job = Reported(s, brain)
        job.look()
        s.agent_lost("b", "its host is silent", unreachable=True)
        job.look()
        job.reports.end(0)
        assert brain.over == []
