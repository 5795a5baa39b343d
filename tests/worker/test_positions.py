"""What moves at a commit, and what is said where it cannot."""

from __future__ import annotations

import pytest

from elastic_driver.errors import HostsUpdatedInterrupt, UsageError, WorldBrokenError
from elastic_driver.worker.positions import (
    Advancing,
    Counted,
    CountsSamples,
    advance_all,
    division_of,
)
from elastic_driver.worker.run import broke_the_world
from elastic_driver.worker.sampler import ElasticSampler


class Position:
    """A position of a script's own; `advance` raises `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.moves = error, 0

    def advance(self) -> None:
        self.moves += 1
        if self.error is not None:
            raise self.error

    def reset(self) -> None:
        pass


def test_a_commit_moves_each_position_once() -> None:
    positions = [Position(), Position()]
    advance_all([("train", positions[0]), ("check", positions[1])])
    assert [position.moves for position in positions] == [1, 1]


def test_a_position_that_cannot_move_is_one_line_with_its_name() -> None:
    with pytest.raises(UsageError) as raised:
        advance_all([("data", Position(KeyError("shard 3\nof 9")))])
    assert str(raised.value) == (
        "state.data cannot be committed: Position.advance() raised KeyError: 'shard 3\\nof 9'"
    )
    with pytest.raises(UsageError) as raised:
        advance_all([("data", Position(RuntimeError()))])
    assert str(raised.value).endswith("raised RuntimeError: no message")


def test_what_one_of_ours_says_stays_with_its_name_before_it() -> None:
    sampler = ElasticSampler(range(8))
    iterator = iter(sampler)
    next(iterator)
    with pytest.raises(UsageError, match=r"^state\.train cannot be committed: ElasticSampler can"):
        advance_all([("train", sampler)])


@pytest.mark.parametrize("error", [HostsUpdatedInterrupt("a host"), WorldBrokenError("a peer")])
def test_a_change_of_the_world_passes_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        advance_all([("data", Position(error))])
    assert raised.value is error


def test_a_collective_that_breaks_in_a_position_of_a_script_still_counts_as_that() -> None:
    broken = RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer")
    with pytest.raises(UsageError) as raised:
        advance_all([("data", Position(broken))])
    assert broke_the_world(raised.value)


def test_our_samplers_are_positions_that_count() -> None:
    sampler = ElasticSampler(range(8))
    assert isinstance(sampler, Advancing)
    assert isinstance(sampler, CountsSamples)
    assert sampler.counted == Counted(0, 0.0)


class Virtual:
    micro_batch_size = 5

    def __init__(self, count: int | None) -> None:
        self.count = count

    @property
    def virtual_workers(self) -> int:
        if self.count is None:
            raise UsageError("call elastic.init() first")
        return self.count


def test_the_division_of_a_step_is_known_where_the_virtual_workers_are() -> None:
    assert division_of([object(), Virtual(4)]) == (4, 20)
    assert division_of([Virtual(None)]) == (None, None)
    assert division_of([object()]) == (None, None)
