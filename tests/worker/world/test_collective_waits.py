"""Waits for collectives, given up while a peer takes no part."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo
from torch.futures import Future

from elastic_driver.errors import WorldBrokenError
from elastic_driver.failure_causes import looks_like_peer_loss
from elastic_driver.worker.world import gloo, groups
from elastic_driver.worker.world.gloo import CollectiveWaits, current_waits
from tests.support.coordinator import eventually

T = TypeVar("T")
REASON = "a collective was not ended by the loss of its peer"


@pytest.fixture
def pair() -> Iterator[list[Any]]:
    """Two ranks of one world, both in this process."""
    store, device = HashStore(), ProcessGroupGloo.create_device(hostname="127.0.0.1")
    with ThreadPoolExecutor(2) as pool:
        yield list(pool.map(lambda rank: groups.make_gloo(store, rank, 2, device), range(2)))


@pytest.fixture
def waits() -> Iterator[CollectiveWaits]:
    waits = CollectiveWaits()
    CollectiveWaits.use(waits)
    yield waits
    CollectiveWaits.use(None)
    assert current_waits() is None


def test_a_wait_ends_once_it_is_given_up(pair: list[Any], waits: CollectiveWaits) -> None:
    first, second = (torch.ones(3) for _ in pair)
    work = pair[0].allreduce([first])
    threading.Timer(0.3, waits.give_up, args=(REASON,)).start()  # more than one slice
    with pytest.raises(WorldBrokenError, match=REASON):
        work.wait()
    with pytest.raises(WorldBrokenError, match=REASON):
        work.wait()
    CollectiveWaits.use(CollectiveWaits())  # the next round's
    pair[1].allreduce([second]).wait()
    assert work.wait()
    assert first.tolist() == [2, 2, 2]


def test_beside_an_accelerator_only_an_exchange_over_gloo_is_given_up(pair: list[Any]) -> None:
    CollectiveWaits.use(None)
    waits = CollectiveWaits()
    threading.Timer(0.3, waits.give_up, args=(REASON,)).start()
    tensors = [torch.ones(3) for _ in pair]
    with waits.exchanging():
        assert waits.is_exchanging
        with pytest.raises(WorldBrokenError, match=REASON):
            pair[0].allreduce([tensors[0]]).wait()
    assert not waits.is_exchanging
    assert current_waits() is None
    assert pair[1].allreduce([tensors[1]]).wait(), "torch's own wait again"
    assert tensors[1].tolist() == [2, 2, 2]


def test_a_guarded_future_has_the_value_or_the_reason(
    pair: list[Any], waits: CollectiveWaits
) -> None:
    tensors = [torch.ones(2) for _ in pair]
    works = [g.allreduce([t]) for g, t in zip(pair, tensors, strict=True)]
    done = waits.guarded(works[0].get_future(), lambda _: tensors[0])
    assert done.wait().tolist() == [2, 2]
    lonely = pair[0].allreduce([tensors[0]])
    never = waits.guarded(lonely.get_future(), lambda _: tensors[0])
    waits.give_up(REASON)
    with pytest.raises(Exception, match=REASON):
        never.wait()
    with pytest.raises(WorldBrokenError, match=REASON):
        waits.guarded(lonely.get_future(), lambda _: tensors[0])
    CollectiveWaits.use(None)
    pair[1].allreduce([tensors[1]]).wait()
    assert lonely.wait(), "what was given up may still end, and changes nothing"


def test_the_error_that_torch_quotes_is_found(pair: list[Any], waits: CollectiveWaits) -> None:
    other = RuntimeError("Unable to cast this to Tensor")
    assert waits.cause_of(other) is other
    lonely = pair[0].allreduce([torch.ones(2)])
    waits.guarded(lonely.get_future(), lambda _: None)
    waits.give_up(REASON)
    quoted = waits.cause_of(RuntimeError(f"Unable to cast {REASON} to Tensor"))
    assert isinstance(quoted, WorldBrokenError)
    assert str(quoted) == REASON
    assert waits.cause_of(other) is other
    assert looks_like_peer_loss(f"Unable to cast {REASON} to Tensor"), "without @elastic.run too"
    CollectiveWaits.use(None)
    pair[1].allreduce([torch.ones(2)]).wait()
    lonely.wait()


def test_operations_whose_waits_were_given_up_are_known_until_they_end(
    pair: list[Any], waits: CollectiveWaits
) -> None:
    begun = [pair[0].allreduce([torch.ones(2)]) for _ in range(2)]
    waits.guarded(begun[1].get_future(), lambda _: None)
    assert not waits.ended(), "the source of a future is not done"
    waits.give_up(REASON)
    with pytest.raises(WorldBrokenError):
        begun[0].wait()
    assert not waits.ended()
    CollectiveWaits.use(None)
    for _ in begun:
        pair[1].allreduce([torch.ones(2)]).wait()
    eventually(waits.ended, "both have ended")


def test_messages_between_two_ranks_keep_their_own_wait(
    pair: list[Any], waits: CollectiveWaits
) -> None:
    received = torch.zeros(2)
    receiving = pair[1].recv([received], 0, 7)
    waits.give_up(REASON)
    pair[0].send([torch.ones(2)], 1, 7).wait()
    receiving.wait()
    assert received.tolist() == [1, 1]


def test_a_guarded_future_knows_the_device_of_its_value(
    pair: list[Any], waits: CollectiveWaits, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    class Noted(Future[T]):
        def __init__(self, **devices: Any) -> None:
            made.append(devices)  # a torch without CUDA takes no such device
            super().__init__()

    monkeypatch.setattr(gloo, "Future", Noted)
    works = [group.allreduce([torch.ones(1)]) for group in pair]
    for name in ("cpu", "cuda:1"):
        waits.guarded(works[0].get_future(), lambda _: None, torch.device(name))
    works[1].wait()
    assert made == [{}, {"devices": [torch.device("cuda:1")]}]
