"""The whole job goes with notice: one common step, the state on disk, and an end that says so."""

from __future__ import annotations

import pytest

from elastic_driver.job.decisions import PublishSave, StartAgent
from elastic_driver.job.events import JobLeaving
from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario


def tell(s: Scenario, deadline: float = 40.0) -> None:
    """The whole job has its notice."""
    s.send(JobLeaving("told by SIGUSR1", deadline))


def tell_hosts(s: Scenario, *hosts: str, deadline: float = 40.0) -> None:
    for host in hosts:
        s.send(ev.HostLeaving(host, 1, deadline, "its agent got SIGUSR1"))


def leave(s: Scenario, version: int) -> None:
    """Every running member arrives at the boundary."""
    s.wait(0.1)
    assert s.notice.after_step is not None
    s.ready(*s.in_state("running"), version=version)


def asked(s: Scenario) -> msg.SaveRequest:
    return s.all(PublishSave)[-1].request


def saved(s: Scenario, folder: str = "/ckpt/step-7", problem: str = "") -> None:
    request = asked(s)
    s.send(ev.WorkerSaved(request.members[0], request.number, folder, problem))


def ended(s: Scenario) -> str:
    """Why the job has ended, as it was told to."""
    assert s.end is not None
    assert s.end.exit_code == 143
    return s.end.reason


# ---- told itself -------------------------------------------------------------------------


def test_all_leave_at_a_boundary_write_the_state_and_the_job_ends(scenario: MakeScenario) -> None:
    s = scenario(start_np=4).training(a=2, b=2)
    tell(s)
    leave(s, version=7)
    request = asked(s)
    assert (request.step, request.members) == (7, ("a.0.1", "a.1.1", "b.0.1", "b.1.1"))
    assert request.seconds == pytest.approx(35.0, abs=0.2)
    assert s.end is None
    saved(s)
    assert ended(s) == (
        "told by SIGUSR1: the state of step 7 is in /ckpt/step-7; "
        "started again, the job goes on from there"
    )
    assert s.announced("job_leaving")
    assert s.announced("state_saved")


def test_without_a_checkpoint_dir_the_end_says_so(scenario: MakeScenario) -> None:
    s = scenario(start_np=1).training(a=1)
    tell(s)
    leave(s, version=7)
    saved(s, folder="")
    assert "step 7 is not on disk: it has no checkpoint_dir" in ended(s)


def test_a_disk_that_fails_is_named(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=2)
    tell(s)
    leave(s, version=7)
    s.send(ev.WorkerSaved("a.1.1", asked(s).number, "", "No space left on device"))
    assert "step 7 is not on disk: No space left on device" in ended(s)


def test_nothing_is_started_any_more_and_a_lost_worker_is_no_failure(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, min_np=1, max_restarts=0, reset_limit=0).training(a=1, b=1)
    tell(s)
    s.hosts(a=1, b=1, c=4)
    s.exit("b.0.1", -9)
    s.agent_lost("b")
    assert s.notice.after_step is None
    s.ready("a.0.1", version=6)
    assert asked(s).members == ("a.0.1",)
    saved(s)
    assert "the state of step 6 is in" in ended(s)
    assert [d.host for d in s.all(StartAgent)] == ["a", "b"]


def test_one_that_is_lost_while_they_write_is_done_without(scenario: MakeScenario) -> None:
    s = scenario(start_np=3).training(a=3)
    tell(s)
    leave(s, version=7)
    first = asked(s)
    s.exit("a.0.1", -9)
    assert asked(s).number == first.number + 1
    assert asked(s).members == ("a.1.1", "a.2.1")
    s.send(ev.WorkerSaved("a.0.1", first.number, "/ckpt/old"))
    assert s.end is None
    saved(s)
    assert "/ckpt/step-7" in ended(s)


def test_only_those_with_the_newest_state_write_it(scenario: MakeScenario) -> None:
    s = scenario(start_np=3).training(a=3)
    tell(s)
    s.wait(0.1)
    s.ready("a.0.1", version=8)
    s.ready("a.1.1", version=7)
    s.ready("a.2.1", version=9, clean=False)
    assert (asked(s).step, asked(s).members) == (8, ("a.0.1",))


