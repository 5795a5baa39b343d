"""Hosts that are not reachable are probed and come back at once; cool-down is for misbehaviour.

Pairs of hosts that do not reach each other are named; a job that never begins ends.
"""

from __future__ import annotations

import pytest

from elastic_driver.job.decisions import ProbeHosts, StartAgent
from elastic_driver.job.events import AgentLost, HostProbed, HostsDiscovered, Tick
from elastic_driver.job.job import Job
from elastic_driver.settings import Settings
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario

TWO = {"start_np": 2, "max_np": 2}


def probes(job: Scenario, host: str) -> int:
    return sum(host in decision.hosts for decision in job.all(ProbeHosts))


def answer(job: Scenario, host: str, *, answered: bool = True) -> None:
    job.send(HostProbed(host, job.all(ProbeHosts)[-1].number, answered))


def started(job: Scenario, host: str) -> list[int]:
    return [d.incarnation for d in job.all(StartAgent) if d.host == host]


@pytest.fixture
def without_b(scenario: MakeScenario) -> Scenario:
    """A job on two hosts that has lost one of them; the others' round is formed."""
    job: Scenario = scenario(**TWO).training(a=1, b=1)
    job.silent.add("b")
    job.agent_lost("b", "silent for 1.5 s", unreachable=True)
    job.ready("a.0.1", version=3)
    return job


def test_a_host_that_is_gone_is_probed_at_once_and_not_in_cool_down(without_b: Scenario) -> None:
    assert probes(without_b, "b") == 1
    assert without_b.announced("host_blacklisted") == []
    assert without_b.announced("host_unreachable")[0].host == "b"
    status = next(h for h in without_b.job.status(without_b.now).hosts if h.host == "b")
    assert status.state == "unreachable"
    assert status.reason.endswith("silent for 1.5 s")


def test_it_is_used_as_soon_as_it_answers_however_long_it_was_away(without_b: Scenario) -> None:
    without_b.wait(600.0)
    assert started(without_b, "b") == [1]
    assert 300 <= probes(without_b, "b") <= 420  # twice a second at first, then ever more seldom
    answer(without_b, "b")
    assert started(without_b, "b") == [1, 2]
    assert "600.0 s" in without_b.announced("host_resurrected")[0].reason
    assert without_b.starting == ["b.0.2"]
    assert not without_b.job.hosts.is_lost("b")


def test_a_host_that_is_not_needed_any_more_is_usable_but_gets_no_agent(
    without_b: Scenario,
) -> None:
    without_b.send(ev.ScaleRequested(1))
    answer(without_b, "b")
    assert started(without_b, "b") == [1]
    assert without_b.job.hosts.is_usable("b")


def test_a_late_answer_to_a_probe_of_an_earlier_absence_is_stale(without_b: Scenario) -> None:
    old = without_b.all(ProbeHosts)[-1].number
    without_b.agents = False
    answer(without_b, "b")
    without_b.agent_lost("b", "ssh: connection refused", unreachable=True)
    without_b.send(HostProbed("b", old, answered=True))
    assert started(without_b, "b") == [1, 2]
    assert not without_b.job.hosts.is_usable("b")


def test_starts_that_fail_are_tried_again_after_a_growing_pause(scenario: MakeScenario) -> None:
    job = scenario(agents=False, start_timeout=1000.0)
    job.hosts(a=1)
    pauses = []
    for _ in range(6):
        asked = job.now
        job.agent_lost("a", "ssh: no route to host", unreachable=True)
        while job.job.hosts.is_usable("a") is False:
            job.now = max(job.now, job.job.deadline() or job.now)
            job.send(Tick())
        pauses.append(job.now - asked)
    assert pauses == pytest.approx([0.5, 1.0, 2.0, 3.0, 3.0, 3.0])
    assert job.announced("host_blacklisted") == []
    assert len(job.announced("host_unreachable")) == 1
    assert len(job.announced("agent_lost")) == 1


def test_an_agent_that_is_lost_again_and_again_is_started_after_a_growing_pause(
    scenario: MakeScenario,
) -> None:
    job, pauses = scenario(**TWO, max_restarts=100).training(a=1, b=1), []
    for _ in range(6):
        job.wait(3.5)
        asked, before = job.now, len(started(job, "b"))
        job.agent_lost("b", "its host says that it is gone", unreachable=True)
        while len(started(job, "b")) == before:
            assert job.end is None
            job.now = max(job.now, job.job.deadline() or job.now)
            job.send(Tick())
        pauses.append(job.now - asked)
    assert pauses == pytest.approx([0.0, 0.5, 1.0, 2.0, 3.0, 3.0])
    job.wait(20.0)
    job.agent_lost("b", "power", unreachable=True)
    assert job.job.fleet.is_ready("b")


