"""Probes of agents (`ProbeAgent`): connections to an agent that show whether it lives.

They run on the rendezvous server's loop. The agent's process answers with one byte: a stopped
process accepts connections, as its kernel does that, and sends nothing. Times are seconds.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Literal

from elastic_driver.core.decisions import ProbeAgent
from elastic_driver.core.events import AgentProbed

ATTEMPTS = 4  # in the time of a probe: the kernel sends a lost SYN again only after a second
Result = Literal["answered", "refused", "silent"]


async def carry_out(asked: ProbeAgent, post: Callable[[AgentProbed], None]) -> None:
    """Probe an agent and post the result."""
    began = asyncio.get_running_loop().time()
    result = await probe(asked.address, asked.port, asked.patience)
    seconds = asyncio.get_running_loop().time() - began
    post(AgentProbed(asked.host, asked.incarnation, asked.number, result, seconds))


async def probe(address: str, port: int, patience: float) -> Result:
    """Return the first clear answer of several attempts; "silent" if none has one.

    The attempts begin one after the other and go on side by side. If this process is stopped
    meanwhile, that costs one of them its time, and the others still have theirs.
    """
    attempts = set[asyncio.Task[Result | None]]()
    try:
        for _ in range(ATTEMPTS):
            attempts.add(asyncio.create_task(_attempt(address, port)))
            pause = asyncio.create_task(asyncio.sleep(patience / ATTEMPTS, None))
            waiting: set[asyncio.Task[Result | None]] = {pause, *attempts}
            while pause in waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for result in (task.result() for task in done):
                    if result is not None:
                        pause.cancel()
                        return result
            attempts = waiting
        return "silent"
    finally:
        for attempt in attempts:
            attempt.cancel()


async def _attempt(address: str, port: int) -> Result | None:
    """Connect and read a byte; return None if that proves nothing."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, (address, port))
        except ConnectionRefusedError:
            return "refused"
        if await loop.sock_recv(connection, 1):
            return "answered"
    return None
