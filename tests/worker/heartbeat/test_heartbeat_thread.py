"""The heartbeat thread of a worker, against a real rendezvous server."""

from __future__ import annotations

import os
import queue
import signal
import time
from typing import Any

import msgspec
import pytest

from elastic_driver import contract
from elastic_driver.words.orders import (
    Allocation,
    DriverTerm,
    Notice,
    StateQuestion,
    decode,
    encode,
)
from elastic_driver.words.progress import Division, Progress, StateMark, decode_progress
from elastic_driver.words.wire_events import StateDescribed
from elastic_driver.worker.context import WorkerContext
from elastic_driver.worker.heartbeat.driver_connection import DriverConnection
from elastic_driver.worker.heartbeat.heartbeat_thread import next_pause
from elastic_driver.worker.heartbeat.training_progress import TrainingProgress
from rendezvous.server import RendezvousServer
from rendezvous.wire import Entries, Get, Set
from tests.support.job import eventually
from tests.worker.heartbeat.conftest import sending_heartbeats


def test_the_first_step_of_a_round_is_told_soon_though_the_heartbeat_before_could_wait_longer(
    server: RendezvousServer, token_file: str, events: queue.SimpleQueue[dict[str, Any]]
) -> None:
    progress = TrainingProgress()
    with sending_heartbeats(server, token_file, progress):
        # The thread has had time to begin a heartbeat that nothing but a new world can end.
        with pytest.raises(queue.Empty):
            events.get(timeout=0.3)
        server.apply((Set(contract.JOB_WORLD, b"{}"),))
        progress.enter(1, 0)
        progress.record_commit(1)
        event = events.get(timeout=10.0)  # that heartbeat waits for 20 s
    assert 0.0 < event.pop("seconds") < 10.0  # since the round was entered
    assert event == {"type": "worker_stepped", "worker": "a.0.1", "round": 1, "step": 1}


def test_a_loop_without_commits_reports_its_steps_and_numbers_soon(
    server: RendezvousServer, token_file: str
) -> None:
    progress = TrainingProgress()
    progress.enter(1, -1)
    progress.numbers, progress.total, progress.reported_samples = {"loss": 0.5}, 90, 32
    key = contract.worker_progress("a.0.1")

    def written() -> Progress | None:
        result = server.apply([Get((key,))])[0]
        entry = result.entries.get(key) if isinstance(result, Entries) else None
        return None if entry is None else decode_progress(entry.value)

    with sending_heartbeats(server, token_file, progress):
        assert written() is None
        progress.record_reported_step(time.monotonic(), 7)
        found = eventually(written, within=10.0, what="the first reported step")
        assert (found.step, found.reported, found.at) == (-1, 7, progress.done.at)
        assert (found.steps_done, found.samples_done) == (1, 32)
        assert (found.numbers, found.total) == ({"loss": 0.5}, 90)
        progress.record_commit(0)
        found = eventually(
            lambda: (w := written()) and w.reported is None and w, within=10.0, what="a commit"
        )
        assert (found.step, found.steps_done) == (0, 1), "the same step counts once"


def test_rank_0_tells_the_next_driver_that_the_round_has_had_a_step(
    server: RendezvousServer, token_file: str, events: queue.SimpleQueue[dict[str, Any]]
) -> None:
    progress = TrainingProgress()
    progress.enter(3, 0)
    progress.record_commit(1)
    told: list[dict[str, Any]] = []
    server.apply((Set(contract.JOB_DRIVER, encode(DriverTerm(1, server.url))),))
    with sending_heartbeats(server, token_file, progress):
        told.append(events.get(timeout=30.0))
        progress.record_commit(2)
        server.apply((Set(contract.JOB_DRIVER, encode(DriverTerm(2, server.url))),))
        told.append(events.get(timeout=30.0))
    # The time is counted until now, and the step is the round's first one all the same.
    assert 0.0 < told[0].pop("seconds") < told[1].pop("seconds")
    assert told == 2 * [{"type": "worker_stepped", "worker": "a.0.1", "round": 3, "step": 1}]


def test_who_passes_shares_on_hears_of_new_ones_at_once_and_says_what_it_has(
    server: RendezvousServer, token_file: str
) -> None:
    progress = TrainingProgress()
    progress.enter(1, 0)
    progress.division, progress.wants_allocations = Division(8, 3), True
    progress.record_commit(1)
    with sending_heartbeats(server, token_file, progress):
        for shares in ((5, 2, 1), (3, 3, 2)):
            server.apply((Set(contract.JOB_ALLOCATION, encode(Allocation(1, shares, "test"))),))
            eventually(
                lambda given=shares: progress.allocation and progress.allocation.shares == given,
                within=5.0,
                what=f"{shares} have been heard of",
            )
        (found,) = server.apply((Get((contract.worker_progress("a.0.1"),)),))
    assert isinstance(found, Entries)
    (entry,) = found.entries.values()
    assert decode(Progress, entry.value).division == Division(8, 3)