def test_where_no_probe_is_possible_the_start_is_tried(without_b: Scenario) -> None:
    answer(without_b, "b", answered=False)
    assert started(without_b, "b") == [1, 2]
    assert without_b.announced("host_resurrected") == []


def test_a_host_that_discovery_removes_is_probed_no_more(without_b: Scenario) -> None:
    without_b.hosts(a=1)
    before = len(without_b.all(ProbeHosts))
    without_b.wait(10.0)
    assert len(without_b.all(ProbeHosts)) == before
    without_b.hosts(a=1, b=1)
    assert started(without_b, "b") == [1, 2]


def test_hundreds_of_hosts_are_probed_in_turn_and_not_too_often() -> None:
    job, now, asked = Job(Settings()), 100.0, list[ProbeHosts]()
    names = [f"h{n}" for n in range(500)]
    job.handle(HostsDiscovered(tuple((name, 1) for name in names)), now)
    for name in names:
        job.handle(AgentLost(name, 1, "silent", unreachable=True), now)
    while now < 113.0:
        now = max(now, job.deadline() or now)
        decided = job.handle(Tick(), now)
        asked += [d for d in decided if isinstance(d, ProbeHosts) and now > 103.0]
    assert len(asked) <= 10.0 / 0.05  # events of the driver
    assert 330 <= sum(len(d.hosts) for d in asked) / 10.0 <= 460
    assert max(len(d.hosts) for d in asked) < 250
    assert {host for d in asked for host in d.hosts} == set(names)


def test_hosts_are_in_turn_only_when_many_are_lost(without_b: Scenario) -> None:
    before = probes(without_b, "b")
    without_b.wait(0.5)
    assert probes(without_b, "b") == before + 1


# ---- hosts that the job cannot do without ------------------------------------------------------


def living(job: Scenario) -> list[str]:
    return job.starting + job.in_state("running")


def fail_plain(job: Scenario, code: int = -9) -> float:
    """A plain job's only worker ends; seconds until its successor is started."""
    ended = job.now
    (worker,) = living(job)
    job.exit(worker, code)
    while not living(job):
        at = job.job.deadline()
        assert job.end is None, job.end
        assert at is not None
        job.now = max(job.now, at)
        job.send(Tick())
    return job.now - ended


def test_a_plain_script_on_the_only_host_restarts_at_once_when_killed_thrice(
    scenario: MakeScenario,
) -> None:
    job = scenario(start_np=1, max_np=1, max_restarts=100)
    job.hosts(a=1)
    waits = []
    for _ in range(3):
        job.wait(15.0)
        waits.append(fail_plain(job))
    assert waits == [0.0, 0.0, 0.0]
    assert job.announced("host_blacklisted") == []


def test_restarts_that_fail_fast_wait_longer_up_to_the_first_cool_down(
    scenario: MakeScenario,
) -> None:
    job = scenario(start_np=1, max_np=1, max_restarts=100, blacklist_cooldown=(6.0, 600.0))
    job.hosts(a=1)
    waits = []
    for _ in range(9):
        job.wait(1.5)
        waits.append(fail_plain(job))
    assert waits == pytest.approx([0.0, 0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 6.0, 6.0])


def test_eight_workers_that_die_together_are_one_failure_of_the_only_host(
    scenario: MakeScenario,
) -> None:
    job = scenario(start_np=8, max_np=8, max_restarts=100)
    job.hosts(a=8)
    job.wait(12.0)
    for worker in job.members:
        job.exit(worker, -9)
    job.wait(2.0)
    assert len(living(job)) == 8


def test_a_failing_host_is_in_cool_down_while_the_others_can_do_the_work(
    scenario: MakeScenario,
) -> None:
    job = scenario(start_np=2, min_np=1, max_np=2, host_failures=1).training(a=1, b=1)
    job.exit("b.0.1", 1)
    assert len(job.announced("host_blacklisted")) == 1
    job.ready("a.0.1", version=2)
    assert job.members == ["a.0.1"]


