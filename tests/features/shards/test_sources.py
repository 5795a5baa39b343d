"""Saved states of data sets: those that a ledger makes fit, made-up ones are refused."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from elastic_driver.errors import UsageError
from elastic_driver.features.shards.messages import (
    Granted,
    Quarantined,
    RangeDescription,
    RangeState,
    Shard,
    StreamDescription,
    StreamState,
)
from elastic_driver.features.shards.shard_ledger import ShardLedger
from elastic_driver.features.shards.sources import StreamSource, check_saved

DATA = RangeDescription(records=95, shard_records=10, epochs=3, seed=7)
STREAM = StreamDescription({"p": 5, "q": 0}, 10)


def trained(seed: int, dataset: RangeDescription | StreamDescription) -> ShardLedger:
    """A ledger that workers have used, some of which were lost."""
    random, ledger = Random(seed), ShardLedger(dataset, max_held=4)
    held: list[tuple[str, Granted]] = []
    for turn in range(random.randint(0, 60)):
        worker = random.choice("abc")
        if isinstance(ledger.source, StreamSource):
            ledger.source.extend(random.choice("pq"), random.randint(0, 300))
        if held and random.random() < 0.4:
            who, got = held.pop(random.randrange(len(held)))
            ledger.done(who, got.shard, got.token, turn)
        elif random.random() < 0.2:
            ledger.worker_lost(worker, "it died")
            held = [each for each in held if each[0] != worker]
        elif isinstance(got := ledger.next(worker, turn), Granted):
            held.append((worker, got))
    return ledger


@pytest.mark.parametrize("dataset", [DATA, STREAM, RangeDescription(0, 1), RangeDescription(7, 9)])
@pytest.mark.parametrize("seed", range(40))
def test_what_a_ledger_has_made_can_be_restored(
    seed: int, dataset: RangeDescription | StreamDescription
) -> None:
    saved = trained(seed, dataset).checkpoint()
    check_saved(dataset, saved.state)
    fresh = ShardLedger(dataset)
    fresh.restore(saved)
    again = fresh.checkpoint().state
    check_saved(dataset, again)
    assert (again.done_records, again.source) == (saved.state.done_records, saved.state.source)


FIRST, SECOND = Shard(0, "", 0, 10), Shard(0, "", 10, 20)
PLAIN = RangeDescription(95, 10, shuffle=False)
FITS: dict[str, Any] = {
    "source": RangeState(0, 4),
    "outstanding": (FIRST, SECOND),
    "losses": (),
    "quarantined": (),
    "done": 2,
    "done_records": 20,
    "next_token": 5,
}


@pytest.mark.parametrize(
    "change",
    [
        {"outstanding": ()},
        {"outstanding": (), "done": 4},
        {"done_records": 10},
        {"done": 1},
        {"done": 21},
        {"source": RangeState(0, 10)},
        {"source": RangeState(2**62, 4)},
        {"source": RangeState(0, 11)},
        {"source": StreamState({}, {}, ())},
        {"outstanding": (FIRST, FIRST)},
        {"outstanding": (FIRST, Shard(0, "", 10, 21))},
        {"outstanding": (FIRST, Shard(0, "", 11, 20))},
        {"outstanding": (FIRST, Shard(0, "x", 10, 20))},
        {"outstanding": (FIRST, Shard(0, "", 60, 70))},
        {"outstanding": (FIRST, Shard(1, "", 10, 20))},
        {"losses": ((Shard(0, "", 500, 510), 3),)},
        {"quarantined": (Quarantined(Shard(0, "", 5, 15), 3, "made up"),)},
        {"next_token": 0},
        {"next_token": 2**62},
    ],
    ids=str,
)
def test_what_no_ledger_can_have_made_is_refused(change: dict[str, Any]) -> None:
    empty = ShardLedger(PLAIN).checkpoint()
    state = msgspec.structs.replace(empty.state, **FITS)
    check_saved(PLAIN, state)
    with pytest.raises(UsageError, match="saved shard progress"):
        check_saved(PLAIN, msgspec.structs.replace(state, **change))


@pytest.mark.parametrize(
    "source",
    [
        StreamState({"p": 15, "q": 0, "x": 1}, {}, ()),
        StreamState({"p": 4, "q": 0}, {}, ()),
        StreamState({"p": 30, "q": 0}, {}, ()),
        RangeState(0, 1),
    ],
    ids=str,
)
def test_a_stream_counts_its_records_too(source: StreamState | RangeState) -> None:
    empty = ShardLedger(STREAM).checkpoint().state
    found = {"done": 1, "done_records": 10, "source": StreamState({"p": 15, "q": 0}, {}, ())}
    state = msgspec.structs.replace(empty, **found)
    check_saved(STREAM, state)
    with pytest.raises(UsageError, match="saved shard progress"):
        check_saved(STREAM, msgspec.structs.replace(state, source=source))