def test_a_boundary_that_does_not_come_in_half_of_the_time_is_not_waited_for(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, settle=1.0).training(a=2)
    tell(s, deadline=40.0)  # 35 s for leaving, the rest for ending processes
    s.wait(17.4)
    assert s.notice.after_step is not None
    s.wait(0.1)
    assert s.notice.after_step is None
    s.ready("a.0.1", version=4)
    assert not s.all(PublishSave)
    s.wait(1.1)
    assert [o.worker for o in s.orders(msg.StopWorkerOrder)] == ["a.1.1"]
    assert asked(s).members == ("a.0.1",)


def test_workers_that_never_leave_do_not_hold_the_end_up(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=2)
    tell(s, deadline=40.0)
    s.wait(34.9)
    assert s.end is None
    s.wait(0.2)
    assert "had not left their step in time" in ended(s)


def test_a_disk_that_is_too_slow_does_not_hold_the_end_up(scenario: MakeScenario) -> None:
    s = scenario(start_np=1).training(a=1)
    tell(s, deadline=6.0)  # half of it for leaving
    leave(s, version=7)
    s.wait(3.0)
    assert "step 7 could not be written in time" in ended(s)


def test_before_the_first_step_the_job_just_ends(scenario: MakeScenario) -> None:
    s = scenario(start_np=2)
    s.hosts(a=2)
    s.ready("a.0.1")
    tell(s)
    assert "no worker held a state" in ended(s)


def test_a_job_whose_workers_are_all_gone_ends_at_once(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=1, b=1)
    tell(s)
    for worker in s.members:
        s.exit(worker, -15)
    assert "no worker is left; started again, the job goes on from the newest" in ended(s)


def test_scripts_that_were_over_when_the_signal_came_have_done_their_work(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2).training(a=1, b=1)
    for worker in s.members:
        s.send(ev.WorkerEnding(worker, 1))
    tell(s)
    for worker in s.members:
        s.exit(worker, -15)
    assert s.end is not None
    assert s.end.exit_code == 0


def test_a_plain_script_is_stopped_at_once(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, plain_after=1.0)
    s.hosts(a=1)
    s.wait(2.0)
    tell(s)
    assert ended(s) == "told by SIGUSR1"


def test_a_job_whose_workers_finish_meanwhile_succeeds(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=2)
    tell(s)
    s.exit("a.0.1", 0)
    s.exit("a.1.1", 0)
    assert s.end is not None
    assert s.end.exit_code == 0


def test_a_second_notice_changes_nothing(scenario: MakeScenario) -> None:
    s = scenario(start_np=1).training(a=1)
    tell(s)
    assert s.send(JobLeaving("told by SIGUSR2", 400.0)) == []
    assert "ending already" in s.job.effects.ignored


# ---- all hosts told ----------------------------------------------------------------------


def test_when_every_fixed_host_goes_the_job_ends_as_if_it_was_told(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, fixed_hosts=True).training(a=1, b=1)
    tell_hosts(s, "a")
    assert not s.announced("job_leaving")
    tell_hosts(s, "b")
    leave(s, version=5)
    saved(s)
    assert ended(s).startswith("every host goes away (its agent got SIGUSR1): the state of step 5")


def test_a_host_without_a_notice_keeps_the_job_waiting(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2, fixed_hosts=True).training(a=1, b=1)
    tell_hosts(s, "a")
    s.send(ev.DrainRequested("b", "maintenance"))
    leave(s, version=5)
    saved(s)
    assert s.end is None
    assert not s.in_state("ready")
    s.obey_stops()
    s.send(ev.DrainCancelled("b", "repaired"))
    assert s.starting == ["b.0.2"]


def test_a_drained_host_that_then_gets_a_notice_counts(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, fixed_hosts=True).training(a=1)
    s.send(ev.DrainRequested("a", "maintenance", 1.0))
    tell_hosts(s, "a")
    assert s.announced("job_leaving")


def test_where_other_hosts_may_come_the_state_is_written_and_the_job_waits(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, min_np=1).training(a=1, b=1)
    tell_hosts(s, "a", "b")
    leave(s, version=5)
    assert asked(s).step == 5
    assert not s.orders(msg.StopWorkerOrder)
    saved(s)
    assert {o.worker for o in s.orders(msg.StopWorkerOrder)} == {"a.0.1", "b.0.1"}
    s.obey_stops()
    assert s.end is None
    s.hosts(c=2)
    assert s.starting == ["c.0.1", "c.1.1"]


def test_removed_hosts_write_the_state_too_in_the_grace_period(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, grace_period=8.0).training(a=1)
    s.hosts()
    leave(s, version=5)
    assert asked(s).seconds == 8.0
    s.wait(8.1)
    assert "could not be written in time" in s.announced("state_not_saved")[0].reason


