"""The data sets' machine without HTTP: which requests wait, and until when."""

from __future__ import annotations

import msgspec
import pytest

from elastic_driver.features.shards import machine as shards
from elastic_driver.features.shards.machine import LEASE_S, DataSets
from elastic_driver.features.shards.messages import (
    DoneRequest,
    Granted,
    NextRequest,
    RangeDescription,
    ReadStatus,
    ShardAccepted,
    ShardCheckpoint,
    ShardRequest,
    StreamDescription,
    Wait,
)
from elastic_driver.job.events import DriverResumed, Tick
from elastic_driver.kernel.machine import Reply
from elastic_driver.kernel.services import Rejection, RequestDropped

TWENTY = RangeDescription(20, 10, shuffle=False)


RESUMED = DriverResumed(2, "the driver has died")


def replies(
    datasets: DataSets, event: ShardRequest | RequestDropped | DriverResumed | Tick, now: float
) -> dict:
    found = datasets.handle(event, now)
    assert datasets.check() == []
    return {reply.ticket: reply.document for reply in found if isinstance(reply, Reply)}


def ask(
    datasets: DataSets, ticket: int, worker: str, wait: float, now: float = 0.0, name: str = ""
) -> dict:
    request = NextRequest(worker, TWENTY, wait, request=name)
    return replies(datasets, ShardRequest(ticket, "d", request), now)


def test_the_deadline_is_the_first_end_of_a_wait_that_still_lasts() -> None:
    datasets = DataSets()
    granted = [ask(datasets, ticket, "a", 0.0)[ticket] for ticket in (1, 2)]
    assert datasets.deadline() == LEASE_S / 4
    for ticket, wait in ((3, 5.0), (4, 2.0), (5, 3.0), (6, 9.0)):
        assert ask(datasets, ticket, f"w{ticket}", wait) == {}
    assert datasets.deadline() == 2.0
    replies(datasets, RequestDropped("shards", 4), 1.0)
    assert datasets.deadline() == 3.0
    (late,) = replies(datasets, Tick(), 3.0).items()
    assert late[0] == 5
    assert isinstance(late[1], Wait)
    assert datasets.deadline() == 5.0
    for number, each in enumerate(granted):
        assert isinstance(each, Granted)
        done = ShardRequest(7 + number, "d", DoneRequest("a", each.shard, each.token))
        answered = replies(datasets, done, 4.0)
    assert answered.keys() == {8, 3, 6}, "the end answers all who wait"
    assert datasets.deadline() == LEASE_S / 4


# ---- room -------------------------------------------------------------------------------------


def test_all_data_sets_have_a_bounded_size_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_BYTES", 20_000)
    datasets = DataSets()
    partitions = {f"{number:0100d}": 0 for number in range(100)}
    large = NextRequest("a", StreamDescription(partitions, 1))  # 10 KB

    def answer(name: str, request: NextRequest | ShardCheckpoint) -> object:
        return replies(datasets, ShardRequest(1, name, request), 0.0)[1]

    assert isinstance(answer("one", large), Wait)
    refused = answer("two", large)
    assert isinstance(refused, Rejection)
    assert refused.code == "too_large"
    assert isinstance(answer("two", NextRequest("a", TWENTY)), Granted)
    saved = datasets._ledgers["two"].checkpoint()
    assert answer("two", saved) is None
    shard = saved.state.outstanding[0]
    state = msgspec.structs.replace(saved.state, outstanding=(shard,) * 1000)
    refused = answer("two", msgspec.structs.replace(saved, state=state))
    assert isinstance(refused, Rejection)
    assert refused.code == "too_large"
    assert isinstance(answer("two", NextRequest("a", TWENTY)), Granted), "it is as it was"


SMALL = dict.fromkeys("pq", 0)


