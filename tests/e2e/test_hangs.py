"""Workers that live and do not get on: stopped, deadlocked, looping, waiting for each other."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.job import (
    JOBS,
    RunningJob,
    assert_no_step_lost_or_repeated,
    elasticrun,
    eventually,
    is_running,
)

TRAIN = str(JOBS / "train.py")
HANG = str(JOBS / "hang.py")
LOADED_S = 2.0  # what a busy machine may add to the bounds below


def next_step_of(job: RunningJob, pids: set[int], after: float) -> float:
    """When the last of these processes had finished a step in a round newer than at `after`."""
    before = max(r.round for r in job.steps() if r.t <= after)

    def look() -> float | None:
        first: dict[int, float] = {}
        for r in job.steps():
            if r.round > before and r.pid in pids:
                first.setdefault(r.pid, r.t)
        return max(first.values()) if set(first) == pids else None

    return job.until(look, "the others finished a step without the one that hangs")


def test_a_stopped_worker_is_found_by_its_lease_killed_and_replaced() -> None:
    heartbeat = 2.0
    args = ("-np", "3", "--heartbeat-timeout", str(heartbeat), "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000"}) as job:
        pids = set(job.until_size(3, steps=20))
        victim = min(pids)
        stopped_at = job.kill(victim, signal.SIGSTOP)
        job.killed[victim] = stopped_at
        took = next_step_of(job, pids - {victim}, stopped_at) - stopped_at
        print(f"SIGSTOP to next step: {took:.2f} s, {took - heartbeat:+.2f} s beyond the timeout")
        assert took < heartbeat + 0.5 + LOADED_S
        again = job.until_size(3)
        assert pids - {victim} <= set(again), "survivors keep their process"
        eventually(lambda: not is_running(victim), within=5, what="the stopped one is killed")
        assert [e["pid"] for e in job.events("worker_hung")] == [victim]
        seen = [e["reason"] for e in job.events("stacks_collected")]
        assert any("no answer; its process is stopped" in reason for reason in seen), seen
        assert_no_step_lost_or_repeated(job, min(r.step for r in again.values()))


@pytest.mark.parametrize("how", ["lock", "spin"])
def test_a_training_thread_that_hangs_is_found_though_it_beats(how: str) -> None:
    args = ("-np", "3", "--hang-timeout", "3", "--", HANG)
    env = {"HANG": how, "HANG_STEP": "30", "STEPS": "100000"}
    with elasticrun(*args, env=env) as job:
        pids = set(job.until_size(3))
        (hung,) = job.until(lambda: job.events("worker_hung"), "the hanging worker is found")
        job.killed[hung["pid"]] = hung["t"]
        eventually(lambda: not is_running(hung["pid"]), within=10, what="it is killed")
        again = job.until_size(3)
        assert hung["rank"] == 1
        assert pids - {hung["pid"]} <= set(again), "those that waited for it keep their process"
        place = "stop_for_ever_in_a_lock" if how == "lock" else "maybe_hang"
        assert place in hung["reason"]
        assert place in hung["stack"]
        assert "no progress for" in job.stderr, "the stacks are in the worker's own log"
        (found,) = job.events("stacks_collected")
        assert found["n"] < hung["n"], "before anybody is killed"
        (odd,) = [group for group in found["stacks"] if group["odd"]]
        assert (odd["ranks"], odd["where"]) == ([1], "elsewhere")
        assert place in odd["stack"]
        others = [group for group in found["stacks"] if not group["odd"]]
        assert sorted(rank for group in others for rank in group["ranks"]) == [0, 2]
        assert {group["where"] for group in others} == {"collective"}
        last = min(r.step for r in again.values())
        assert last >= 30, job.describe()
        assert_no_step_lost_or_repeated(job, last)


def test_collectives_that_do_not_match_break_the_round_once_and_the_job_goes_on() -> None:
    args = ("-np", "3", "--hang-timeout", "2", "--", HANG)
    env = {"HANG": "mismatch", "HANG_STEP": "30", "STEPS": "60"}
    with elasticrun(*args, env=env) as job:
        pids = set(job.until_size(3))
        assert job.wait(60) == 0, job.describe()
        assert {r.pid for r in job.steps()} == pids, "nobody was killed"
        assert len(job.events("worker_stalled")) == 3
        assert job.events("worker_hung") == []
        assert_no_step_lost_or_repeated(job, 60)


def test_collectives_that_never_match_fail_the_job_and_tell_who_waits_where() -> None:
    args = ("-np", "3", "--hang-timeout", "1", "--", HANG)
    env = {"HANG": "mismatch", "HANG_STEP": "30", "HANG_TIMES": "99", "STEPS": "60"}
    with elasticrun(*args, env=env) as job:
        assert job.wait(60) == 1, job.describe()
        last = job.stderr.splitlines()[-1]
        assert "collectives that do not match, again" in last
        assert "ranks 0, 1 at" in last
        assert "wait_for_a_message_nobody_sends" in last
        assert len(job.rounds()) == 2
        job.assert_nothing_left()


def test_a_long_evaluation_that_reports_itself_is_no_hang() -> None:
    args = ("-np", "3", "--hang-timeout", "1", "--", HANG)
    env = {"HANG": "evaluate", "HANG_STEP": "30", "EVALUATE_S": "3", "STEPS": "60"}
    with elasticrun(*args, env=env) as job:
        started = time.monotonic()
        assert job.wait(60) == 0, job.describe()
        assert time.monotonic() - started > 6.0
        assert job.events("worker_hung") == []
        assert job.rounds() == [3], "nobody left the round"
        assert_no_step_lost_or_repeated(job, 60)


def test_a_group_under_construction_is_given_up_when_a_peer_is_stopped_meanwhile() -> None:
    """Kill one, and stop another right after: the next round includes it and cannot be built."""
    args = ("-np", "3", "--min-np", "1", "--heartbeat-timeout", "2", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000"}) as job:
        pids = sorted(job.until_size(3, steps=20))
        victim, stopped, survivor = pids
        job.kill(stopped, signal.SIGSTOP)
        killed_at = job.kill(victim)
        job.killed[stopped] = killed_at
        took = next_step_of(job, {survivor}, killed_at) - killed_at
        print(f"killed one, stopped one: next step after {took:.2f} s")
        assert took < 2.0 + 2.0 + LOADED_S
        again = job.until_size(3)
        assert survivor in again
        assert_no_step_lost_or_repeated(job, min(r.step for r in again.values()))