# ---- the last holder of a state ----------------------------------------------------------


def removed(s: Scenario, version: int = 5) -> None:
    """All hosts are gone from discovery, and the state could not be written."""
    s.hosts()
    leave(s, version=version)
    saved(s, folder="")


def test_a_state_that_nobody_else_has_stays_with_its_last_holder(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, elastic_timeout=60.0).training(a=1, b=1)
    removed(s)
    assert [o.worker for o in s.orders(msg.StopWorkerOrder)] == ["b.0.1"]
    s.obey_stops()
    (kept,) = s.announced("state_kept")
    assert (kept.worker, kept.reason) == (
        "a.0.1",
        "it alone holds the state of step 5: it stays until another worker has it, for 60 s at "
        "most",
    )
    s.wait(30.0)
    s.hosts(c=1)
    s.ready(*s.starting)
    assert s.members == ["a.0.1", "c.0.1"]
    assert s.world.members[0].version == 5
    s.step(*s.members, step=6)
    leave(s, version=7)
    assert s.members == ["c.0.1"]
    assert s.in_state("stopping") == ["a.0.1"]


def test_a_last_holder_whose_host_comes_back_trains_on(scenario: MakeScenario) -> None:
    s = scenario(start_np=1).training(a=1)
    removed(s)
    s.hosts(a=1)
    assert s.members == ["a.0.1"]
    assert s.round == (2, "complete")


def test_one_worker_is_two_while_it_hands_the_only_state_over(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, min_np=1, max_np=1).training(a=1)
    removed(s)
    s.hosts(b=1)
    s.ready(*s.starting)
    assert s.members == ["a.0.1", "b.0.1"]
    s.step(*s.members, step=6)
    leave(s, version=7)
    assert s.members == ["b.0.1"]


def test_no_other_worker_in_time_ends_the_job(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, elastic_timeout=60.0).training(a=1)
    removed(s)
    s.wait(61.0)
    assert s.end is not None
    assert s.end.exit_code == 75


def test_a_last_holder_whose_host_goes_away_stays_until_then(scenario: MakeScenario) -> None:
    s = scenario(start_np=1).training(a=1)
    tell_hosts(s, "a", deadline=40.0)
    leave(s, version=5)
    saved(s, folder="")
    s.wait(34.0)
    assert s.in_state("ready") == ["a.0.1"]
    s.wait(1.0)
    assert s.in_state("stopping") == ["a.0.1"]


def test_a_drained_last_holder_stays_too(scenario: MakeScenario) -> None:
    s = scenario(start_np=1).training(a=1)
    s.send(ev.DrainRequested("a", "a test says so"))
    leave(s, version=5)
    saved(s, folder="")
    assert s.in_state("ready") == ["a.0.1"]
    s.hosts(a=1, b=1)
    s.ready(*s.starting)
    assert s.members == ["a.0.1", "b.0.1"]


def test_a_host_that_comes_back_while_they_write_keeps_its_workers(scenario: MakeScenario) -> None:
    s = scenario(start_np=1).training(a=1)
    s.hosts()
    leave(s, version=5)
    s.hosts(a=1)
    assert s.members == ["a.0.1"]
    assert s.round == (2, "complete")
    saved(s)
    assert s.end is None


def test_those_who_leave_do_not_wait_for_an_heir_beyond_half_of_their_notice(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1, min_np=1, max_np=1).training(a=1)
    tell_hosts(s, "a", deadline=40.0)
    s.hosts(a=1, b=1)
    assert s.starting == ["b.0.1"]
    s.wait(19.5)
    assert s.round == (1, "complete")
    s.wait(0.6)
    leave(s, version=9)
    assert asked(s).step == 9


@pytest.mark.parametrize(("most", "members"), [(1, ["b.0.1"]), (2, ["a.0.1", "b.0.1"])])
def test_an_heir_reads_from_disk_what_cannot_be_handed_over(
    scenario: MakeScenario, most: int, members: list[str]
) -> None:
    s = scenario(start_np=1, min_np=1, max_np=most).training(a=1)
    s.hosts(b=1)
    s.wait(700.0)  # whoever takes over is long in coming
    leave(s, version=9)
    assert asked(s).members == ("a.0.1",)
    s.ready("b.0.1")
    if most == 1:  # the world has no room for both
        assert s.round == (2, "forming")
        saved(s)
    assert s.members == members
