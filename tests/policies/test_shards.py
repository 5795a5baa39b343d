"""The data sets' machine without HTTP: which requests wait, and until when."""

from __future__ import annotations

from elastic_driver.core.events import Tick
from elastic_driver.policies.messages import Reply, RequestDropped
from elastic_driver.policies.shard_messages import (
    DoneRequest,
    Granted,
    NextRequest,
    RangeDescription,
    ShardRequest,
    Wait,
)
from elastic_driver.policies.shards import LEASE_S, DataSets

TWENTY = RangeDescription(20, 10, shuffle=False)


def replies(datasets: DataSets, event: ShardRequest | RequestDropped | Tick, now: float) -> dict:
    found = datasets.handle(event, now)
    assert datasets.check() == []
    return {reply.ticket: reply.document for reply in found if isinstance(reply, Reply)}


def ask(datasets: DataSets, ticket: int, worker: str, wait: float, now: float = 0.0) -> dict:
    return replies(datasets, ShardRequest(ticket, "d", NextRequest(worker, TWENTY, wait)), now)


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