def test_a_cool_down_ends_early_when_the_job_cannot_do_without_the_host(
    scenario: MakeScenario,
) -> None:
    job = scenario(start_np=2, min_np=1, max_np=2, host_failures=1).training(a=1, b=1)
    job.exit("b.0.1", 1)
    job.ready("a.0.1", version=2)
    job.silent.add("a")
    job.agent_lost("a", "power", unreachable=True)
    (back,) = job.announced("host_resurrected")
    assert back.host == "b"
    assert job.starting == ["b.0.2"]


def test_a_host_that_failed_a_check_is_not_called_back(scenario: MakeScenario) -> None:
    job = scenario(start_np=1, checked_hosts=("a", "b"), fixed_hosts=True)
    job.hosts(a=1, b=1)
    host = job.job.hosts.known["b"]
    job.job.hosts.record_failed_check(host, job.now, "slow")
    job.silent.add("a")
    job.agent_lost("a", "power", unreachable=True)
    assert job.announced("host_resurrected") == []


def test_the_status_says_when_no_host_is_left_and_which_is_the_first_to_come_back(
    scenario: MakeScenario,
) -> None:
    job = scenario(start_np=2, min_np=1, agents=False, blacklist_cooldown=(40.0, 600.0))
    job.hosts(a=1, b=1, c=1)
    job.silent |= {"a", "c"}
    job.agent_lost("b", "no Python there")
    job.agent_lost("a", "ssh: timed out", unreachable=True)
    job.wait(10.0)
    assert "all " not in job.job.status(job.now).reason
    job.job.hosts.record_failed_check(job.job.hosts.known["b"], job.now, "broken")
    job.agent_lost("c", "ssh: timed out", unreachable=True)
    reason = job.job.status(job.now).reason
    assert "each host is in cool-down or unreachable; b is back in " in reason
    assert reason.endswith("2 are probed, and used again as soon as they answer")


def test_that_it_is_still_away_is_said_ever_more_seldom_and_never_twice_the_same(
    without_b: Scenario,
) -> None:
    without_b.wait(600.0)
    told = [event.reason for event in without_b.announced("host_still_away")]
    gone = [float(reason.split()[2]) for reason in told]
    assert gone == pytest.approx([30.0, 60.0, 120.0, 240.0, 480.0], abs=3.0)
    assert len(set(told)) == len(told)
    assert all(reason.endswith("silent for 1.5 s") for reason in told)


PAIR = {"start_np": 2, "max_np": 2, "start_timeout": 60.0}


def formed(scenario: MakeScenario) -> Scenario:
    """A world of two hosts, in which nobody has finished a step."""
    job: Scenario = scenario(**PAIR).training(steps=0, a=1, b=1)
    assert not job.job.outcome.has_progress
    return job


def unanswered(job: Scenario, host: str, other: str, seconds: float = 5.0) -> None:
    address = job.job.fleet.agents[other].address
    incarnation = job.job.fleet.agents[host].incarnation
    job.send(ev.ConnectionUnanswered(host, incarnation, f"{host}.0.1", address, 29410, seconds))


def test_a_pair_is_named_once_with_its_direction_and_port(scenario: MakeScenario) -> None:
    job = formed(scenario)
    for seconds in (5.0, 15.0):
        unanswered(job, "a", "b", seconds)
    (told,) = job.announced("connection_unanswered")
    assert told.host == "a"
    assert "a gets no answer from b (" in told.reason
    assert "TCP port 29410" in told.reason
    unanswered(job, "b", "a")
    assert len(job.announced("connection_unanswered")) == 2


def test_a_server_that_is_no_host_of_the_job_is_nobody_s_business(scenario: MakeScenario) -> None:
    job = formed(scenario)
    job.send(ev.ConnectionUnanswered("a", 1, "a.0.1", "192.0.2.7", 5432, 9.0))
    assert job.announced("connection_unanswered") == []


def test_a_job_that_never_begins_for_it_ends_after_the_start_timeout(
    scenario: MakeScenario,
) -> None:
    job = formed(scenario)
    unanswered(job, "a", "b")
    job.wait(59.0)
    unanswered(job, "a", "b", 64.0)
    assert job.end is None
    job.wait(2.0)
    unanswered(job, "a", "b", 66.0)
    assert job.end is not None
    assert job.end.exit_code == 75
    assert "a gets no answer from b" in job.job.ending.end.reason


def test_a_job_that_trains_goes_on(scenario: MakeScenario) -> None:
    job = formed(scenario)
    unanswered(job, "a", "b")
    job.step("a.0.1")
    job.wait(100.0)
    unanswered(job, "a", "b", 105.0)
    assert job.end is None
