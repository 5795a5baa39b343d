"""Scripts that never speak to us: every change restarts them all with new ranks."""

from __future__ import annotations

from elastic_driver.job.decisions import StopAgent
from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario


def _declared(s: Scenario, **hosts: int) -> Scenario:
    """A plain job whose first round was announced."""
    s.hosts(**hosts)
    s.wait(s.job.settings.plain_after)
    assert s.round == (1, "complete")
    return s


def test_a_script_that_says_nothing_is_a_plain_one_after_a_while(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, plain_after=5.0)
    s.hosts(a=2)
    (told,) = s.announced("processes_started")
    assert told.what.facts() == {"size": 2, "hosts": 1}
    assert s.job.status(s.now).kind == "undeclared"
    assert s.job.status(s.now).reason == "the script may still call elastic.init()"
    s.wait(4.9)
    assert len(s.announced("processes_started")) == 1
    assert s.job.status(s.now).kind == "undeclared"
    s.wait(0.1)
    assert s.job.status(s.now).kind == "plain"
    assert s.members == ["a.0.1", "a.1.1"]
    assert s.announced("round_completed")[0].what.facts()["told"], "people know it already"


def test_a_late_ready_still_makes_the_job_elastic_in_the_same_world(
    scenario: MakeScenario,
) -> None:
    s = _declared(scenario(start_np=2), a=2)
    for worker in s.members:
        s.send(ev.WorkerReady(worker, 0, -1, True, "slow imports"))
    assert s.job.status(s.now).kind == "elastic"
    assert s.round == (1, "complete")  # it finds the world that is published already
    s.step(*s.members)
    s.exit("a.0.1", -9)
    s.ready("a.1.1", version=4)
    assert s.members == ["a.1.1"]


def test_a_killed_worker_restarts_all_with_a_fresh_port_and_a_raised_count(
    scenario: MakeScenario,
) -> None:
    s = _declared(scenario(start_np=2, settle=1.0), a=2)
    s.exit("a.1.1", -9)
    assert s.in_state("stopping") == ["a.0.1"]
    assert s.round == (1, "closing")
    s.exit("a.0.1", -15)
    births = s.orders(msg.StartWorkerOrder)[2:]
    assert [(o.worker, o.round, o.restart_count, o.master_port) for o in births] == [
        ("a.0.2", 2, 1, 5000),
        ("a.1.2", 2, 1, 5000),
    ]
    assert s.round == (2, "complete")


def test_a_kill_is_answered_at_once_but_a_crash_waits_to_see_who_else_crashes(
    scenario: MakeScenario,
) -> None:
    killed = scenario(start_np=2, settle=1.0)
    killed.hosts(a=2)
    killed.exit("a.1.1", -9)
    assert killed.in_state("stopping") == ["a.0.1"]
    crashed = scenario(start_np=2, settle=1.0)
    crashed.hosts(a=2)
    crashed.exit("a.1.1", -11)
    crashed.wait(0.9)
    assert crashed.in_state("stopping") == []
    crashed.wait(0.1)
    assert crashed.in_state("stopping") == ["a.0.1"]


def test_after_half_a_minute_a_kill_is_answered_at_once(scenario: MakeScenario) -> None:
    s = _declared(scenario(start_np=2, settle=1.0), a=2)
    s.wait(30.0)
    s.exit("a.1.1", -9)
    assert s.in_state("stopping") == ["a.0.1"]


def test_the_next_round_waits_for_the_last_old_process(scenario: MakeScenario) -> None:
    s = _declared(scenario(start_np=3, settle=0.0), a=3)
    s.exit("a.0.1", -9)
    s.exit("a.1.1", -15)
    assert s.round == (1, "closing")
    assert s.job.status(s.now).reason == "1 worker has not stopped yet"
    s.exit("a.2.1", -15)
    assert s.round == (2, "complete")


def test_a_process_that_cannot_be_stopped_ends_the_job_with_75(scenario: MakeScenario) -> None:
    s = _declared(scenario(start_np=2, settle=0.0, elastic_timeout=60.0), a=2)
    s.exit("a.0.1", -9)
    s.wait(60.0)
    assert s.end is not None
    assert s.end.exit_code == 75


def test_victims_of_one_failure_do_not_make_it_everybodys(scenario: MakeScenario) -> None:
    s = _declared(scenario(start_np=3), a=3)
    s.exit("a.1.1", 1, victim=True)
    s.exit("a.0.1", 5)
    s.exit("a.2.1", 1, victim=True)
    assert s.end is None
    assert s.round == (2, "complete")


def test_when_all_exit_by_themselves_the_job_has_failed_with_the_first_code(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2)
    s.hosts(a=2)
    s.exit("a.1.1", 7)
    s.exit("a.0.1", 1)
    assert s.end is not None
    assert s.end.exit_code == 7
    failure = s.end.failure
    assert failure is not None
    assert (failure.worker, failure.rank, failure.host, failure.exit_code, failure.log_tail) == (
        "a.1.1",
        1,
        "a",
        7,
        "log of a.1.1",
    )
    assert failure.pid > 0