@pytest.mark.parametrize("what", ["number", "bytes"])
def test_one_worker_leaves_room_to_the_others_and_all_workers_leave_some_to_people(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    asked = NextRequest("a", StreamDescription(SMALL, 1))
    size = len(msgspec.json.encode(asked.dataset))
    if what == "bytes":
        monkeypatch.setattr(shards, "MAX_BYTES", 16 * size)
    else:
        monkeypatch.setattr(shards, "MAX_DATASETS", 16)
    datasets, codes = DataSets(), list[str]()

    def opens(name: str, owner: str) -> bool:
        answer = replies(datasets, ShardRequest(1, name, asked, owner), 0.0)[1]
        codes.extend([answer.code] if isinstance(answer, Rejection) else [])
        return not isinstance(answer, Rejection)

    assert [opens(f"a-{n}", "h.0") for n in range(9)].count(True) == 4, "a quarter"
    assert opens("a-0", "h.1"), "what is open is open to all"
    assert [opens(f"{s}-{n}", f"h.{s}") for s in range(1, 5) for n in range(4)].count(True) == 10
    assert [opens(f"people-{n}", "") for n in range(4)].count(True) == 2, "an eighth was left"
    assert set(codes) == {"too_large" if what == "bytes" else "too_many"}
    assert DataSets.restored(datasets.snapshot()).snapshot() == datasets.snapshot()


# ---- answers that are lost, and drivers that die ----------------------------------------------


def test_a_request_whose_answer_was_lost_gets_the_same_shard_again() -> None:
    datasets = DataSets()
    first = ask(datasets, 1, "a", 0.0, name="one")[1]
    assert ask(datasets, 2, "a", 0.0, name="one")[2] == first
    assert ask(datasets, 3, "a", 0.0, name="two")[3] != first
    assert isinstance(ask(datasets, 4, "b", 0.0, name="one")[4], Wait), "it is another worker's"


def test_a_request_without_a_name_gets_another_shard_each_time() -> None:
    datasets = DataSets()
    assert ask(datasets, 1, "a", 0.0)[1] != ask(datasets, 2, "a", 0.0)[2]


def test_the_name_of_a_request_is_forgotten_with_its_shard() -> None:
    datasets = DataSets()
    granted = ask(datasets, 1, "a", 0.0, name="one")[1]
    done = ShardRequest(2, "d", DoneRequest("a", granted.shard, granted.token))
    assert replies(datasets, done, 0.0) == {2: ShardAccepted(granted.shard)}
    assert ask(datasets, 3, "a", 0.0, name="one")[3].shard != granted.shard


def test_a_resumed_driver_answers_no_request_of_the_earlier_ones_clients() -> None:
    datasets = DataSets()
    granted = [ask(datasets, ticket, "a", 0.0)[ticket] for ticket in (1, 2)]
    assert ask(datasets, 3, "b", 5.0) == {}
    assert replies(datasets, RESUMED, 1.0) == {}
    assert datasets.deadline() == LEASE_S / 4, "nobody waits any more"
    assert ask(datasets, 3, "c", 9.0, 1.0) == {}, "tickets begin anew"
    for number, each in enumerate(granted):
        done = ShardRequest(4 + number, "d", DoneRequest("a", each.shard, each.token))
        answered = replies(datasets, done, 2.0)
    assert answered.keys() == {5, 3}


def test_a_report_that_comes_again_after_a_resume_counts_once() -> None:
    datasets = DataSets()
    granted = ask(datasets, 1, "a", 0.0)[1]
    done = DoneRequest("a", granted.shard, granted.token)
    for ticket in (2, 3):
        answer = replies(datasets, ShardRequest(ticket, "d", done), 0.0)
        assert answer == {ticket: ShardAccepted(granted.shard)}
        replies(datasets, RESUMED, 0.0)
    status = replies(datasets, ShardRequest(4, "d", ReadStatus()), 0.0)[4]
    assert status.counts.done == 1


def test_tokens_of_a_resumed_driver_are_larger_than_any_of_the_earlier_one() -> None:
    datasets = DataSets()
    ask(datasets, 1, "a", 0.0)
    replies(datasets, RESUMED, 0.0)
    assert ask(datasets, 2, "a", 0.0)[2].token == RESUMED.term << 32


def test_a_shard_asked_for_before_the_driver_died_is_the_workers_after_it() -> None:
    datasets = DataSets()
    granted = ask(datasets, 1, "a", 0.0, name="one")[1]
    resumed = DataSets.restored(datasets.snapshot())
    replies(resumed, RESUMED, 0.0)
    assert ask(resumed, 1, "a", 0.0, name="one")[1] == granted
