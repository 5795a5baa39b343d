"""The driver's mailbox."""

from __future__ import annotations

import queue

import pytest

from elastic_driver.job.events import Tick
from elastic_driver.runtime.mailbox import DriverMailbox, Mailbox, StopNow
from elastic_driver.words.wire_events import WorkerReady, WorkerStepped

READY = WorkerReady("a.0.1", 0, -1, True, "started")
STEPPED = WorkerStepped("a.0.1", 1, 1)
KINDS = (WorkerReady, WorkerStepped)


def test_messages_come_out_in_their_order_also_when_some_are_taken_together() -> None:
    mailbox: DriverMailbox = Mailbox()
    for message in (READY, STEPPED, READY, StopNow(), READY, Tick()):
        mailbox.put(message)
    assert len(mailbox) == 6
    assert mailbox.get() == READY
    assert mailbox.following(KINDS, 1) == [STEPPED]
    assert mailbox.following(KINDS, 10) == [READY]
    assert mailbox.following(KINDS, 10) == []  # something else comes next
    assert len(mailbox) == 3
    assert [mailbox.get(1.0) for _ in range(3)] == [StopNow(), READY, Tick()]


def test_nothing_follows_in_an_empty_mailbox() -> None:
    mailbox: DriverMailbox = Mailbox()
    assert mailbox.following(KINDS, 10) == []
    with pytest.raises(queue.Empty):
        mailbox.get(0.0)
    mailbox.put(StopNow())
    assert mailbox.get(0.0) == StopNow()
