"""The driver's loop alone: every event gets a number, and what follows carries that number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from elastic_driver.policies.messages import Reply
from elastic_driver.policies.shard_messages import NextRequest, RangeDescription, ShardRequest
from elastic_driver.runtime.loop import DriverLoop
from elastic_driver.runtime.mailbox import Mailbox


def test_a_reply_carries_the_number_of_the_event_that_caused_it() -> None:
    replies: list[Reply] = []
    # Replies do not pass through it; the loop asks it only for what is to be shown later.
    tails = SimpleNamespace(deadline=None)
    no_executor = cast("Any", SimpleNamespace(tails=tails, show_overdue=lambda _now: None))
    loop = DriverLoop(
        mailbox=Mailbox(),
        executor=no_executor,
        lease=30.0,
        checks=None,
        status=bytes,
        answer=replies.extend,
        debug=True,
    )
    for ticket in (1, 2):
        request = NextRequest("a", RangeDescription(20, 10), 0.0)
        loop.mailbox.put(ShardRequest(ticket, "numbers", request))
        loop.turn()

    assert [(reply.ticket, reply.cause) for reply in replies] == [(1, 1), (2, 2)]
