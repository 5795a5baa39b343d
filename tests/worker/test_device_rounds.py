"""Recovery where groups have a second half: real workers, only the device is pretended."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.words.orders import Notice
from elastic_driver.words.wire_events import WorkerReady
from tests.support.coordinator import Coordinator, eventually
from tests.worker import device_training
from tests.worker.test_recovery import assert_every_step_once_and_equal_everywhere


def assert_nobody_met_before_all_had_ended(job: Coordinator) -> None:
    """Each survivor's device had ended round r before any device of round r + 1 connected."""

    def times(worker: str, what: str) -> list[float]:
        return [line["t"] for line in job.records(f"{worker}.device") if line["device"] == what]

    members = {world.round: [m.worker for m in world.members] for world in job.worlds}
    assert len(members) > 1
    for number in sorted(members)[:-1]:
        survivors = [worker for worker in members[number] if worker in members[number + 1]]
        before = {w: sum(w in members[r] for r in members if r <= number) for w in survivors}
        ended = [times(w, "ended")[count - 1] for w, count in before.items()]
        met = [times(w, "connects")[count] for w, count in before.items()]
        assert max(ended) <= min(met), (number, ended, met)


def test_after_a_kill_the_survivors_end_their_devices_and_lose_no_step(tmp_path: Path) -> None:
    with Coordinator(tmp_path, device_training.steps, 100000) as job:
        alive = job.start(3)
        took = []
        for round_id in (1, 2):
            job.until_step(10 * round_id, alive, round_id)
            killed_at = job.kill(alive.pop(0))
            job.until_step(1, alive, round_id + 1)
            next_round = [
                next(line["t"] for line in job.records(w) if line["round"] == round_id + 1)
                for w in alive
            ]
            took.append(max(next_round) - killed_at)
        print("kill to next step:", took)
        job.until_step(job.furthest() + 5, alive, 3)
        last = min(job.newest(worker)["step"] for worker in alive)
        assert_every_step_once_and_equal_everywhere(job, last)
        assert_nobody_met_before_all_had_ended(job)


def test_a_stopped_peer_does_not_hold_a_thread_that_waits_for_its_device(tmp_path: Path) -> None:
    with Coordinator(tmp_path, device_training.steps, 100000) as job:
        alive = job.start_three_and_stop_one()
        last = min(job.newest(worker)["step"] for worker in alive)
        assert_every_step_once_and_equal_everywhere(job, last)
        assert_nobody_met_before_all_had_ended(job)


def test_a_newcomer_joins_when_all_devices_have_done_and_ended(tmp_path: Path) -> None:
    with Coordinator(tmp_path, device_training.steps, 100000) as job:
        first = job.start(2)
        job.until_step(10, first)
        (newcomer,) = job.start(1, expected=False)
        boundary = job.let_in([newcomer], margin=100)
        job.until_step(boundary + 10, [*first, newcomer], 2)
        ends = {max(r["step"] for r in job.records(w) if r["round"] == 1) for w in first}
        assert ends == {boundary}, "nothing of the last step was cut off"
        assert job.records(newcomer)[0]["step"] == boundary + 1
        assert_every_step_once_and_equal_everywhere(job, boundary + 10)
        assert_nobody_met_before_all_had_ended(job)
        ready = {e.worker: e for e in job.events if isinstance(e, WorkerReady) and e.round == 1}
        assert all(ready[w].version == boundary and ready[w].clean for w in first)


def test_at_the_end_of_the_script_everybody_ends_well(tmp_path: Path) -> None:
    with Coordinator(tmp_path, device_training.steps, 20) as job:
        workers = job.start(2)
        assert job.wait(workers) == [0, 0]
        assert_every_step_once_and_equal_everywhere(job, 20)


def test_who_goes_on_alone_past_the_boundary_is_cut_off_and_loses_nothing(tmp_path: Path) -> None:
    with Coordinator(tmp_path, device_training.steps, 100000) as job:
        (early,) = job.start()
        job.function = device_training.steps_past_boundaries
        (late,) = job.start()
        job.until_step(10, [early, late])
        job.publish(Notice(1, job.furthest() + 20, "a newcomer is ready"))
        eventually(lambda: early in job.ready, "one has left, and its peer waits for it")
        job.leave_now(f"{early} has left")  # as the driver does, a moment later
        job.until_step(job.furthest() + 10, [early, late], 2)
        last = min(job.newest(worker)["step"] for worker in (early, late))
        assert_every_step_once_and_equal_everywhere(job, last)
        assert_nobody_met_before_all_had_ended(job)


def test_a_member_that_dies_before_the_devices_meet_is_not_waited_for(tmp_path: Path) -> None:
    with Coordinator(tmp_path, device_training.steps, 100000) as job:
        alive = job.start(2)
        job.function, job.args = device_training.dies_while_connecting, ()
        (lost,) = job.start(1)
        assert job.wait([lost]) == [9]
        job.forget(lost)
        job.leave_now(f"{lost} died")
        job.until_step(3, alive, 2)
        assert_every_step_once_and_equal_everywhere(job, 3)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("abort", "its device's group was not ended within 0.5 s"),
        ("forget", "its group was not taken down within 0.5 s"),
    ],
)
def test_a_worker_whose_device_cannot_be_ended_ends_itself(
    tmp_path: Path, what: str, said: str
) -> None:
    with Coordinator(tmp_path, device_training.cannot_be_ended, what) as job:
        workers = job.start(2)
        job.until_step(3, workers)
        job.kill(workers.pop())
        assert job.wait(workers) == [75]
        assert said in job.said(workers[0])
