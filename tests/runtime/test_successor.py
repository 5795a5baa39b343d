"""A driver that goes on with a job tells the agents of the one before it its address."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

from elastic_driver.job.fleet import AgentState, HostAgent
from elastic_driver.runtime.endpoint import tell_agents


def test_telling_agents_that_are_gone_leaves_no_complaint_when_it_is_cut_short() -> None:
    complaints: list[dict[str, Any]] = []

    async def cut_short() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        gone = HostAgent("a", 1, 0.0, AgentState.AWAITED, "127.0.0.1", probe_port=9)
        where = {"run_id": "r", "term": 2, "url": "http://127.0.0.1:9", "token": "x" * 32}
        told = asyncio.create_task(tell_agents([gone], within=60.0, **where))
        await asyncio.sleep(0.1)
        told.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await told
        del told
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(cut_short())
    assert complaints == []
