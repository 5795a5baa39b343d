"""From what workers wrote of their shares to a published allocation and an event."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elastic_driver import contract
from elastic_driver.core.decisions import Announce
from elastic_driver.core.documents import Allocation, Division, Progress, Sample, decode
from elastic_driver.runtime.work_mover import WorkMover
from rendezvous.errors import RendezvousError
from rendezvous.wire import Operation, Result, Set
from tests.runtime.test_slow_ranks import world


class Store:
    """What was published."""

    def __init__(self) -> None:
        self.published: list[Allocation] = []
        self.answers = True

    def apply(self, operations: Sequence[Operation]) -> tuple[Result, ...]:
        (written,) = operations
        assert isinstance(written, Set)
        assert written.key == contract.JOB_ALLOCATION
        if not self.answers:
            raise RendezvousError("too busy")
        self.published.append(decode(Allocation, written.value))
        return ()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def mover(store: Store) -> WorkMover:
    mover = WorkMover(store.apply)
    mover.enter(world())
    return mover


def train(
    mover: WorkMover, first: int, shares: tuple[int, ...], *, slow: int | None = 1
) -> list[Announce]:
    """Five looks, each with eight new steps of every rank, as of a beat."""
    events = []
    for start in range(first, first + 40, 8):
        read = []
        for rank, share in enumerate(shares):
            seconds = 0.3 if rank == slow else 0.1
            samples = tuple(Sample(s, seconds, seconds) for s in range(start, start + 8))
            read.append(Progress(1, start + 7, 0.5, samples, Division(sum(shares), share)))
        events += mover.look(read)
    return events


def test_moved_work_is_published_under_its_round_and_announced(
    store: Store, mover: WorkMover
) -> None:
    (event,) = train(mover, 1, (4, 4, 4))
    (given,) = store.published
    assert (given.round, given.shares) == (1, (5, 2, 5))
    assert (event.event, event.rank, event.host, event.worker) == ("work_moved", 1, "b", "b.0.1")
    assert event.detail == {"shares": "5 2 5"}
    assert event.reason == given.reason
    assert "rank 1 on b came last" in event.reason
    assert train(mover, 41, (5, 2, 5)) == []


def test_survivors_of_a_round_get_shares_that_fit_them_at_once(
    store: Store, mover: WorkMover
) -> None:
    train(mover, 1, (4, 4, 4))
    train(mover, 41, (5, 2, 5))
    mover.enter(world(2, round_id=2, version=80))
    said = [Progress(2, 81, 0.5, (), Division(12, 6)) for _ in range(2)]
    (event,) = mover.look(said)
    assert event.round == 2
    assert store.published[-1].shares == (9, 3)


def test_without_ranks_that_ask_for_it_nothing_is_moved(store: Store, mover: WorkMover) -> None:
    for step in range(1, 80):
        times = (0.1, 0.9, 0.1)
        samples = [(Sample(step, seconds, seconds),) for seconds in times]
        assert mover.look([Progress(1, step, 0.5, each) for each in samples]) == []
    assert mover.look([None, None, None]) == []
    assert store.published == []


def test_what_a_busy_store_did_not_take_is_published_at_the_next_look(
    store: Store, mover: WorkMover
) -> None:
    store.answers = False
    assert train(mover, 1, (4, 4, 4)) == []
    store.answers = True
    (event,) = mover.look([None, None, None])
    assert event.event == "work_moved"
    assert mover.look([None, None, None]) == []
    assert [given.shares for given in store.published] == [(5, 2, 5)]


def test_before_the_first_world_there_is_nothing_to_move(store: Store) -> None:
    assert WorkMover(store.apply).look([]) == []
