"""A job's link to the Brain: grants come in order, and a Brain that is away stops nothing.

What the Brain hears of a job: no slot counts as free while a process may live there.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator

import msgspec
import pytest
from msgspec.structs import replace

from elastic_driver.brain.grants import MOST_WORKERS, Grant, JobOver, JobReport, Kind, grant_key
from elastic_driver.errors import UsageError
from elastic_driver.features.stragglers.machine import Stragglers
from elastic_driver.job.events import HostsGranted, HostStarved
from elastic_driver.runtime import brain_link
from elastic_driver.runtime.brain_link import BrainLink, BrainReports
from elastic_driver.words import wire_events as ev
from rendezvous.client import RendezvousClient
from rendezvous.wire import Set
from tests.job.conftest import scenario
from tests.job.scenario import MakeScenario, Scenario
from tests.support.brain import PlayedBrain, played_brain, token_of
from tests.support.job import eventually

__all__ = ["scenario"]


FIRST = JobReport(began=5.0, least=1, kind=Kind(name="j", command=""))


def is_like(report: JobReport, other: JobReport) -> bool:
    """Whether a report is another one, with the address of a liveness port."""
    return bool(report.liveness) and replace(report, liveness="") == other


@contextlib.contextmanager
def linked(
    url: str, said: list[str] | None = None, token: str | None = None
) -> Iterator[BrainLink]:
    token = token_of("j") if token is None else token
    say = [].append if said is None else said.append
    link = BrainLink(RendezvousClient(url, token, 1.0), "j", say)
    try:
        yield link
    finally:
        link.end(None)


def taken(link: BrainLink) -> queue.Queue[Grant]:
    grants: queue.Queue[Grant] = queue.Queue()
    link.attach(grants.put)
    return grants


def test_a_job_reports_itself_and_gets_its_grants_in_order() -> None:
    with played_brain() as brain, linked(brain.url) as link:
        grants = taken(link)
        link.update(FIRST)
        brain.until(lambda report: is_like(report, FIRST), "the first report")
        assert brain.reports[0][0] == "j", "the token names the job"
        brain.grant("j", 3, a=2)
        assert grants.get(timeout=10) == Grant(number=3, hosts={"a": 2}, reason="a test says so")
        brain.grant("j", 2, a=1)
        brain.grant("j", 4, b=1)
        assert grants.get(timeout=10).number == 4, "an older one is not handed over"


def test_a_grant_for_an_earlier_run_of_the_job_is_not_used() -> None:
    with played_brain() as brain, linked(brain.url) as link:
        former = Grant(began=4.0, number=7, hosts={"a": 2}, reason="it is still running there")
        brain.server.apply([Set(grant_key("j"), msgspec.json.encode(former))])
        grants = taken(link)
        link.update(FIRST)
        brain.until(lambda report: is_like(report, FIRST), "the first report")
        own = Grant(began=FIRST.began, number=8, hosts={"b": 1}, reason="a test says so")
        brain.server.apply([Set(grant_key("j"), msgspec.json.encode(own))])
        assert grants.get(timeout=10) == own


def test_the_order_of_the_hosts_is_the_brains() -> None:
    with played_brain() as brain, linked(brain.url) as link:
        grants = taken(link)
        link.update(FIRST)
        brain.grant("j", 1, z=1, a=2, m=1)
        assert list(grants.get(timeout=10).hosts) == ["z", "a", "m"]


def test_a_report_that_says_anything_new_goes_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brain_link, "REPORT_S", 60.0)
    with played_brain() as brain, linked(brain.url) as link:
        link.update(FIRST)
        brain.until(lambda report: is_like(report, FIRST), "the first report")
        news = JobReport(began=5.0, least=1, kind=FIRST.kind, holding={"a": 1})
        link.update(news)
        brain.until(lambda report: is_like(report, news), "a report before it is time for one")


def test_the_first_grant_with_hosts_ends_the_wait_and_reasons_are_told() -> None:
    said: list[str] = []
    with played_brain() as brain, linked(brain.url, said) as link:
        link.update(FIRST)
        brain.grant("j", 1, "two jobs were there before")
        assert link.first_grant(1.0) is None
        assert said == ["the job waits for slots of the Brain: two jobs were there before"]
        brain.grant("j", 2, a=1)
        grant = link.first_grant(10.0)
        assert grant is not None
        assert grant.number == 2


def test_a_brain_that_goes_and_comes_back_is_told_of_once_each_and_grants_go_on() -> None:
    said: list[str] = []
    with contextlib.ExitStack() as stack:
        brain = stack.enter_context(played_brain())
        port = brain.server.port
        link = stack.enter_context(linked(brain.url, said))
        grants = taken(link)
        link.update(FIRST)
        brain.grant("j", 1, a=1)
        assert grants.get(timeout=10).number == 1
        brain.server.stop()
        eventually(lambda: said, within=20, what="a line that it is away")
        assert not link.answers
        again = stack.enter_context(played_brain(port, first_revision=0))
        again.grant("j", 1, a=1)
        again.until(lambda report: is_like(report, FIRST), "reports again")
        eventually(lambda: len(said) == 2, within=20, what="a line that it is back")
        again.grant("j", 2, a=2)
        assert grants.get(timeout=10).number == 2, "the first one is not handed over again"
    assert "is away; the job keeps its slots, and does not grow until it is back (" in said[0]
    assert "rendezvous" not in said[0], "a word of ours, not of the user's"
    assert said[1].endswith("is back")


def test_a_wrong_token_ends_the_wait_with_one_line() -> None:
    with played_brain() as brain, linked(brain.url, token=token_of("other")) as link:
        link.update(FIRST)
        with pytest.raises(UsageError, match="refused the token"):
            link.first_grant(10.0)


def test_a_brain_that_is_not_there_gives_no_grant_and_holds_nobody_up() -> None:
    with played_brain() as brain:
        url = brain.url
    with linked(url) as link:
        began = time.monotonic()
        link.update(FIRST)
        assert time.monotonic() - began < 0.5
        assert link.first_grant(0.5) is None
        assert not link.answers


def test_the_brain_is_told_that_a_job_is_over_after_the_last_report() -> None:
    with played_brain() as brain, linked(brain.url) as link:
        link.update(FIRST)
        brain.until(lambda report: is_like(report, FIRST), "the first report")
        link.end(JobOver(began=5.0, exit_code=3))
        assert brain.over == [("j", JobOver(began=5.0, exit_code=3))]
        before = len(brain.reports)
        link.update(JobReport(began=6.0, least=1, kind=FIRST.kind))
        assert len(brain.reports) == before


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
    s.job.inventory.record_equipment("a", 8, 2**50)
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
