"""The message by which a driver that has taken over tells an agent its address.

An agent finds the next driver by itself at the address of the last one. A driver elsewhere
connects to the port where the agent answers probes, and lets it show that it is that agent
(`presence`). Then it sends one line: run, term and URL, with an HMAC-SHA256 by the agent's token.
The agent follows terms higher than the one that it knows, so a repeated message does nothing.
Times are seconds.
"""

import asyncio
import contextlib
import hashlib
import hmac
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from elastic_driver.presence import Asked, Presence
from rendezvous.wire import UNREADABLE

READ = b"+\n"  # the line by which an agent says that it has read the message
PATIENCE_S = 2.0  # for an agent to answer
MAX_LINE = 4096  # bytes, the newline included


class Announcement(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of JSON; `mac` is in hexadecimal digits."""

    run_id: str
    term: Annotated[int, Meta(ge=1, le=2**20)]
    url: str  # of the new driver's rendezvous
    mac: str


def announcement(run_id: str, term: int, url: str, token: str) -> bytes:
    """Return the line for the agents of a run."""
    message = Announcement(run_id, term, url, _mac(run_id, term, url, token))
    return msgspec.json.encode(message) + b"\n"


def verified(line: bytes, run_id: str, token: str) -> Announcement | None:
    """Return the message in a line; None if it is not from a driver of this run."""
    try:
        message = msgspec.json.decode(line, type=Announcement)
    except UNREADABLE:
        return None
    wanted = _mac(run_id, message.term, message.url, token)
    genuine = hmac.compare_digest(message.mac.encode(), wanted.encode())
    return message if genuine and message.run_id == run_id else None


def _mac(run_id: str, term: int, url: str, token: str) -> str:
    text = msgspec.json.encode((run_id, term, url))
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


async def announce(
    address: str, port: int, agent: Presence, *, run_id: str, term: int, url: str
) -> bool:
    """Tell the agent that answers probes at this address of a new driver.

    Return whether that agent has read it; False after `PATIENCE_S`. That the agent follows
    shows only in its requests (`AgentReturned`).
    """
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        line = announcement(run_id, term, url, agent.token)
        return await asyncio.wait_for(_send(address, port, agent.ask(), line), PATIENCE_S)
    return False


async def _send(address: str, port: int, asked: Asked, line: bytes) -> bool:
    reader, writer = await asyncio.open_connection(address, port, limit=MAX_LINE)
    try:
        writer.write(asked.question)
        if await reader.readexactly(len(asked.answer)) != asked.answer:
            return False
        writer.write(line)
        return await reader.readexactly(len(READ)) == READ
    except asyncio.IncompleteReadError:
        return False
    finally:
        writer.close()
