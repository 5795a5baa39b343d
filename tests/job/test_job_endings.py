"""When a job has succeeded, when it has failed, and what it then says."""

from __future__ import annotations

import pytest

from elastic_driver.job.decisions import EndJob, StartAgent
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario


def test_the_job_succeeds_when_every_worker_exits_0(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=2)
    s.exit("a.0.1", 0)
    s.exit("a.1.1", 0)
    assert s.all(EndJob) == [EndJob(0, "the workers finished the script")]
    assert len(s.announced("job_succeeded")) == 1


def test_after_a_success_nothing_is_started_any_more(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=3).training(a=3)
    s.exit("a.1.1", 0)
    s.hosts(a=3, b=3)
    s.exit("a.2.1", -9)
    assert s.starting == []
    assert [d.host for d in s.all(StartAgent)] == ["a"]


def test_a_success_stops_those_who_are_still_booting(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, max_np=2).training(a=1)
    s.hosts(a=1, b=1)
    assert s.starting == ["b.0.1"]
    s.exit("a.0.1", 0)
    assert s.end is not None
    assert s.end.exit_code == 0
    assert s.in_state("stopping") == ["b.0.1"]


def test_a_signal_after_a_peers_success_leaves_it_a_success(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=2)
    s.exit("a.0.1", 0)
    s.exit("a.1.1", -9)
    assert s.end is not None
    assert s.end.exit_code == 0


def test_a_non_zero_exit_after_a_peers_success_is_a_failure(scenario: MakeScenario) -> None:
    s = scenario(start_np=3).training(a=3)
    s.exit("a.0.1", 0)
    s.exit("a.1.1", 4)
    assert s.end is None  # the last one still works
    s.exit("a.2.1", 0)
    assert s.end is not None
    assert s.end.exit_code == 4
    assert s.end.reason == "rank 1 on a exited 4, others exited 0"


def test_those_a_success_leaves_behind_finish_together_even_below_min_np(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, min_np=3).training(a=3)
    s.exit("a.0.1", 0)
    s.ready("a.1.1", version=9)
    s.ready("a.2.1", version=9)
    assert s.members == ["a.1.1", "a.2.1"]
    s.exit("a.1.1", 0)
    s.exit("a.2.1", 0)
    assert s.end is not None
    assert s.end.exit_code == 0


def test_the_grace_period_is_announced_once_and_the_rest_is_waited_for(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, grace_period=30.0).training(a=2)
    s.exit("a.0.1", 0)
    s.wait(29.9)
    assert s.announced("grace_period_passed") == []
    s.wait(1000.0)
    assert len(s.announced("grace_period_passed")) == 1
    assert s.end is None
    s.exit("a.1.1", 0)
    assert s.end is not None


def test_a_leavers_exit_0_is_not_the_jobs_success(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=1, b=1)
    s.hosts(a=1)
    s.wait(1.0)
    s.exit("b.0.1", 0)
    assert s.job.outcome.first_success is None
    s.ready("a.0.1", version=3)
    s.hosts(a=1, c=1)
    assert s.starting == ["c.0.1"]


def test_when_the_whole_world_was_told_to_leave_finishing_is_still_success(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1).training(a=1)
    s.hosts()
    s.exit("a.0.1", 0)
    assert s.end is not None
    assert s.end.exit_code == 0


def test_a_newcomer_that_exits_0_before_it_took_part_is_no_success(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1, max_np=2).training(a=1)
    s.hosts(a=1, b=1)
    s.exit("b.0.1", 0)
    assert s.job.outcome.first_success is None
    assert s.starting == ["b.0.2"]


