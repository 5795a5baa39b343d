"""Real workers, really killed, stopped and added: what survives.

A coordinator in place of the driver says when a round ends, so nothing here shows how soon a driver
notices a loss: tests/e2e/test_failures.py does.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.words.orders import Notice
from elastic_driver.worker.world import groups
from tests.support.coordinator import Coordinator, eventually
from tests.worker import training

CHANGES = int(os.environ.get("CHANGES", "100"))  # of the world; a thousand at night
LEFT_MIB = 6.0


def assert_every_step_once_and_equal_everywhere(job: Coordinator, last: int) -> None:
    """Each worker counts without repeats, and all agree on the state after each step.

    It leaves out no step but those whose state it has received, because others had finished them.
    """
    digests: dict[int, set[str]] = {}
    for worker in job.processes:
        lines = [line for line in job.records(worker) if line["step"] <= last]
        for before, after in pairwise(lines):
            expected = received(job, worker, before["step"]) + 1
            assert after["step"] == expected, (worker, before, after)
        for line in lines:
            assert line["trail"] == line["step"], "an attribute was rolled back with its step"
            digests.setdefault(line["step"], set()).add(line["digest"])
    assert sorted(digests) == list(range(1, last + 1))
    differing = {step: found for step, found in digests.items() if len(found) > 1}
    assert not differing


def received(job: Coordinator, worker: str, step: int) -> int:
    """The step whose state a worker has got that was the last to finish `step`, or this step."""
    for world in job.worlds:
        versions = {member.worker: member.version for member in world.members if member.clean}
        if versions.get(worker) == step:
            return max(versions.values())
    return step


def test_survivors_go_on_in_the_same_processes_and_lose_no_step(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    dice = random.Random(seed)
    with Coordinator(tmp_path, training.steps, 100000) as job:
        alive = job.start(3)
        took = []
        for round_id in (1, 2):
            job.until_step(dice.randrange(5, 40) + job.furthest(), alive, round_id)
            victim = alive.pop(dice.randrange(len(alive)))
            pids = {worker: job.pid(worker) for worker in alive}
            killed_at = job.kill(victim)
            job.until_step(1, alive, round_id + 1)
            first = [
                next(line["t"] for line in job.records(worker) if line["round"] == round_id + 1)
                for worker in alive
            ]
            took.append(max(first) - killed_at)
            assert {worker: job.newest(worker)["pid"] for worker in alive} == pids
        print("kill to next step:", took)
        last = min(job.newest(worker)["step"] for worker in alive)
        assert_every_step_once_and_equal_everywhere(job, last)


def test_a_newcomer_joins_at_a_boundary_with_the_whole_state(tmp_path: Path) -> None:
    with Coordinator(tmp_path, training.steps, 120) as job:
        first = job.start(2)
        job.until_step(10, first)
        (newcomer,) = job.start(1, expected=False)
        boundary = job.let_in([newcomer], margin=10)
        assert job.wait([*first, newcomer]) == [0, 0, 0]
        ends = {w: max(r["step"] for r in job.records(w) if r["round"] == 1) for w in first}
        assert set(ends.values()) == {boundary}, "both left after the same step"
        begun = job.records(newcomer)[0]
        assert begun["step"] == boundary + 1
        assert begun["size"] == 3
        # Digests cover model, buffers, Adam, schedule and attributes: equal after every step.
        assert_every_step_once_and_equal_everywhere(job, 120)
        source = next(r for r in job.records(first[0]) if r["step"] == boundary + 1)
        assert begun["random"] == source["random"], "its generators are those of its source"


def test_a_survivor_that_misses_a_finished_step_receives_it(tmp_path: Path) -> None:
    # All ranks leave round 1 by a failure; whoever committed further is the source.
    with Coordinator(tmp_path, training.steps, 100000, 0.0) as job:
        alive = job.start(4)
        for round_id in (1, 2):
            job.until_step(30 * round_id, alive, round_id)
            job.kill(alive.pop())
        job.until_step(job.furthest() + 20, alive, 3)
        assert_every_step_once_and_equal_everywhere(job, min(job.newest(w)["step"] for w in alive))


def test_a_mistake_in_the_script_ends_the_worker_with_its_own_traceback(tmp_path: Path) -> None:
    with Coordinator(tmp_path, training.fails_at, 5) as job:
        zero, one = job.start(2)
        assert job.wait([one]) == [1]
        assert "a mistake of the script" in job.said(one)
        assert 'raise Stops("a mistake of the script")' in job.said(one)
        job.forget(one)
        eventually(lambda: job.newest(zero).get("step", 0) > 5, "the other one goes on")


def test_a_construction_is_abandoned_when_a_member_dies_before_it_connects(
    tmp_path: Path,
) -> None:
    with Coordinator(tmp_path, training.steps, 100000) as job:
        alive = job.start(2)
        job.function, job.args = training.dies_while_joining, ()
        (lost,) = job.start(1)
        assert job.wait([lost]) == [9]
        died_at = job.newest(lost)["t"]
        job.forget(lost)
        job.leave_now(f"{lost} died")
        job.until_step(3, alive, 2)
        first = max(job.records(worker)[0]["t"] for worker in alive)
        print("from its death to the first step:", first - died_at)
        assert first - died_at < groups.CONNECT_TIMEOUT_S / 10


def test_a_peer_that_dies_amid_a_large_broadcast_costs_no_other_process(tmp_path: Path) -> None:
    with Coordinator(tmp_path, training.dies_amid_a_broadcast) as job:
        lost, *others = job.start(3)
        pids = {worker: job.pid(worker) for worker in others}
        assert job.wait([lost]) == [9]
        job.forget(lost)
        job.leave_now(f"{lost} died")
        job.until_step(5, others, 2)
        assert {worker: job.newest(worker)["pid"] for worker in others} == pids
        first = [job.records(worker)[0] for worker in others]
        assert {line["step"] for line in first} == {2}, "the step that was committed is kept"


def test_a_stopped_peer_holds_nobody_once_the_driver_says_leave(tmp_path: Path) -> None:
    with Coordinator(tmp_path, training.steps, 100000) as job:
        alive = job.start_three_and_stop_one()
        last = min(job.newest(worker)["step"] for worker in alive)
        assert_every_step_once_and_equal_everywhere(job, last)


@pytest.mark.slow
def test_a_hundred_changes_of_the_world_leak_neither_memory_nor_threads_nor_descriptors(
    tmp_path: Path,
) -> None:
    with Coordinator(tmp_path, training.resumes_for_ever) as job:
        workers = job.start(2)

        def change(count: int) -> None:
            for _ in range(count):
                number = job.worlds[-1].round if job.worlds else 0
                eventually(lambda n=number: entered(n), f"round {number} runs")
                job.publish(Notice(number, None if number % 4 == 0 else 0, "a change"))
                eventually(lambda n=number: job.worlds[-1].round > n, "the next round")
            eventually(lambda: entered(job.worlds[-1].round), "the last round runs")

        def entered(number: int) -> bool:
            return all(job.newest(w).get("entered", -1) >= max(number, 1) for w in workers)

        eventually(lambda: entered(1), "the first round runs")
        change(10)
        before: dict[str, Any] = {w: job.usage(w) for w in workers}
        change(CHANGES)

        def has_settled(worker: str) -> bool:  # old groups end on threads of their own
            now = job.usage(worker)
            print(f"{worker}: threads, descriptors, MiB: {before[worker]} → {now}")
            return all(
                value <= least + more
                for value, least, more in zip(now, before[worker], (1, 4, LEFT_MIB), strict=True)
            )

        for worker in workers:
            eventually(lambda w=worker: has_settled(w), f"{worker} holds no more than before")


@pytest.mark.parametrize(
    "script", [training.ends_callbacks_late, training.has_a_hook_that_holds_the_group]
)
def test_a_world_can_be_left_while_a_thread_of_gloo_still_ends_its_last_callback(
    tmp_path: Path, script: Callable[[str], None]
) -> None:
    """A group whose last reference that thread had would wait for it, and end the process."""
    with Coordinator(tmp_path, script) as job:
        workers = job.start(2)
        for number in range(1, 5):
            both = f"both train in round {number}"
            eventually(lambda n=number: job.stepped(n) == set(workers), both)
            job.publish(Notice(number, None, "a change"))
        eventually(lambda: job.stepped(5) == set(workers), "both train in the last round")


def test_the_group_of_init_is_a_whole_torch_process_group(tmp_path: Path) -> None:
    with Coordinator(tmp_path, training.uses_torch_directly) as job:
        workers = job.start(3)
        assert job.wait(workers) == [0, 0, 0]
        for worker in workers:
            checks = job.newest(worker)["checks"]
            assert checks.pop("backend") == "gloo"
            assert all(checks.values()), checks


def test_a_wrapper_gives_gradients_the_bits_that_torch_gives_them(tmp_path: Path) -> None:
    with Coordinator(tmp_path, training.means_gradients) as job:
        workers = job.start(3)  # 1/3 is not exact, so another order of the operations shows
        assert job.wait(workers) == [0, 0, 0]
        for worker in workers:
            found = job.newest(worker)
            assert found["ours"] == found["torch"]
            assert found["hook_is_close"]


def test_a_wrapped_model_is_trained_by_fixed_batches_as_a_bare_one(tmp_path: Path) -> None:
    with Coordinator(tmp_path, training.trains_fixed_batches) as job:
        workers = job.start(4)  # of which one is a standby, without a micro-batch
        assert job.wait(workers) == [0] * 4
        found = [job.newest(worker) for worker in workers]
        assert len({one["wrapped"] for one in found} | {one["bare"] for one in found}) == 1


def test_each_worker_tells_of_its_first_step_once_a_round(tmp_path: Path) -> None:
    with Coordinator(tmp_path, training.steps, 100000) as job:
        workers = job.start(2)
        eventually(lambda: job.stepped(1) == set(workers), "both have told of round 1")
        job.kill(workers.pop())
        eventually(lambda: job.stepped(2) == set(workers), "the survivor has told of round 2")
        told = [(e.worker, e.round) for e in job.events if type(e).__name__ == "WorkerStepped"]
        assert len(told) == len(set(told))


def test_training_goes_on_while_no_driver_answers_and_obeys_one_that_answers_again(
    tmp_path: Path,
) -> None:
    with Coordinator(tmp_path, training.steps, 100000) as job:
        workers = job.start(2)
        job.until_step(5, workers)
        port = job.server.port
        job.server.stop()
        gone_at = time.time()

        def heartbeats_were_missed() -> bool:  # a worker that trains sends one every 2 s
            return all(job.newest(w)["t"] > gone_at + 3.0 for w in workers)

        eventually(heartbeats_were_missed, "training goes on")
        assert {job.newest(w)["round"] for w in workers} == {1}
        job.come_back()
        assert job.server.port == port
        pids = [job.newest(w)["pid"] for w in workers]
        job.leave_now("a new driver wants another round")
        job.until_step(1, workers, 2)
        assert [job.newest(w)["pid"] for w in workers] == pids
        job.kill(workers.pop())
        job.until_step(1, workers, 3)
        assert_every_step_once_and_equal_everywhere(job, job.newest(workers[0])["step"])


def test_children_of_a_data_loader_neither_beat_nor_keep_a_dead_workers_connections(
    tmp_path: Path,
) -> None:
    with Coordinator(tmp_path, training.loads_data_in_children) as job:
        workers = job.start(2)
        job.until_step(5, workers)
        victim = workers.pop()
        children = job.newest(victim)["children"]
        assert children
        killed_at = job.kill(victim, notice=False)
        # Nobody says that it is gone: only the end of its connections tells.
        job.until_step(1, workers, 2)
        first = next(r["t"] for r in job.records(workers[0]) if r["round"] == 2)
        assert first - killed_at < 5
        assert not any(r["connected"] for r in job.records(workers[0]) if "connected" in r)


def test_members_that_break_again_and_again_without_a_step_end_with_the_error(
    tmp_path: Path,
) -> None:
    with Coordinator(tmp_path, training.disagrees) as job:
        workers = job.start(2)
        assert 1 in job.wait(workers)
        assert any("gloo/transport" in job.said(worker) for worker in workers)
        assert len(job.worlds) <= 4