NONSENSE = (b"", b"\xff", b"[" * 100_000, b'{"round": "x"}', b'"\xff"', b"9" * 100)


def test_nonsense_in_the_drivers_keys_ends_no_heartbeat(
    server: RendezvousServer,
    token_file: str,
    events: queue.SimpleQueue[dict[str, Any]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    progress, notices = TrainingProgress(), queue.SimpleQueue[Notice]()
    progress.enter(1, 0)
    progress.division, progress.wants_allocations = Division(8, 3), True
    progress.record_commit(1)
    watched = (
        *(contract.JOB_NOTICE, contract.JOB_STACKS, contract.JOB_DRIVER, contract.JOB_STATE),
        contract.JOB_ALLOCATION,
    )
    lease = contract.worker_lease("a.0.1")
    with sending_heartbeats(server, token_file, progress, on_notice=notices.put):
        for value in NONSENSE:
            revision = revision_of(server, lease)
            server.apply([Set(key, value) for key in watched])
            eventually(
                lambda before=revision: revision_of(server, lease) > before,
                within=30.0,
                what=f"a heartbeat after {value[:9]!r}",
            )
        server.apply((Set(contract.JOB_NOTICE, encode(Notice(1, 5, "now in earnest"))),))
        assert notices.get(timeout=30.0).reason == "now in earnest"
        server.apply((Set(contract.JOB_STACKS, b"7"),))
        while (event := events.get(timeout=30.0))["type"] != "worker_stack":
            pass
        assert event["number"] == 7
    said = capfd.readouterr().err
    assert [said.count(f"passed over what is in {key}:") for key in watched] == [1] * 5


def revision_of(server: RendezvousServer, key: str) -> int:
    """Return the revision of a key; 0: it is missing."""
    (found,) = server.apply((Get((key,)),))
    assert isinstance(found, Entries)
    return max((entry.revision for entry in found.entries.values()), default=0)


def test_nonsense_in_a_workers_progress_is_no_progress() -> None:
    assert [decode_progress(value) for value in NONSENSE] == [None] * len(NONSENSE)


def test_the_heartbeats_of_a_world_that_trains_are_as_many_as_a_driver_bears() -> None:
    pauses = [next_pause(9.0, size, stepped=True) for size in (1, 64, 256, 512, 10_000)]
    assert pauses == [0.25, 0.25, 1.0, 2.0, 2.0]
    assert next_pause(2.0, 4, stepped=False) == 3.0, "there was nothing to tell"


def test_others_hear_nothing_of_shares(server: RendezvousServer, token_file: str) -> None:
    progress = TrainingProgress()
    progress.enter(1, 0)
    server.apply((Set(contract.JOB_ALLOCATION, encode(Allocation(1, (1, 1), "test"))),))
    with sending_heartbeats(server, token_file, progress):
        progress.record_commit(1)
        eventually(
            lambda: server.apply((Get((contract.worker_progress("a.0.1"),)),))[0].entries,
            within=5.0,
            what="a heartbeat after the step",
        )
    assert progress.allocation is None


def test_a_notice_is_passed_on_at_once_though_the_heartbeat_could_wait_longer(
    server: RendezvousServer, token_file: str, events: queue.SimpleQueue[dict[str, Any]]
) -> None:
    with sending_heartbeats(server, token_file, TrainingProgress(), 30.0):
        with pytest.raises(queue.Empty):
            events.get(timeout=0.3)
        os.kill(os.getpid(), signal.SIGUSR1)
        event = events.get(timeout=10.0)  # that heartbeat waits for 20 s
    assert (event["type"], event["worker"], event["deadline"]) == ("worker_leaving", "a.0.1", 30.0)


def written(server: RendezvousServer) -> Progress | None:
    """Return the progress that the worker has written; None: none yet."""
    key = contract.worker_progress("a.0.1")
    result = server.apply([Get((key,))])[0]
    entry = result.entries.get(key) if isinstance(result, Entries) else None
    return None if entry is None else decode_progress(entry.value)


def test_marks_of_the_state_travel_with_heartbeats_and_end_with_their_round(
    server: RendezvousServer, token_file: str
) -> None:
    progress = TrainingProgress()
    progress.enter(1, 0)
    with sending_heartbeats(server, token_file, progress):
        progress.record_commit(1)
        progress.record_mark(1, "aa" * 16)
        found = eventually(
            lambda: (w := written(server)) and w.marks and w, within=5.0, what="the first mark"
        )
        assert found.marks == (StateMark(1, "aa" * 16),)
        for step in range(2, 20):
            progress.record_commit(step)
            progress.record_mark(step, f"{step:02d}")
        found = eventually(
            lambda: (w := written(server)) and w.step == 19 and w, within=5.0, what="all marks"
        )
        assert [mark.step for mark in found.marks] == list(range(4, 20)), "the newest ones"
        assert found.commits == 19
        progress.leave()
        progress.enter(2, 19)
        progress.record_commit(20)
        found = eventually(
            lambda: (w := written(server)) and w.round == 2 and w, within=5.0, what="round 2"
        )
    assert (found.marks, found.commits) == ((), 1)


def test_a_worker_that_steps_its_optimizer_and_never_commits_reports_that(
    server: RendezvousServer, token_file: str
) -> None:
    progress = TrainingProgress()
    progress.enter(1, 7)
    with sending_heartbeats(server, token_file, progress):
        for _ in range(25):
            progress.record_optimizer_step()
        found = eventually(
            lambda: (w := written(server)) and w.optimizer_steps == 25 and w,
            within=1.5,  # sooner than a heartbeat that has nothing to tell
            what="steps of an optimizer",
        )
        assert (found.step, found.commits, found.optimizer_steps) == (7, 0, 25)
        assert found.reported == 25, "the round has no commit"
        progress.record_commit(8)
        found = eventually(
            lambda: (w := written(server)) and w.commits and w, within=10.0, what="a commit"
        )
        assert (found.step, found.reported) == (8, None)


def test_a_worker_that_is_asked_describes_its_state_leaf_by_leaf(
    server: RendezvousServer, token_file: str, events: queue.SimpleQueue[dict[str, Any]]
) -> None:
    progress = TrainingProgress()
    progress.enter(3, 0)
    kept = {5: [("lr", "ab", "0.02"), ("n" * 999, "c" * 99, "\ud800" + "x" * 999)]}
    progress.leaves = kept.get
    with sending_heartbeats(server, token_file, progress):
        for question in (
            StateQuestion(3, 5, ("b.0.1",)),  # another worker
            StateQuestion(2, 5, ("a.0.1",)),  # another round
            StateQuestion(3, 5, ("b.0.1", "a.0.1")),
        ):
            server.apply((Set(contract.JOB_STATE, encode(question)),))
        event = events.get(timeout=10.0)
        assert event == {
            "type": "state_described",
            "worker": "a.0.1",
            "round": 3,
            "step": 5,
            "leaves": [["lr", "ab", "0.02"], ["n" * 300, "c" * 32, "?" + "x" * 199]],
            "missing": False,
        }
        decode(StateDescribed, msgspec.json.encode(event))  # within the bounds
        server.apply((Set(contract.JOB_STATE, encode(StateQuestion(3, 4, ("a.0.1",)))),))
        assert events.get(timeout=10.0)["missing"], "this step is not kept"


def test_a_state_that_cannot_be_described_ends_no_heartbeat(
    server: RendezvousServer, token_file: str, events: queue.SimpleQueue[dict[str, Any]]
) -> None:
    progress = TrainingProgress()
    progress.enter(1, 0)

    def fails(_step: int) -> None:
        raise ValueError("changed meanwhile")

    progress.leaves = fails
    with sending_heartbeats(server, token_file, progress):
        for step in (1, 2):
            server.apply((Set(contract.JOB_STATE, encode(StateQuestion(1, step, ("a.0.1",)))),))
            event = events.get(timeout=10.0)
            assert (event["step"], event["missing"]) == (step, True)


def test_the_end_of_a_script_brings_the_last_marks_of_its_round(
    server: RendezvousServer, token_file: str, events: queue.SimpleQueue[dict[str, Any]]
) -> None:
    progress = TrainingProgress()
    born = WorkerContext(worker="a.0.1", endpoint=server.url, token_file=token_file)
    connection = DriverConnection(born, progress, lambda _notice: None, lambda: None)
    connection.start()
    progress.enter(4, 0)
    progress.record_commit(1)
    progress.record_mark(1, "ab")
    progress.leave()
    connection.stop(over_in=4)
    while (event := events.get(timeout=10.0))["type"] != "worker_ending":
        pass
    assert event["marks"] == [[1, "ab", ""]]
