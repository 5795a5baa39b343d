"""The asyncio client of the rendezvous, for the agent: the same calls, deadlines and repeats.

Any number of calls may run at once on one loop, each on a connection of its own. To end one
early, cancel its task. Never uses a proxy, and never resolves names where the address is a
number.
"""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

from rendezvous.auth import AUTHORIZATION, bearer
from rendezvous.calls import (
    DEFAULT_TIMEOUT_S,
    REQUEST_ID_HEADER,
    STOPPING,
    delays,
    new_request_id,
    parse_url,
    put_batch,
    raise_for,
    raise_refused,
    read_results,
    time_for,
    unreachable,
)
from rendezvous.errors import RendezvousError
from rendezvous.wire import (
    BATCH_PATH,
    MAX_WAIT_S,
    Entries,
    Entry,
    Get,
    Operation,
    Refused,
    Result,
    Set,
    Watch,
    Written,
)

R = TypeVar("R")


class AsyncRendezvousClient:
    """Connections to one rendezvous server.

    `timeout`: seconds a call may take beyond the waits in it. Errors as in `RendezvousClient`.
    Make it anywhere, use and close it on one loop.
    """

    def __init__(self, url: str, token: str, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        parse_url(url)
        self.url, self.timeout = url.rstrip("/"), timeout
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def batch(
        self, *operations: Operation, deadline: float | None = None
    ) -> tuple[Result, ...]:
        """Carry out operations in order; one result for each, `Refused` among them.

        `deadline`: seconds from now in which the answer must be here, repeats included
        (default: the waits in the batch plus the client's timeout).
        """
        expected = time_for(operations, self.timeout)
        body = put_batch(operations)
        within = expected if deadline is None else deadline
        return read_results(await self._call("POST", BATCH_PATH, body, within, expected))

    async def set(self, key: str, value: bytes, lease: float | None = None) -> int:
        """Write a value, with `lease` (seconds) as a lease; return its revision."""
        return (await self._one(Set(key, value, lease), Written)).revision

    async def get(self, key: str, wait: float = 0.0, after: int = 0) -> Entry | None:
        """Read a key; with `wait`, until its revision is above `after`, for so many seconds.

        None where the key is missing, or has nothing newer when the wait is over.
        """
        found = await self._one(Get((key,), min(wait, MAX_WAIT_S), after), Entries)
        return None if found.timed_out else found.entries.get(key)

    async def watch(self, keys: dict[str, int], wait: float) -> dict[str, Entry]:
        """Wait until one of the keys passes the revision beside it; the keys that have.

        Empty when `wait` seconds (at most MAX_WAIT_S) are over.
        """
        found = await self._one(Watch(keys, min(wait, MAX_WAIT_S)), Entries)
        return {} if found.timed_out else found.entries

    async def post_json(self, path: str, body: bytes, deadline: float | None = None) -> bytes:
        """POST a JSON document (as bytes); return the answer's body.

        Repeats carry the same X-Request-Id, and the server answers an id once.
        """
        within = self.timeout if deadline is None else deadline
        return await self._call("POST", path, body, within, self.timeout)

    async def get_json(self, path: str, deadline: float | None = None) -> Any:
        """GET a path; return the decoded JSON document."""
        within = self.timeout if deadline is None else deadline
        return json.loads(await self._call("GET", path, None, within, self.timeout))

    async def close(self) -> None:
        """Close every connection; a later call opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> AsyncRendezvousClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _one(self, operation: Operation, kind: type[R]) -> R:
        (result,) = await self.batch(operation)
        if isinstance(result, Refused):
            raise_refused(result)
        if not isinstance(result, kind):
            raise RendezvousError(f"the rendezvous at {self.url} answered {result!r}")
        return result

    async def _call(
        self, method: str, path: str, body: bytes | None, within: float, expected: float
    ) -> bytes:
        """The answer's body; repeats until `within` seconds are over.

        `expected`: seconds after which an attempt without an answer is given up and repeated.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        until = started + within
        headers = {AUTHORIZATION: bearer(self._token), "Content-Type": "application/json"}
        if method == "POST":
            headers[REQUEST_ID_HEADER] = new_request_id()
        pause = delays()
        while True:
            seconds = max(0.001, min(until - clock(), expected))
            try:
                status, data = await self._attempt(method, path, body, headers, seconds)
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
                cause: object = str(error) or type(error).__name__
            else:
                if status != STOPPING:
                    raise_for(status, data, self.url)
                    return data
                cause = "the server is stopping"
            delay = next(pause)
            if clock() + delay >= until:
                raise unreachable(self.url, clock() - started, cause)
            await asyncio.sleep(delay)

    async def _attempt(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], seconds: float
    ) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), trust_env=False
            )
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with self._session.request(
            method, self.url + path, data=body, headers=headers, timeout=timeout
        ) as response:
            return response.status, await response.read()