@pytest.mark.parametrize(("code", "status"), [(3, 3), (-9, 137), (-11, 139)])
def test_before_any_step_losing_everybody_fails_the_job_without_restarts(
    scenario: MakeScenario, code: int, status: int
) -> None:
    s = scenario(start_np=2).training(steps=0, a=2)
    s.exit("a.1.1", code)
    s.exit("a.0.1", 1)
    assert s.end is not None
    assert s.end.exit_code == status
    assert s.end.failure is not None
    assert s.end.failure.worker == "a.1.1"
    assert s.announced("worker_started")[2:] == []
    assert "rank 1 on a failed first" in s.end.reason


def test_workers_that_fail_while_booting_fail_the_job_too(scenario: MakeScenario) -> None:
    s = scenario(start_np=2)
    s.hosts(a=2)
    s.ready("a.0.1")
    s.exit("a.1.1", 2)
    s.exit("a.0.1", 2)
    assert s.end is not None
    assert s.end.exit_code == 2


def test_before_any_step_losing_the_host_is_not_the_scripts_failure(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, settle=0.5).training(steps=0, a=2)
    s.agent_lost("a")
    s.wait(0.5)
    assert s.end is None
    s.ready(*s.starting)
    assert s.members == ["a.0.2", "a.1.2"]


def test_after_steps_everybody_exiting_by_itself_fails_the_job(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=2)
    s.exit("a.1.1", 3)
    s.exit("a.0.1", 4)
    assert s.end is not None
    assert s.end.exit_code == 3


def test_after_steps_everybody_being_killed_restarts_everything(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=2)
    s.exit("a.1.1", -9)
    s.exit("a.0.1", -9)
    assert s.round == (2, "forming")
    s.ready("a.1.2")
    assert s.round == (2, "forming")  # nobody trains: those started together are waited for
    s.ready("a.0.2")
    assert s.world.size == 2
    assert [m.version for m in s.world.members] == [-1, -1]


