"""Simulated workers: each speaks the real protocol on its own connection, and does nothing else.

A member reports READY and waits for the world it is in; `rest` lets it send heartbeats like an idle
worker. They use plain asyncio streams, so that many fit into one process and take little of the
measured time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import uuid
from collections.abc import Iterable

import msgspec

from elastic_driver import contract
from elastic_driver.core.documents import Progress, Sample, decode_world
from elastic_driver.core.documents import encode as encode_document
from elastic_driver.core.events import WorkerReady
from rendezvous.wire import (
    BATCH_PATH,
    EVENTS_PATH,
    Entries,
    KVBatch,
    Operation,
    Result,
    Set,
    Watch,
    decode_reply,
    encode,
)

WAIT_S = 60.0
LONGEST_WAIT_S = 2.0  # of a training worker
SAMPLES = 16  # measured steps in each of its heartbeats
CONNECTING = 64  # at a time


class Member:
    """One simulated worker."""

    def __init__(self, name: str, port: int, token: str) -> None:
        self.name, self._port, self._token = name, port, token
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

    async def rest(self, heartbeat_timeout: float, trains: bool) -> None:
        """Send heartbeats as an idle or a training worker does, until cancelled."""
        wait = LONGEST_WAIT_S if trains else heartbeat_timeout / 3
        lease = Set(contract.worker_lease(self.name), b"", heartbeat_timeout)
        sign = Set(contract.worker_half_lease(self.name), b"", heartbeat_timeout / 2)
        await asyncio.sleep(random.random() * wait)  # members that started together drift apart
        for step in itertools.count(1):
            samples = tuple(Sample(step + n, 0.01, 0.01) for n in range(SAMPLES))
            progress = Progress(1, step, 0.01, samples)
            told = [Set(contract.worker_progress(self.name), encode_document(progress))]
            watch = Watch({contract.JOB_NOTICE: 0, contract.JOB_STACKS: 0}, wait)
            await self._batch(lease, sign, *(told if trains else ()), watch)

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


async def connected(names: Iterable[str], port: int, token: str) -> list[Member]:
    """Return members with open connections."""
    members = [Member(name, port, token) for name in names]
    gate = asyncio.Semaphore(CONNECTING)

    async def connect(member: Member) -> None:
        async with gate:
            await member.connect()

    await asyncio.gather(*(connect(member) for member in members))
    return members