def test_one_failure_among_the_living_restarts_after_settling(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, settle=1.0)
    s.hosts(a=2)
    s.exit("a.1.1", 7)
    assert s.job.status(s.now).kind == "plain"
    s.wait(1.0)
    s.obey_stops()
    assert s.starting == []
    assert s.members == ["a.0.2", "a.1.2"]


def test_three_fruitless_restarts_are_enough(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, settle=0.1, host_failures=99)
    s.hosts(a=2)
    for incarnation in (1, 2, 3, 4):
        assert s.end is None
        s.exit(f"a.1.{incarnation}", -11)
        s.wait(0.1)
        s.obey_stops()
    assert s.end is not None
    assert s.end.exit_code == 128 + 11
    assert "the limit is 3 restarts" in s.end.reason
    assert "--max-restarts" in s.end.reason


def test_rounds_that_live_half_a_minute_never_use_up_the_budget(scenario: MakeScenario) -> None:
    s = _declared(scenario(start_np=2), a=2)
    for incarnation in range(1, 12):
        s.wait(31.0)
        s.exit(f"a.1.{incarnation}", -9)
        s.obey_stops()
    assert s.end is None
    assert s.round == (12, "complete")


def test_max_restarts_is_a_total(scenario: MakeScenario) -> None:
    s = _declared(scenario(start_np=2, max_restarts=2), a=2)
    for incarnation in (1, 2, 3):
        assert s.end is None
        s.wait(1000.0)
        s.exit(f"a.1.{incarnation}", -9)
        s.obey_stops()
    assert s.end is not None
    assert s.end.reason.endswith(
        "3 failures are more than the limit of 2 restarts; raise --max-restarts"
    )


def test_max_restarts_also_restarts_a_job_that_failed_altogether(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, max_restarts=1)
    s.hosts(a=1)
    s.exit("a.0.1", 3)
    assert s.end is None
    s.exit("a.0.2", 3)
    assert s.end is not None
    assert s.end.exit_code == 3


def test_an_added_host_restarts_all_once_for_all_that_come_together(
    scenario: MakeScenario,
) -> None:
    s = _declared(scenario(start_np=1, last_call=0.5), a=1)
    s.hosts(a=1, b=1)
    s.wait(0.4)
    s.hosts(a=1, b=1, c=1)
    assert s.in_state("stopping") == []
    s.wait(0.1)
    s.obey_stops()
    assert s.members == ["a.0.2", "b.0.1", "c.0.1"]
    assert s.round == (2, "complete")


def test_if_only_some_hosts_fit_a_job_grows_on_those_it_trains_on(scenario: MakeScenario) -> None:
    s = _declared(scenario(start_np=1, max_hosts=1, host_failures=1), a=1, b=1)
    s.exit("a.0.1", -9)
    s.wait(1.0)
    assert s.members == ["b.0.1"], "a is in cool-down"
    s.wait(60.0)
    assert s.members == ["b.0.1"]
    s.hosts(a=1, b=2)
    s.wait(1.0)
    s.obey_stops()
    assert s.members == ["b.0.2", "b.1.1"]


def test_a_removed_host_restarts_the_rest_without_it(scenario: MakeScenario) -> None:
    s = _declared(scenario(start_np=2), a=1, b=1)
    s.hosts(b=1)
    s.wait(1.0)
    s.obey_stops()
    assert s.members == ["b.0.2"]
    assert s.all(StopAgent)[0].host == "a"


def test_a_removed_hosts_worker_that_dies_first_restarts_the_rest(scenario: MakeScenario) -> None:
    s = _declared(scenario(start_np=2, last_call=5.0), a=1, b=1)
    s.hosts(b=1)
    s.exit("a.0.1", -15)
    s.obey_stops()
    assert s.members == ["b.0.2"]
    assert s.job.status(s.now).counters.failures == 0


def test_scaling_down_restarts_with_fewer(scenario: MakeScenario) -> None:
    s = _declared(scenario(start_np=3), a=3)
    s.send(ev.ScaleRequested(2))
    s.wait(1.0)
    s.obey_stops()
    assert s.members == ["a.0.2", "a.1.2"]


def test_a_lost_agent_restarts_all_on_what_is_left_and_again_when_it_is_back(
    scenario: MakeScenario,
) -> None:
    s = _declared(scenario(start_np=2, settle=0.0, last_call=0.5), a=1, b=1)
    s.agents = False
    s.agent_lost("a")
    s.obey_stops()
    s.wait(0.5)
    assert s.members == ["b.0.2"]
    s.agent_up("a", 2)
    s.wait(0.5)
    s.obey_stops()
    assert s.members == ["a.0.2", "b.0.3"]


