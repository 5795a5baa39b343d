"""Workers, agents and the driver are killed; the job goes on, or ends and leaves nothing."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from pathlib import Path
from typing import Any

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


def recovery_seconds(job: RunningJob, killed_at: float, survivors: set[int]) -> float:
    """From the kill to the moment the last survivor has finished a step in a newer round."""
    before = max(r.round for r in job.steps() if r.t <= killed_at)

    def look() -> float | None:
        first: dict[int, float] = {}
        for r in job.steps():
            if r.round > before and r.pid in survivors:
                first.setdefault(r.pid, r.t)
        return max(first.values()) - killed_at if set(first) == survivors else None

    return job.until(look, "every survivor finished a step after the kill")


def test_survivors_keep_their_process_and_the_world_grows_back_after_each_kill() -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    dice = random.Random(seed)
    args = ("-np", "3", "--min-np", "1", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000"}) as job:
        took = []
        for _ in range(int(os.environ.get("E2E_KILLS", "5"))):
            pids = set(job.until_size(3, steps=dice.randrange(2, 40)))
            victim = dice.choice(sorted(pids))
            killed_at = job.kill(victim)
            took.append(recovery_seconds(job, killed_at, pids - {victim}))
            assert all(is_running(pid) for pid in pids - {victim})
        job.until_size(3)
        last = min(r.step for r in job.live().values())
        print("kill to next step:", sorted(took))
        assert statistics.median(took) < 0.5
        assert_no_step_lost_or_repeated(job, last)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(15) == 143
        job.assert_nothing_left()


def test_a_job_with_kills_ends_with_every_step_done_once_and_equal_weights() -> None:
    args = ("-np", "3", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "400"}) as job:
        pids = sorted(job.until_size(3))
        job.kill(pids[1])
        assert job.wait(60) == 0, job.describe()
        assert_no_step_lost_or_repeated(job, 400)
        done = [
            line.split(":", 1)[1] for line in job.stdout.splitlines() if "done step=400" in line
        ]
        digests = {line.split("digest=")[1].split()[0] for line in done}
        assert len(done) >= 2
        assert len(digests) == 1
        job.assert_nothing_left()


def test_survivors_do_not_wait_until_the_process_of_a_worker_that_raised_has_ended(
    tmp_path: Path,
) -> None:
    may_end = tmp_path / "may-end"
    env = {"STEPS": "100000", "FAIL_STEP": "20", "FAIL_RANK": "2", "END_AFTER": str(may_end)}
    with elasticrun("-np", "3", "--min-np", "1", "--", TRAIN, env=env) as job:
        first = job.until_size(3)
        survivors = job.until_size(2, steps=5)
        (failed,) = set(first) - set(survivors)
        assert is_running(failed)
        assert not job.events("worker_exited")
        may_end.touch()
        (ended,) = job.until(lambda: job.events("worker_exited"), "the process that failed ends")
        assert (ended["exit_code"], ended["expected"]) == (1, False)
        assert set(survivors) < set(job.until_size(3))
        assert "ValueError: boom at step 20" in job.stderr


def test_a_host_is_left_at_the_failure_of_a_worker_where_that_was_asked_for() -> None:
    env = {"STEPS": "100000", "FAIL_STEP": "20", "FAIL_RANK": "3"}
    hosts = ("-H", "localhost:2,127.0.0.2:2", "-np", "4", "--failed-hosts", "leave")
    times = ("--blacklist-cooldown-range", "1", "1")
    with elasticrun(*hosts, *times, "--", TRAIN, env=env) as job:
        first = job.until_size(4)
        job.until(lambda: job.rounds()[1:2] == [2], "the world of the host that is left over")
        grown = job.until_size(4)
        stayed = [record.worker for pid, record in grown.items() if pid in first]
        assert {worker.rsplit(".", 2)[0] for worker in stayed} == {"localhost"}


def test_rank_0_can_be_killed_like_any_other() -> None:
    with elasticrun("-np", "3", "--", TRAIN, env={"STEPS": "100000"}) as job:
        first = job.until_size(3)
        zero = next(pid for pid, r in first.items() if r.rank == 0)
        one = next(pid for pid, r in first.items() if r.rank == 1)
        job.kill(zero)
        again = job.until_size(3)
        assert again[one].rank == 0, "the oldest survivor is rank 0 now"
        assert_no_step_lost_or_repeated(job, min(r.step for r in again.values()))


@pytest.mark.parametrize("count", [2])
def test_several_workers_killed_at_once(count: int) -> None:
    with elasticrun("-np", "3", "--", TRAIN, env={"STEPS": "100000"}) as job:
        pids = sorted(job.until_size(3))
        for pid in pids[:count]:
            job.kill(pid)
        again = job.until_size(3)
        assert set(pids[count:]) <= set(again)
        assert_no_step_lost_or_repeated(job, min(r.step for r in again.values()))


def test_a_killed_agent_takes_its_workers_along_and_is_replaced() -> None:
    args = ("-np", "4", "-H", "localhost:2,127.0.0.2:2", "--min-np", "1", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000"}) as job:
        before = job.until_size(4)
        second = next(e for e in job.events("agent_started") if e["host"] == "127.0.0.2")
        lost = {p for p, r in before.items() if r.worker.startswith("127.0.0.2.")}
        for pid in [second["pid"]]:
            job.kill(pid)
        for pid in lost:
            job.killed[pid] = 0.0
        eventually(lambda: not any(map(is_running, lost)), within=5, what="its workers are gone")
        again = job.until_size(4)
        assert set(before) - lost <= set(again), "survivors on the other host keep their process"
        assert job.events("agent_lost")
        assert_no_step_lost_or_repeated(job, min(r.step for r in again.values()))


def test_a_host_that_stands_by_fills_the_slots_of_a_lost_one() -> None:
    second, third = "127.0.0.2", "127.0.0.3"
    args = ("-np", "2", "--max-np", "2", "--min-np", "1", "-H", f"localhost:1,{second}:1,{third}:1")
    with elasticrun(*args, "--", TRAIN, env={"STEPS": "100000"}) as job:

        def of(name: str, host: str) -> list[dict[str, Any]]:
            return [event for event in job.events(name) if event["host"] == host]

        before = job.until_size(2, within=90.0)
        job.until(lambda: of("agent_started", third), "it stands by")
        assert not of("worker_started", third)
        lost = job.kill(of("agent_started", second)[0]["pid"])
        gone = {p for p, r in before.items() if r.worker.startswith(f"{second}.")}
        job.killed.update(dict.fromkeys(gone, 0.0))
        job.until(lambda: of("worker_started", third), "it takes over")
        assert of("agent_started", third)[0]["t"] < lost
        again = job.until_size(2)
        assert {r.worker.rsplit(".", 2)[0] for r in again.values()} == {"localhost", third}
        assert_no_step_lost_or_repeated(job, min(r.step for r in again.values()))


def test_a_stopped_agent_is_lost_by_its_missing_heartbeat_with_default_flags() -> None:
    args = ("-np", "4", "-H", "localhost:2,127.0.0.2:2", "--min-np", "1", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000"}) as job:
        before = job.until_size(4)
        second = next(e for e in job.events("agent_started") if e["host"] == "127.0.0.2")
        os.kill(second["pid"], signal.SIGSTOP)
        stopped = time.time()
        gone = {p for p, r in before.items() if r.worker.startswith("127.0.0.2.")}
        eventually(lambda: job.events("agent_lost"), within=15, what="its agent is lost")
        (lost,) = job.events("agent_lost")
        assert lost["evidence"] == "silent"
        assert lost["t"] - stopped < 2.5 + 2.0  # on a busy machine
        job.killed.update(dict.fromkeys(gone, 0.0))
        again = job.until_size(4)
        assert set(before) - gone <= set(again), "survivors on the other host keep their process"
        assert not any(map(is_running, gone))
        assert_no_step_lost_or_repeated(job, min(r.step for r in again.values()))


def test_a_killed_driver_leaves_nothing_behind_if_no_other_one_is_awaited() -> None:
    args = ("-np", "2", "--driver-timeout", "0", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "100000"}) as job:
        job.until_size(2)
        job.process.kill()
        job.process.wait(5)
        job.assert_nothing_left(within=15)


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_job_cleans_up_and_says_so(sig: int, code: int) -> None:
    with elasticrun("-np", "2", "--", TRAIN, env={"STEPS": "100000"}) as job:
        job.until_size(2)
        job.process.send_signal(sig)
        assert job.wait(15) == code
        job.assert_nothing_left(within=1)
        assert "Traceback" not in job.stderr


def test_an_interrupt_while_starting_cleans_up(tmp_path: Path) -> None:
    with elasticrun("-np", "2", "--", TRAIN, env={"STEPS": "100000"}) as job:
        job.until(lambda: job.events("agent_started"), "an agent runs")
        job.process.send_signal(signal.SIGINT)
        assert job.wait(15) == 130
        job.assert_nothing_left(within=1)


def kill_all_workers(job: RunningJob) -> None:
    for pid in job.until_size(2, steps=10):
        job.kill(pid)


def test_a_job_whose_state_is_gone_ends_with_75_and_says_what_to_give() -> None:
    with elasticrun("-np", "2", "--", TRAIN, env={"STEPS": "100000"}) as job:
        kill_all_workers(job)
        assert job.wait() == 75
        last = max(record.step for record in job.steps())
        (lost,) = job.events("state_lost")
        assert 1 <= lost["step"] <= last
        what = f"the state of step {lost['step']} or later is"
        assert f"{what} lost (every worker that held it is gone" in job.stderr
        assert f"{what} gone: every worker that held it was" in job.stderr
        assert "or begin anew with --restart-from-scratch" in job.stderr.splitlines()[-1]
        assert min(record.step for record in job.steps()) == 1
        job.assert_nothing_left()


def test_a_job_without_a_checkpoint_yet_ends_the_same_way_and_says_so_once(tmp_path: Path) -> None:
    env = {"STEPS": "100000", "CHECKPOINTS": str(tmp_path), "EVERY": "100000"}
    with elasticrun("-np", "2", "--", str(JOBS / "durable.py"), env=env) as job:
        kill_all_workers(job)
        assert job.wait() == 75
        said = [line for line in job.stderr.splitlines() if "there is no checkpoint yet" in line]
        assert len(said) == 1, job.stderr


def test_a_job_whose_state_is_gone_begins_anew_where_the_user_wants_that() -> None:
    args = ("-np", "2", "--restart-from-scratch", "--", TRAIN)
    with elasticrun(*args, env={"STEPS": "60", "STEP_MS": "10"}) as job:
        kill_all_workers(job)
        assert job.wait() == 0
        assert "is gone: training begins anew (--restart-from-scratch)" in job.stderr


TWO_FUNCTIONS = """
import os, sys, time, torch
import elastic_driver as elastic
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
first = elastic.TorchState(
    model=model, optimizer=optimizer, step=0, checkpoint_dir=sys.argv[1], every=5
)
second = elastic.ObjectState(step=0)

@elastic.run
def one(state):
    ddp = elastic.wrap(model)
    while state.step < 60:
        optimizer.zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        time.sleep(0.02)
        state.commit()
        print("step", state.step, "pid", os.getpid(), flush=True)

@elastic.run
def two(state):
    for state.step in range(state.step, 5):
        state.commit()

one(first)
two(second)
print("both are done", flush=True)
"""


def test_a_function_after_the_one_that_was_read_from_a_checkpoint_has_lost_nothing(
    tmp_path: Path,
) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO_FUNCTIONS)
    with elasticrun("-np", "2", "--", str(script), str(tmp_path / "checkpoints")) as job:
        job.until(
            lambda: [*(tmp_path / "checkpoints").glob("step-*/manifest.json")], "a checkpoint"
        )
        for pid in {int(line.split()[-1]) for line in job.stdout.splitlines() if " pid " in line}:
            job.kill(pid)
        assert job.wait() == 0, job.describe()
        assert "going on from step" in job.stderr
        assert job.stdout.count("both are done") == 2
