"""Worker states: the table, and what an event that is not in it does."""

from __future__ import annotations

import pytest

from elastic_driver.job.rounds import ROUND_TRANSITIONS, Round, RoundState
from elastic_driver.job.workers import (
    ACTIVE,
    OCCUPYING,
    SPARES,
    TRANSITIONS,
    Worker,
    WorkerNews,
    Workers,
    WorkerState,
)
from elastic_driver.words.world import SlotInfo


def place(host: str = "a", slot: int = 0) -> SlotInfo:
    return SlotInfo(host, slot, 0, 0, 0, 1, 1, 1, 0, 1)


def new(registry: Workers, slot: int = 0) -> Worker:
    return registry.add("a", slot, founder=True, awaited=True)


def in_state(state: WorkerState) -> tuple[Workers, Worker]:
    registry = Workers()
    spare = state in SPARES
    worker = registry.add_spare("a", 0) if spare else new(registry)
    path = {
        WorkerState.WARMING: [],
        WorkerState.SPARE: [WorkerNews.READY],
        WorkerState.STARTING: [],
        WorkerState.READY: [WorkerNews.READY],
        WorkerState.RUNNING: [WorkerNews.ADMITTED],
        WorkerState.ENDING: [WorkerNews.READY, WorkerNews.ENDING],
        WorkerState.STOPPING: [WorkerNews.TOLD_TO_STOP],
        WorkerState.LOST: [WorkerNews.LOST],
        WorkerState.SUCCESS: [WorkerNews.EXITED_ZERO],
        WorkerState.FAILURE: [WorkerNews.EXITED_NONZERO],
        WorkerState.STOPPED: [WorkerNews.TOLD_TO_STOP, WorkerNews.EXITED_ZERO],
    }
    for news in path[state]:
        assert registry.apply(worker, news)
    assert worker.state is state
    return registry, worker


@pytest.mark.parametrize("state", WorkerState)
@pytest.mark.parametrize("news", WorkerNews)
def test_every_state_answers_every_news_as_the_table_says(
    state: WorkerState, news: WorkerNews
) -> None:
    registry, worker = in_state(state)
    after = TRANSITIONS[state].get(news)
    assert registry.apply(worker, news) is (after is not None)
    assert worker.state is (after or state)
    assert list(registry.having(worker.state)) == [worker]
    assert bool(registry.on_host("a")) is (worker.state in OCCUPYING)


def test_every_state_that_occupies_a_slot_can_end() -> None:
    for state in OCCUPYING:
        for news in (WorkerNews.EXITED_ZERO, WorkerNews.EXITED_NONZERO):
            assert TRANSITIONS[state][news] not in OCCUPYING


def test_a_worker_told_to_stop_neither_fails_nor_succeeds() -> None:
    assert TRANSITIONS[WorkerState.STOPPING] == {
        WorkerNews.EXITED_ZERO: WorkerState.STOPPED,
        WorkerNews.EXITED_NONZERO: WorkerState.STOPPED,
        WorkerNews.RECALLED: WorkerState.READY,
    }


def test_a_slots_incarnations_count_up_and_never_repeat() -> None:
    registry = Workers()
    first = new(registry)
    registry.apply(first, WorkerNews.EXITED_NONZERO)
    registry.forget_ended()
    second = new(registry)
    assert (first.id, second.id) == ("a.0.1", "a.0.2")
    assert list(registry.workers) == ["a.0.2"]


def test_seniority_is_the_order_of_first_admission_and_stays() -> None:
    registry = Workers()
    young, old = new(registry, 0), new(registry, 1)
    registry.admit(old, place(slot=1))
    registry.admit(young, place(slot=0))
    registry.apply(old, WorkerNews.READY)
    registry.admit(old, place(slot=1))
    assert sorted([young, old], key=lambda w: w.age) == [old, young]
    assert new(registry, 2).age > young.age


def test_a_worker_that_stops_cannot_become_a_member() -> None:
    registry, worker = in_state(WorkerState.STOPPING)
    with pytest.raises(ValueError, match="is stopping and cannot join"):
        registry.admit(worker, place())


def test_active_counts_those_who_stay() -> None:
    registry = Workers()
    workers = [new(registry, slot) for slot in range(4)]
    workers[0].leaving = "its host was removed"
    registry.apply(workers[1], WorkerNews.TOLD_TO_STOP)
    assert registry.active() == 2
    assert registry.count(*ACTIVE) == 3


def test_a_round_moves_only_as_its_table_says() -> None:
    for before in RoundState:
        for after in RoundState:
            round_ = Round(1, 0.0, state=before)
            if after in ROUND_TRANSITIONS[before]:
                round_.enter(after, 5.0)
                assert (round_.state, round_.since) == (after, 5.0)
            else:
                with pytest.raises(ValueError, match="cannot go from"):
                    round_.enter(after, 5.0)
                assert (round_.state, round_.since) == (before, 0.0)