def test_plain_workers_that_exit_0_are_a_success(scenario: MakeScenario) -> None:
    s = scenario(start_np=2)
    s.hosts(a=2)
    s.exit("a.0.1", 0)
    assert s.end is None
    s.exit("a.1.1", 0)
    assert s.end is not None
    assert s.end.exit_code == 0


def test_the_reset_limit_also_bounds_restarts(scenario: MakeScenario) -> None:
    s = _declared(scenario(start_np=1, reset_limit=0), a=1)
    s.hosts(a=1, b=1)
    s.wait(1.0)
    assert s.end is not None
    assert "reset limit of 0" in s.end.reason


def test_a_job_that_turns_elastic_after_a_loss_goes_on_as_one(scenario: MakeScenario) -> None:
    s = _declared(scenario(start_np=2, settle=5.0), a=2)
    s.exit("a.0.1", 1)
    s.send(ev.WorkerReady("a.1.1", 0, -1, True, "slow imports"))
    assert (s.notice.round, s.notice.after_step) == (1, None)
    s.ready("a.1.1")
    assert s.members == ["a.1.1"]


def test_a_process_that_never_starts_is_not_waited_for_because_others_have_ended(
    scenario: MakeScenario,
) -> None:
    s = scenario(processes=False, start_np=3, start_timeout=60.0)
    s.hosts(a=1, b=1, c=1)
    s.started("a.0.1")
    s.started("b.0.1")
    s.exit("a.0.1", 0)
    s.wait(60.0)
    assert s.end is not None
    assert s.end.reason.startswith("need 3 slots, found 2 after 60 s")


def test_a_host_that_is_lost_after_a_peers_success_ends_a_plain_job(scenario: MakeScenario) -> None:
    s = _declared(scenario(start_np=3), a=1, b=1, c=1)
    s.exit("a.0.1", 0)
    s.agent_lost("b")
    assert s.end is not None
    assert s.end.exit_code == 137
    why = "rank 1 on b was lost with its agent, after another rank had exited 0"
    assert s.end.reason == why


def test_a_rank_that_ends_before_the_others_is_named_and_they_are_not_waited_for_for_ever(
    scenario: MakeScenario,
) -> None:
    s = _declared(
        scenario(start_np=3, grace_period=30.0, finish_timeout=600.0, hang_timeout=60.0), a=3
    )
    s.exit("a.1.1", 0)
    s.wait(31.0)
    (late,) = s.announced("grace_period_passed")
    assert late.reason == (
        "rank 1 on a has ended with 0, and ranks 0, 2 were still running 30 s later; waiting until "
        "--finish-timeout (600 s); --hang-timeout does not watch a script that sends no heartbeats"
    )
    s.wait(560.0)
    assert s.end is None
    s.wait(10.0)
    assert s.end is not None
    assert s.end.exit_code == 1
    assert s.end.reason == (
        "rank 1 on a has ended with 0, and ranks 0, 2 were still running 600 s later; every rank "
        "has to make the same collectives, or raise --finish-timeout"
    )


def test_a_finish_timeout_below_the_grace_period_is_kept(scenario: MakeScenario) -> None:
    s = _declared(scenario(start_np=2, grace_period=30.0, finish_timeout=5.0), a=2)
    s.exit("a.1.1", 0)
    s.wait(4.9)
    assert s.end is None
    s.wait(0.1)
    assert s.end is not None
    assert s.end.exit_code == 1
    assert "rank 0 was still running 5 s later" in s.end.reason


def test_ranks_that_take_their_time_are_waited_for_where_the_user_wants_that(
    scenario: MakeScenario,
) -> None:
    s = _declared(scenario(start_np=2, finish_timeout=0.0), a=2)
    s.exit("a.1.1", 0)
    s.wait(100_000.0)
    assert s.end is None
    s.exit("a.0.1", 0)
    assert s.end is not None
    assert s.end.exit_code == 0


def test_max_restarts_restarts_all_also_when_some_have_finished(scenario: MakeScenario) -> None:
    s = _declared(scenario(start_np=2, max_restarts=1, settle=0.0), a=2)
    s.exit("a.1.1", 0)
    s.exit("a.0.1", 1)
    s.obey_stops()
    s.wait(1.0)
    assert s.end is None
    assert s.members == ["a.0.2", "a.1.2"]
    s.exit("a.1.2", 0)
    assert s.end is None
    s.exit("a.0.2", 1)
    assert s.end is not None
    assert s.end.exit_code == 1
    assert "2 failures are more than the limit of 1 restart" in s.end.reason


def test_a_restarted_job_succeeds_when_its_ranks_do(scenario: MakeScenario) -> None:
    s = _declared(scenario(start_np=2, max_restarts=1, settle=0.0), a=2)
    s.exit("a.1.1", 0)
    s.exit("a.0.1", -11)
    s.obey_stops()
    s.wait(1.0)
    for worker in ("a.0.2", "a.1.2"):
        s.exit(worker, 0)
    assert s.end is not None
    assert s.end.exit_code == 0
