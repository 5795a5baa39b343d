"""The alarm rings for the earliest deadline, and tells when the loop was held up."""

from __future__ import annotations

import asyncio
import time

import pytest

from rendezvous.service import Alarm

pytestmark = pytest.mark.asyncio


class Bell:
    """Records when it rang, and for how long the loop was held up before."""

    def __init__(self) -> None:
        self.rings: list[tuple[float, float]] = []
        self.rang = asyncio.Event()

    def ring(self, now: float, stood_still: float) -> None:
        self.rings.append((now, stood_still))
        self.rang.set()


async def test_it_rings_for_the_earliest_deadline_and_once() -> None:
    bell, loop = Bell(), asyncio.get_running_loop()
    alarm, now = Alarm(bell.ring), loop.time()
    alarm.set(None)
    alarm.set(now + 600)
    alarm.set(now + 0.01)
    alarm.set(now + 600)
    await asyncio.wait_for(bell.rang.wait(), 5)
    ((rang, stood_still),) = bell.rings
    assert rang >= now + 0.01
    assert stood_still == 0 or rang - now > 0.5


async def test_one_that_is_off_does_not_ring_and_may_be_set_again() -> None:
    bell, loop = Bell(), asyncio.get_running_loop()
    alarm = Alarm(bell.ring)
    alarm.set(loop.time())
    alarm.off()
    alarm.off()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bell.rings == []
    alarm.set(loop.time())
    await asyncio.wait_for(bell.rang.wait(), 5)


async def test_a_loop_that_stood_still_is_told_for_how_long() -> None:
    bell, loop = Bell(), asyncio.get_running_loop()
    Alarm(bell.ring).set(loop.time())
    time.sleep(0.6)
    await asyncio.wait_for(bell.rang.wait(), 5)
    assert 0.5 < bell.rings[0][1] < 5
