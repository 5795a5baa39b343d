"""The driver's loop alone: every event gets a number, and what follows carries that number."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from elastic_driver import contract
from elastic_driver.brain.store.records import Sample
from elastic_driver.features.shards.messages import NextRequest, RangeDescription, ShardRequest
from elastic_driver.features.sizes.driver import Sizes
from elastic_driver.features.statistics.driver import Statistics
from elastic_driver.features.statistics.measurements import LOOK_S, USAGE_S
from elastic_driver.job.events import HostsMeasured
from elastic_driver.kernel.machine import Reply
from elastic_driver.runtime.driver_parts import DriverPart
from elastic_driver.runtime.loop import DriverLoop
from elastic_driver.runtime.machines import MACHINES
from elastic_driver.runtime.mailbox import Mailbox
from elastic_driver.words import wire_events as ev
from elastic_driver.words.progress import HostUsage, Usage
from rendezvous.wire import Entry


def carried_out(decision: object) -> None:
    raise AssertionError(f"nobody has decided this: {decision}")


def loop_of(executor: SimpleNamespace, replies: list[Reply], *parts: DriverPart) -> DriverLoop:
    decided = {kind for machine in MACHINES for kind in machine.decision_types()}
    executor.handlers = lambda: dict.fromkeys(decided - {Reply}, carried_out)
    executor.followers = dict
    return DriverLoop(
        mailbox=Mailbox(),
        executor=cast("Any", executor),
        lease=30.0,
        status=bytes,
        answer=replies.extend,
        debug=True,
        parts=parts,
    )


def test_a_reply_carries_the_number_of_the_event_that_caused_it() -> None:
    replies: list[Reply] = []
    # Replies do not pass through it; the loop asks it only for what is to be shown later.
    tails = SimpleNamespace(deadline=None)
    record = recording(tails)
    loop = loop_of(SimpleNamespace(record=record), replies)
    for ticket in (1, 2):
        request = NextRequest("a", RangeDescription(20, 10), 0.0)
        loop.mailbox.put(ShardRequest(ticket, "numbers", request))
        loop.turn()

    assert [(reply.ticket, reply.cause) for reply in replies] == [(1, 1), (2, 2)]


def recording(tails: SimpleNamespace) -> SimpleNamespace:
    """The record of a job of which nothing is shown."""
    return SimpleNamespace(tails=tails, note=lambda _event: None, show_overdue=lambda _now: None)


class Listener:
    """A machine that decides nothing, and remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def handle(self, event: Any, _now: float) -> list[Any]:
        self.heard.append(event)
        return []

    def deadline(self) -> float | None:
        return None

    def check(self) -> list[str]:
        return []


def test_the_job_knows_the_idle_memory_of_hosts_before_a_worker_that_ran_out_of_it() -> None:
    tails, job = SimpleNamespace(deadline=None), Listener()
    record = recording(tails)
    statistics = Statistics()
    loop = loop_of(SimpleNamespace(record=record), [], statistics)
    loop.kernel.machines |= {"job": job, "shards": Listener()}
    host = HostUsage(cpu=0.5, memory_used=3, memory_total=8, disk_used=1, disk_total=2)
    (key,) = statistics.measurements.usage_keys(0.0, [("a", 1)])
    assert key == contract.agent_usage("a", 1)
    statistics.measurements.usage_read(
        {key: Entry(value=msgspec.json.encode(Usage(host)), revision=1)}
    )
    killed = ev.WorkerExited("a.0.1", -9, "")
    short = ev.WorkerExited("a.1.1", -9, "", out_of_memory=ev.OutOfMemory(8, 5))
    for event in (killed, short):
        loop.mailbox.put(event)
        loop.turn()
    assert job.heard == [killed, HostsMeasured((("a", 5),)), short]


def test_statistics_get_the_usage_of_hosts_that_was_read_for_them() -> None:
    """Not what was read some looks before: a growing worker's memory would be seconds old."""
    host = HostUsage(cpu=0.5, memory_used=3, memory_total=8, disk_used=1, disk_total=2)
    asked: list[tuple[str, ...]] = []

    def read(keys: tuple[str, ...], found: Callable[[dict[str, Entry]], None]) -> None:
        used = len(asked)
        asked.append(keys)
        value = msgspec.json.encode(Usage(replace(host, memory_used=used)))
        found({key: Entry(value=value, revision=used + 1) for key in keys})

    tails = SimpleNamespace(deadline=None)
    record = recording(tails)
    statistics, kept = Statistics(), list[Sample]()
    statistics.keep = kept.append
    loop = loop_of(SimpleNamespace(record=record, read=read), [], statistics)
    loop.job = cast(
        "Any",
        SimpleNamespace(
            workers=SimpleNamespace(count=lambda _state: 0),
            fleet=SimpleNamespace(agents={"a": SimpleNamespace(incarnation=1)}),
            rounds=SimpleNamespace(current=SimpleNamespace(state=None)),
        ),
    )
    for number in range(3):
        statistics.look(100.0 + number * USAGE_S)
        loop.turn()
        assert [sample.measured.hosts["a"].memory_used for sample in kept] == [*range(number + 1)]
    statistics.look(100.0 + 2 * USAGE_S)
    assert len(kept) == 4, "a look between two of them hands in the job alone"
    assert kept[-1].measured.hosts == {}


class Thinker(Listener):
    """A machine that computes for 0.1 s about each event."""

    def handle(self, event: Any, now: float) -> list[Any]:
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass
        return super().handle(event, now)


def test_a_search_that_thinks_for_long_puts_off_no_look_at_the_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look of 0.1 s would be the last one for 20 s."""
    statistics = Statistics()
    loop = loop_of(SimpleNamespace(record=None), [], statistics, Sizes(has_brain=False))
    search = Thinker()
    loop.kernel.machines |= {"scaling": search, "starvation": Listener()}
    loop.job = cast(
        "Any",
        SimpleNamespace(
            workers=SimpleNamespace(count=lambda _state: 1), fleet=SimpleNamespace(agents={})
        ),
    )
    speed, loads = SimpleNamespace(machine="scaling"), SimpleNamespace(machine="starvation")
    monkeypatch.setattr("elastic_driver.features.sizes.driver.speed_seen", lambda *_: speed)
    monkeypatch.setattr("elastic_driver.features.sizes.driver.loads_seen", lambda *_: loads)
    statistics.look(50.0)
    assert search.heard == [speed]
    assert statistics.measurements.due == 50.0 + LOOK_S
