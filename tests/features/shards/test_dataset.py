"""Sharded data in one process: a ledger of its own, what is trained, what is rolled back."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_driver as elastic
from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.features.shards.messages import (
    ReadStatus,
    ShardAccepted,
    ShardCounts,
    ShardRefused,
    ShardStatus,
)
from elastic_driver.features.shards.worker import dataset as sharded
from elastic_driver.job.events import LeaseExpired
from tests.support.gloo import run_ranks


class Numbers(torch.utils.data.Dataset[int]):
    """Record i is the number i, or (partition, offset) as it is asked for."""

    def __getitem__(self, index: Any) -> Any:
        return index


def as_they_are(records: list[Any]) -> list[Any]:
    return records


def numbers(records: int = 50, batch_size: int = 4, **options: Any) -> elastic.ShardedDataset:
    given: dict[str, Any] = {"records": records, "shard_records": 8, "collate_fn": as_they_are}
    return elastic.ShardedDataset("d", Numbers(), batch_size, **{**given, **options})


def counts(data: elastic.ShardedDataset) -> ShardCounts:
    status: ShardStatus = data.client._ask("", ReadStatus(), ShardStatus)
    return status.counts


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ELASTIC_WORKER_ID", "ELASTIC_RENDEZVOUS", "ELASTIC_TOKEN_FILE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sharded, "LINGER_S", 0.02)


@pytest.mark.parametrize("loaders", [0, 2])
def test_every_record_of_every_epoch_comes_once(loaders: int) -> None:
    data = numbers(epochs=2, num_workers=loaders)
    seen = Counter(record for batch in data for record in batch)
    assert seen == dict.fromkeys(range(50), 2)
    assert counts(data).done_records == 100
    assert data.replayed == 0
    assert list(data) == [], "the data have ended, and stay so"


def test_shuffling_follows_the_seed_within_shards_and_among_them() -> None:
    def order(**options: Any) -> list[int]:
        return [record for batch in numbers(**options) for record in batch]

    assert order(shuffle=False) == list(range(50))
    assert order(seed=1) == order(seed=1) != order(seed=2)
    assert order(seed=1) != sorted(order(seed=1))


def test_a_shard_is_done_when_its_last_step_is_committed_not_when_it_was_read() -> None:
    data = numbers(shuffle=False)
    data.state_dict()
    batches = iter(data)
    for _ in range(2):  # both steps of the first shard
        next(batches)
        data.advance()
    next(batches)
    assert counts(data).done == 0, "trained, but not committed"
    data.state_dict()
    for _ in range(2):
        next(batches)
    assert counts(data).done == 1


def test_after_a_roll_back_training_goes_on_where_the_commit_was() -> None:
    data = numbers(shuffle=False)
    batches = iter(data)
    next(batches)
    data.advance()
    saved = data.state_dict()
    assert next(batches) == [4, 5, 6, 7]
    data.advance()
    assert next(batches) == [8, 9, 10, 11]
    data.load_state_dict(saved)
    assert [record for batch in data for record in batch] == list(range(4, 50))
    assert counts(data).done_records == 50


def test_commits_that_are_far_apart_hold_nobody_up_at_the_end() -> None:
    data = numbers(shuffle=False)
    data.state_dict()  # and no commit ever after
    assert sum(len(batch) for batch in data) == 50
    assert counts(data).done_records == 50


def test_a_world_that_was_lost_as_a_whole_leaves_its_shards_to_the_next() -> None:
    lost = numbers(shuffle=False)
    next(iter(lost))
    fresh = numbers(shuffle=False)
    fresh.client = lost.client  # the same driver
    assert [record for batch in fresh for record in batch] == list(range(50))


def test_a_shard_in_quarantine_is_left_out_and_named_at_the_end() -> None:
    data = numbers(20, shuffle=False, max_losses=1)
    batches = iter(data)
    next(batches)
    data.advance()
    data.client._own.handle(LeaseExpired("worker", "a.0.1", 30.0), 0.0)
    seen: list[int] = []
    with pytest.raises(elastic.IncompleteDataError, match="records 0–7") as caught:
        seen.extend(record for batch in data for record in batch)  # a rejoin begins a new pass
    assert seen == list(range(8, 20))
    assert caught.value.shards == ("epoch 0, records 0–7",)


def test_a_stream_is_trained_as_it_grows_and_ends_when_it_is_closed() -> None:
    options = {"records": None, "partitions": {"p": 5, "q": 0}, "shard_records": 4}
    data = numbers(**options)
    data.client.extend("p", 11)

    def close() -> None:
        data.client.extend("q", 3, closed=True)
        data.client.extend("p", 11, closed=True)

    closer = threading.Timer(0.2, close)
    closer.start()
    seen = [record for batch in data for record in batch]
    closer.join()
    assert sorted(seen) == [*(("p", n) for n in range(5, 11)), *(("q", n) for n in range(3))]


def test_a_checkpoint_brings_a_data_set_back() -> None:
    data = numbers(shuffle=False)
    batches = iter(data)
    for _ in range(4):
        next(batches)
        data.advance()
    next(batches)
    saved = data.client.checkpoint()
    later = numbers(shuffle=False)
    later.client.restore(saved)
    assert [record for batch in later for record in batch] == list(range(16, 50))


def test_a_client_trains_shards_by_itself_and_hears_of_a_second_report() -> None:
    client = elastic.ShardClient("d", records=20, shard_records=10)
    granted_all = []
    while (granted := client.next()) is not None:
        assert isinstance(client.done(granted), ShardAccepted)
        assert isinstance(client.done(granted), ShardAccepted), "a repeat is no error"
        granted_all.append(granted)
    assert sorted(g.shard.start for g in granted_all) == [0, 10]
    assert isinstance(client.done(granted_all[0]), ShardRefused)


def test_a_client_that_waits_too_long_says_for_what() -> None:
    client = elastic.ShardClient("s", partitions={"p": 0}, shard_records=10)
    with pytest.raises(ClusterError, match="no new records"):
        client.next(timeout=0.05)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"records": None}, "records=… for a data set, or partitions"),
        ({"partitions": {"p": 0}}, "records=… for a data set, or partitions"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"shard_records": 0}, "makes no sense"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        numbers(**options)


def test_a_loader_around_it_is_told_to_stay_away() -> None:
    loader = torch.utils.data.DataLoader(numbers(), batch_size=None, num_workers=1)
    with pytest.raises(UsageError, match="give num_workers"):
        list(loader)


def test_data_that_each_trains_apart_are_no_part_of_a_common_state() -> None:
    with pytest.raises(UsageError, match="leave it out"):
        numbers(together=False).state_dict()


def train(rank: int, size: int, records: int) -> tuple[list[list[int]], int]:
    data = numbers(records, epochs=1)
    return list(data), data.replayed


def test_ranks_make_the_same_steps_and_share_each_one(tmp_path: Path) -> None:
    ranks = run_ranks(3, train, tmp_path, 50)
    steps = [len(batches) for batches, _ in ranks]
    assert len(set(steps)) == 1, "nobody waits at the end"
    seen = Counter(n for batches, _ in ranks for batch in batches for n in batch)
    assert set(seen) == set(range(50))
    assert [replayed for _, replayed in ranks] == [seen.total() - 50] * 3
    for batches in zip(*(batches for batches, _ in ranks), strict=True):
        assert len({len(batch) for batch in batches}) == 1, "equal shares: the mean is right"
