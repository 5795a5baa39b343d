"""Simulated workers: each speaks the real protocol on its own connection, and does nothing else.

A member reports READY and waits for the world it is in. They use plain asyncio streams, so that
10,000 fit into two processes. Only the driver's cost for each of very many is measured with them;
comparisons use real clients (`clients`).
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterable

import msgspec

from elastic_driver import contract
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.token_roles import agent_token, worker_token
from elastic_driver.words.orders import decode_world
from elastic_driver.words.wire_events import WorkerReady
from rendezvous.wire import (
    BATCH_PATH,
    Entries,
    KVBatch,
    Operation,
    Result,
    Watch,
    decode_reply,
    encode,
)

WAIT_S = 60.0
CONNECTING = 64  # at a time


class Member:
    """One simulated worker."""

    def __init__(self, name: str, port: int, driver_token: str) -> None:
        self.name, self._port = name, port
        self._token = worker_token(agent_token(driver_token, contract.host_of_worker(name)), name)
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def connect(self) -> None:
        """Open the connection."""
        limit = 1 << 24
        self._reader, self._writer = await asyncio.open_connection(
            "127.0.0.1", self._port, limit=limit
        )

    async def meet(self) -> int:
        """Report READY and wait for the world; return its size, once rank and peers are known."""
        ready = WorkerReady(self.name, 0, -1, True, "started")
        await self._post(EVENTS_PATH, msgspec.json.encode(ready), request_id=True)
        (found,) = await self._batch(Watch({contract.JOB_WORLD: 0}, WAIT_S))
        assert isinstance(found, Entries)
        world = decode_world(found.entries[contract.JOB_WORLD].value)
        assert world.member(self.name) is not None
        return world.size

    async def _batch(self, *operations: Operation) -> tuple[Result, ...]:
        body = encode(KVBatch(operations, uuid.uuid4().hex))
        return decode_reply(await self._post(BATCH_PATH, body)).results

    async def _post(self, path: str, body: bytes, *, request_id: bool = False) -> bytes:
        more = f"X-Request-Id: {uuid.uuid4().hex}\r\n" if request_id else ""
        self._writer.write(
            f"POST {path} HTTP/1.1\r\nHost: driver\r\nAuthorization: Bearer {self._token}\r\n"
            f"Content-Type: application/json\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = await self._reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-le")]
        answer = await self._reader.readexactly(int(lengths[0].split(b":")[1]))
        if status >= 400:
            raise RuntimeError(f"{path}: {status} {json.loads(answer)}")
        return answer


async def connected(names: Iterable[str], port: int, driver_token: str) -> list[Member]:
    """Return members with open connections."""
    members = [Member(name, port, driver_token) for name in names]
    gate = asyncio.Semaphore(CONNECTING)

    async def connect(member: Member) -> None:
        async with gate:
            await member.connect()

    await asyncio.gather(*(connect(member) for member in members))
    return members