def test_the_first_failure_is_the_culprits_not_its_victims(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(steps=0, a=2)
    s.exit("a.1.1", 1, victim=True)
    s.exit("a.0.1", 5)
    assert s.end is not None
    assert s.end.exit_code == 5


def test_four_failures_in_a_row_without_a_step_end_an_elastic_job(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2, host_failures=99).training(a=2)
    for incarnation in (1, 2, 3, 4):
        assert s.end is None
        s.exit(f"a.1.{incarnation}", 1)
        s.ready("a.0.1", version=3)
        s.wait(2.0)
        s.ready(f"a.1.{incarnation + 1}") if incarnation < 4 else None
        s.wait(2.0)
        s.ready("a.0.1", version=3) if incarnation < 4 else None
    assert s.end is not None
    assert "4 failures in a row without a finished step" in s.end.reason


def test_failures_with_steps_in_between_never_use_up_the_budget(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2).training(a=2)
    for incarnation in range(1, 20):
        s.exit(f"a.1.{incarnation}", -9)
        s.ready("a.0.1", version=incarnation)
        s.step("a.0.1")
        s.ready(f"a.1.{incarnation + 1}")
        s.wait(1.0)
        s.ready("a.0.1", version=incarnation)
        s.step(*s.members)
    assert s.end is None


def test_max_restarts_counts_every_failure_and_names_its_flag(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, max_np=3, max_restarts=1).training(a=3)
    s.exit("a.1.1", -9)
    assert s.end is None
    s.exit("a.2.1", -9)
    assert s.end is not None
    assert s.end.exit_code == 137
    assert "limit of 1 restart; raise --max-restarts" in s.end.reason


def test_a_hosts_loss_counts_as_one_failure(scenario: MakeScenario) -> None:
    s = scenario(start_np=8, max_restarts=1).training(a=4, b=4)
    s.agent_lost("b")
    assert s.end is None
    assert s.job.status(s.now).counters.failures == 1


def test_max_restarts_restarts_even_what_failed_altogether(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, max_restarts=1, settle=0.5).training(steps=0, a=1)
    s.exit("a.0.1", 3)
    s.wait(0.5)
    assert s.starting == ["a.0.2"]
    s.ready("a.0.2")
    assert s.members == ["a.0.2"]
    s.exit("a.0.2", 3)
    assert s.end is not None
    assert s.end.exit_code == 3


def test_after_the_end_nothing_is_decided(scenario: MakeScenario) -> None:
    s = scenario(start_np=1).training(a=1)
    s.exit("a.0.1", 0)
    assert s.job.status(s.now).state == "succeeded"
    assert s.hosts(b=3) == []
    assert s.lost("a.0.1") == []
    assert s.job.deadline() is None


def test_a_finishing_job_does_not_wait_for_ever_for_workers_that_never_get_ready(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, start_timeout=60.0)
    s.hosts(a=3)
    s.ready("a.1.1")
    s.exit("a.0.1", 0)
    s.lost("a.1.1")
    s.wait(61.0)
    assert s.in_state("stopping") == ["a.2.1"]
    s.obey_stops()
    assert s.end is not None
    assert s.end.exit_code == 0


# ---- the state is gone -------------------------------------------------------------------


def wiped_out(s: Scenario) -> Scenario:
    """All workers of a job with 3 committed steps are killed, and others are ready."""
    s.training(a=2, steps=0)
    s.step("a.0.1", "a.1.1", step=3)
    s.exit("a.0.1", -9)
    s.exit("a.1.1", -9)
    s.wait(2.0)
    s.ready(*s.starting)
    return s


def test_a_state_that_every_holder_has_lost_is_told_and_named_to_the_next_workers(
    scenario: MakeScenario,
) -> None:
    s = wiped_out(scenario(start_np=2))
    assert (s.world.gone, s.world.anew) == (3, False)
    (lost,) = s.announced("state_lost")
    assert lost.reason == (
        "every worker that held it is gone; the job goes on from its newest checkpoint, or ends if "
        "it has none"
    )
    s.exit("a.1.2", 75)
    s.exit("a.0.2", 75)
    assert s.end is not None
    assert s.end.exit_code == 75
    assert "the state is gone with the workers that held it, and there is no" in s.end.reason


def test_what_was_read_from_a_checkpoint_is_lost_anew_if_all_are_killed_again(
    scenario: MakeScenario,
) -> None:
    s = wiped_out(scenario(start_np=2))
    s.step(*s.members, step=2)
    s.exit("a.0.2", -9)
    s.ready("a.1.2", version=5)
    s.ready(*s.starting)
    assert s.world.gone == 0, "one has kept it"
    for worker in s.members:
        s.exit(worker, -9)
    s.wait(2.0)
    s.ready(*s.starting)
    assert s.world.gone == 5


def test_training_may_begin_anew_where_the_user_wants_that(scenario: MakeScenario) -> None:
    s = wiped_out(scenario(start_np=2, restart_from_scratch=True))
    assert (s.world.gone, s.world.anew) == (3, True)
    assert s.announced("state_lost")[0].reason.endswith("or begins anew if it has none")


def test_a_job_that_has_committed_nothing_has_lost_nothing(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=2, steps=0)
    s.exit("a.0.1", -9)
    s.ready("a.1.1", version=0)
    s.exit("a.1.1", -9)
    s.wait(2.0)
    s.ready(*s.starting)
    assert s.world.gone == 0
    assert not s.announced("state_lost")


def test_a_state_that_was_written_as_all_had_to_leave_is_not_called_lost(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1).training(a=1)
    s.hosts()
    s.wait(1.0)
    s.ready("a.0.1", version=5)
    s.send(ev.WorkerSaved("a.0.1", 1, "/ckpt/step-5"))
    s.obey_stops()
    s.hosts(b=1)
    s.ready(*s.starting)
    assert s.world.gone == 5, "where it cannot be read, it is lost"
    assert not s.announced("state_lost")


def test_a_later_training_function_has_lost_nothing_before_its_first_commit(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2).training(a=2, steps=0)
    s.step("a.0.1", "a.1.1", step=3)  # of the first function
    s.exit("a.1.1", -9)
    s.send(ev.WorkerReady("a.0.1", 1, -1, True, "a peer is lost", phase=2))
    assert s.world.gone == 0
    s.ready(*s.starting)
    s.exit("a.0.1", -9)
    for worker in s.in_state("running"):
        s.exit(worker, -9)
    s.wait(2.0)
    s.ready(*s.starting)
    assert s.world.gone == 3, "the first function's training is gone, too"


@pytest.mark.parametrize(("code", "status"), [(-9, 137), (-11, 139), (3, 3)])
def test_a_plain_job_fails_with_any_rank_that_fails_after_a_peers_success(
    scenario: MakeScenario, code: int, status: int
) -> None:
    for lost in (0, 1):
        s = scenario(start_np=2, plain_after=1.0)
        s.hosts(a=2)
        for worker in ("a.0.1", "a.1.1"):
            s.started(worker)
        s.wait(2.0)
        s.exit(f"a.{1 - lost}.1", 0)
        s.exit(f"a.{lost}.1", code)
        assert s.end is not None
        assert s.end.exit_code == status
        assert s.end.reason.startswith(f"rank {lost} on a ")
        assert s.end.reason.endswith(", others exited 0")


def test_a_plain_job_fails_with_a_host_that_is_lost_after_a_peers_success(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, plain_after=1.0)
    s.hosts(a=1, b=1)
    for worker in ("a.0.1", "b.0.1"):
        s.started(worker)
    s.wait(2.0)
    s.exit("a.0.1", 0)
    s.agent_lost("b")
    assert s.end is not None
    assert s.end.exit_code == 137
    assert s.end.reason == "rank 1 on b was lost with its agent, others exited 0"


def test_what_rank_0_alone_does_after_training_has_to_end_well(scenario: MakeScenario) -> None:
    for first in ("a.0.1", "a.1.1"):  # it may be killed before or after the others have finished
        s = scenario(start_np=2).training(a=2)
        s.exit(first, {"a.0.1": -9, "a.1.1": 0}[first])
        s.exit("a.1.1" if first == "a.0.1" else "a.0.1", 0 if first == "a.0.1" else -9)
        assert s.end is not None
        assert s.end.exit_code == 137
        assert s.end.reason == (
            "rank 0 on a was killed by signal 9 before its script was over, others exited 0: what "
            "it does after training, such as saving the model, may be missing"
        )


def test_another_rank_that_is_lost_at_the_end_is_named(scenario: MakeScenario) -> None:
    s = scenario(start_np=3).training(a=3)
    s.exit("a.2.1", -9)
    s.exit("a.1.1", 0)
    s.exit("a.0.1", 0)
    assert s.all(EndJob) == [
        EndJob(
            0,
            "the workers finished the script; rank 2 on a was killed by signal 9 before",
        )
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_a_worker_that_is_killed_when_its_script_is_over_has_finished(
    scenario: MakeScenario, size: int
) -> None:
    s = scenario(start_np=size).training(a=size)
    for slot in range(1, size):
        s.exit(f"a.{slot}.1", 0)
    s.send(ev.WorkerEnding("a.0.1", 1))
    s.exit("a.0.1", -9)
    assert s.all(EndJob) == [EndJob(0, "the workers finished the script")]


def test_a_crash_of_an_interpreter_that_ends_is_a_failure(scenario: MakeScenario) -> None:
    s = scenario(start_np=1).training(a=1)
    s.send(ev.WorkerEnding("a.0.1", 1, failed=True))
    s.exit("a.0.1", -9)
    assert s.end is None or s.end.exit_code != 0


def test_a_host_that_is_lost_when_its_scripts_are_over_takes_nothing_along(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2).training(a=1, b=1)
    s.send(ev.WorkerEnding("a.0.1", 1))
    s.agent_lost("a")
    s.exit("b.0.1", 0)
    assert s.all(EndJob) == [EndJob(0, "the workers finished the script")]
