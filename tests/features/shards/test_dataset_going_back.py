"""A model that goes back: to a commit, to a checkpoint, to its beginning, under any driver.

The rule: at the end the model that is there was trained with every record once in each epoch,
whatever was trained in models that were lost.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

import elastic_driver as elastic
from elastic_driver.errors import UsageError
from elastic_driver.features.shards.machine import DataSets
from elastic_driver.features.shards.messages import NextRequest, ShardRequest
from elastic_driver.features.shards.worker import dataset as sharded
from elastic_driver.job.events import DriverResumed, LeaseExpired
from tests.features.shards.test_dataset import Numbers, as_they_are

SEEDS = range(60)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ELASTIC_WORKER_ID", "ELASTIC_RENDEZVOUS", "ELASTIC_TOKEN_FILE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sharded, "LINGER_S", 0.0)


class Life:
    """A world of one with its model, a driver that may be another one, and a disk.

    The model is a count of the records that it was trained with.
    """

    def __init__(self, batch_size: int = 4, **options: Any) -> None:
        self.options = {"shard_records": 8, "collate_fn": as_they_are, **options}
        self.batch_size = batch_size
        self.driver = DataSets()
        self.disk: tuple[Counter[Any], Any, bytes] | None = None  # the newest checkpoint
        self.begin()

    def begin(self) -> None:
        """Start a new process: from the checkpoint, or with an untrained model."""
        sharded._tellers.clear()
        self.data = elastic.ShardedDataset("d", Numbers(), self.batch_size, **self.options)
        self.data.client._own = self.driver
        self.model: Counter[Any] = Counter()
        if self.disk is not None:
            self.model, state, note = copy.deepcopy(self.disk)
            self.data.load_state_dict(state)
            if note:
                self.data.restore_durable(note)
        self.batches: Iterator[Any] = iter(self.data)
        self.commit()

    def step(self) -> bool:
        """Train a batch; return whether there was one."""
        batch = next(self.batches, None)
        if batch is None:
            return False
        self.model.update(batch)
        self.data.advance()
        return True

    def commit(self) -> None:
        self.committed = copy.deepcopy((self.model, self.data.state_dict()))

    def roll_back(self) -> None:
        """Go back to the last commit, as after the loss of another member."""
        self.model = self.committed[0].copy()
        self.data.load_state_dict(copy.deepcopy(self.committed[1]))
        self.batches = iter(self.data)

    def save(self) -> None:
        """Write a checkpoint of the last commit; the note is read later, as by another thread."""
        self.disk = (*copy.deepcopy(self.committed), self.data.durable()())

    def lose_driver(self, events: int = 0) -> None:
        """Go on with the next driver of the run; its journal lacks the last events."""
        self.driver = self.driver if not events else DataSets.restored(self.journal)
        self.driver.handle(DriverResumed(self.terms + 1, "the driver has died"), 0.0)
        self.terms += 1
        self.data.client._own = self.driver
        self.roll_back()

    terms = 1
    journal = b""

    def keep(self) -> None:
        self.journal = self.driver.snapshot()

    def die(self, *, with_driver: bool = False) -> None:
        """Lose every worker, and perhaps the run."""
        if with_driver:
            self.driver, self.journal = DataSets(), b""
        else:
            event = LeaseExpired("worker", "a.0.1", 30.0)
            self.driver.handle(event, 0.0)
        self.begin()

    def finish(self) -> Counter[Any]:
        while self.step():
            self.commit()
        return self.model

    def done_records(self) -> int:
        return self.data.client.checkpoint().state.done_records


def train(life: Life, steps: int) -> None:
    for _ in range(steps):
        assert life.step()
        life.commit()


@pytest.mark.parametrize("with_driver", [False, True])
@pytest.mark.parametrize("steps", [5, 11, 13, 22])
def test_a_checkpoint_gives_back_what_was_trained_since(steps: int, *, with_driver: bool) -> None:
    life = Life(records=50, epochs=2)
    train(life, steps)
    life.save()
    train(life, 24 - steps)
    life.die(with_driver=with_driver)
    assert life.finish() == dict.fromkeys(range(50), 2)
    assert life.done_records() == 100


def test_without_a_checkpoint_the_data_begin_with_the_model() -> None:
    life = Life(records=50)
    train(life, 7)
    life.die()
    assert life.finish() == dict.fromkeys(range(50), 1)
    assert life.done_records() == 50


def test_what_was_restored_by_hand_is_where_the_first_world_begins() -> None:
    before = Life(records=50, shuffle=False)
    train(before, 4)  # the second shard is trained, and not reported yet
    saved = before.data.client.checkpoint()
    life = Life(records=50, shuffle=False)
    life.data.client.restore(saved)
    train(life, 3)
    life.die()
    assert life.finish() == dict.fromkeys(range(8, 50), 1)


def test_data_that_are_in_no_state_go_on_where_the_driver_is() -> None:
    life = Life(records=50, shuffle=False)
    data = elastic.ShardedDataset("d", Numbers(), 4, **life.options)
    data.client._own = life.driver
    batches = iter(data)
    for _ in range(4):
        next(batches)
        data.advance()
    next(batches)  # the fifth is not trained
    sharded._tellers.clear()
    again = elastic.ShardedDataset("d", Numbers(), 4, **life.options)
    again.client._own = life.driver
    assert [record for batch in again for record in batch] == list(range(16, 50))


def test_a_second_object_of_the_same_process_goes_on_where_the_first_one_was() -> None:
    life = Life(records=50, shuffle=False)
    train(life, 6)  # the third shard is trained, and not reported yet
    second = elastic.ShardedDataset("d", Numbers(), 4, **life.options)
    second.client._own = life.driver
    second.state_dict()
    assert [record for batch in second for record in batch] == list(range(16, 50))


def test_a_shard_that_kills_whole_worlds_is_in_quarantine_after_three() -> None:
    life = Life(records=24, shuffle=False)
    train(life, 1)
    life.save()
    for _ in range(2):
        life.die()
        assert life.step(), "half of the shard is in the checkpoint"
    life.die()
    with pytest.raises(elastic.IncompleteDataError, match="records 0–7"):
        life.finish()
    assert life.model == dict.fromkeys([*range(4), *range(8, 24)], 1)
    life.save()
    life.die(with_driver=True)
    with pytest.raises(elastic.IncompleteDataError, match="records 0–7"):
        life.finish()


def test_a_world_that_is_lost_at_once_counts_as_one_loss() -> None:
    life = Life(records=24, shuffle=False)
    train(life, 1)
    for worker in range(5):
        life.driver.handle(LeaseExpired("worker", f"a.{worker}.1", 30.0), 0.0)
    life.die()
    assert life.finish() == dict.fromkeys(range(24), 1)


def test_a_grant_that_nobody_received_holds_up_no_epoch() -> None:
    life = Life(records=24, epochs=2, shuffle=False)
    train(life, 2)
    stale = NextRequest("world", life.data.client.dataset, request="stale")
    life.driver.handle(ShardRequest(1, "d", stale), 0.0)
    assert life.finish() == dict.fromkeys(range(24), 2)


def test_a_wait_of_an_earlier_world_gets_no_shard() -> None:
    life = Life(records=16, shuffle=False)
    train(life, 1)
    life.driver.handle(ShardRequest(1, "d", NextRequest("world", life.data.client.dataset)), 0.0)
    waits = NextRequest("world", life.data.client.dataset, wait=60.0)
    assert life.driver.handle(ShardRequest(2, "d", waits), 0.0) == []
    life.roll_back()
    train(life, 1)
    assert 2 not in life.driver._waiting
    assert life.finish() == dict.fromkeys(range(16), 1)


def test_a_stream_goes_back_and_remembers_how_far_it_was_read() -> None:
    life = Life(records=None, partitions={"p": 5, "q": 0}, shard_records=4)
    life.data.client.extend("p", 25)
    life.data.client.extend("q", 3, closed=True)
    train(life, 3)
    life.data.client.extend("p", 31, closed=True)
    life.save()
    train(life, 2)
    life.die(with_driver=True)
    everything = [*(("p", n) for n in range(5, 31)), *(("q", n) for n in range(3))]
    assert life.finish() == dict.fromkeys(everything, 1)


def test_a_stream_of_which_the_driver_told_nothing_is_extended_again() -> None:
    life = Life(records=None, partitions={"p": 0}, shard_records=4)
    life.data.client.extend("p", 12)
    train(life, 1)
    life.data.client.look = lambda _timeout: None  # type: ignore[method-assign]  # it is away
    life.save()
    life.die(with_driver=True)
    life.data.client.extend("p", 12, closed=True)
    assert life.finish() == dict.fromkeys((("p", n) for n in range(12)), 1)


def test_a_stream_may_have_more_partitions_later() -> None:
    life = Life(records=None, partitions={"p": 0}, shard_records=4)
    life.data.client.extend("p", 10, closed=True)
    train(life, 2)
    life.save()
    life.options["partitions"] = {"p": 0, "new": 0}
    life.die(with_driver=True)
    life.data.client.extend("new", 5, closed=True)
    everything = [*(("p", n) for n in range(10)), *(("new", n) for n in range(5))]
    assert life.finish() == dict.fromkeys(everything, 1)


def test_more_epochs_may_be_trained_later() -> None:
    life = Life(records=20)
    life.finish()
    life.save()
    life.options["epochs"] = 3
    life.die(with_driver=True)
    assert life.finish() == dict.fromkeys(range(20), 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"records": 51}, "records=50, and have 51 now"),
        ({"shard_records": 10}, "shard_records=8, and have 10 now"),
        ({"seed": 1}, "seed=0, and have 1 now"),
        ({"shuffle": False}, "shuffle=True, and have False now"),
        ({"records": None, "partitions": {"p": 0}}, "were a range, and are a stream now"),
    ],
)
def test_other_data_than_the_model_was_trained_with_are_refused(
    options: dict[str, Any], says: str
) -> None:
    life = Life(records=50)
    train(life, 3)
    life.save()
    life.options |= options
    with pytest.raises(UsageError, match=says):
        life.die(with_driver=True)


def test_a_partition_that_is_gone_is_named() -> None:
    life = Life(records=None, partitions={"p": 0, "q": 0})
    life.data.client.extend("p", 10)
    train(life, 1)
    life.save()
    life.options["partitions"] = {"q": 0}
    with pytest.raises(UsageError, match="partition 'p', and lack it now"):
        life.die(with_driver=True)


# ---- anything in any order -----------------------------------------------------------------


def chances(life: Life, random: Random) -> list[Callable[[], Any]]:
    """What may happen to a life, each with its weight by repetition."""
    return [
        *[life.step] * 12,
        *[life.commit] * 8,
        *[life.save] * 2,
        *[life.keep] * 2,
        life.roll_back,
        life.lose_driver,
        lambda: life.lose_driver(1) if life.journal else None,
        lambda: life.die(with_driver=random.random() < 0.4),
    ]


def live(seed: int, max_losses: int) -> tuple[Life, dict[Any, int]]:
    """Return a life after much has happened, and what its model should be."""
    random = Random(seed)
    size, epochs = random.randint(1, 60), random.randint(1, 3)
    given: dict[str, Any] = {"shard_records": random.randint(1, 12), "max_losses": max_losses}
    batch = random.randint(1, 9)
    if random.random() < 0.3:
        starts = {name: random.randint(0, 9) for name in "pqr"[: random.randint(1, 3)]}
        life = Life(batch, records=None, partitions=starts, **given)
        wanted: dict[Any, int] = {}
        for name, start in starts.items():
            life.data.client.extend(name, start + size, closed=True)
            wanted |= dict.fromkeys(((name, n) for n in range(start, start + size)), 1)
        life.step()  # from here on the state knows how far the stream goes
        life.commit()
        life.save()
    else:
        given |= {"records": size, "epochs": epochs, "shuffle": random.random() < 0.7}
        life, wanted = Life(batch, seed=seed, **given), dict.fromkeys(range(size), epochs)
    for _ in range(60):
        with contextlib.suppress(elastic.IncompleteDataError):
            random.choice(chances(life, random))()
    life.roll_back()
    return life, wanted


@pytest.mark.parametrize("seed", SEEDS)
def test_every_record_is_in_the_model_once_an_epoch_whatever_happens(seed: int) -> None:
    life, wanted = live(seed, max_losses=10**6)
    assert life.finish() == wanted
    assert life.done_records() == sum(wanted.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_left_out_as_deadly_stays_out_and_all_else_is_trained(seed: int) -> None:
    life, wanted = live(seed, max_losses=2)
    with contextlib.suppress(elastic.IncompleteDataError):
        life.finish()
    poison = life.driver._ledgers["d"]._poison
    deadly = {(p, n) if p else n for p, start, stop in poison for n in range(start, stop)}
    assert {n: c for n, c in life.model.items() if n not in deadly} == {
        n: c for n, c in wanted.items() if n not in deadly
    }
    assert all(life.model[n] <= wanted[n] for n in deadly)
