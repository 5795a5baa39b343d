"""A request that is sent twice is carried out once.

A client that lost an answer repeats its request under the same id. `Repeats` remembers what
it answered, and joins those who ask while the first answer is still awaited. It forgets after
`KEEP_S` seconds, or sooner when it holds too much. Runs on the server's loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

from rendezvous.service import StoreService
from rendezvous.wire import Operation, Result

KEEP_S = 120.0  # twice the longest wait: by then a client has repeated or given up
KEEP_COUNT = 65536
KEEP_BYTES = 64 * 1024 * 1024


class _Request:
    """One request id: what is done of it, who waits for the rest, and the answer."""

    __slots__ = ("answer", "clients", "done", "future", "reply", "since", "ticket")

    def __init__(self, since: float) -> None:
        self.since = since
        self.clients = 0
        self.ticket = 0
        self.future: asyncio.Future[tuple[Result, ...]] | None = None
        self.done: tuple[Result, ...] = ()  # by an attempt whose client went away
        self.reply: bytes | None = None


class Repeats:
    """Answers each request id once, however often it is asked."""

    def __init__(
        self,
        service: StoreService,
        encode_reply: Callable[[tuple[Result, ...]], bytes],
        *,
        keep_s: float = KEEP_S,
        keep_count: int = KEEP_COUNT,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        self._service = service
        self._encode_reply = encode_reply
        self._keep_s, self._keep_count, self._keep_bytes = keep_s, keep_count, keep_bytes
        self._loop = asyncio.get_running_loop()
        self._requests: OrderedDict[str, _Request] = OrderedDict()  # oldest first
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    async def answer(self, request_id: str, operations: Sequence[Operation]) -> bytes:
        """The encoded reply to this request, carried out now or earlier.

        When every client that waits for it has gone, the request waits no longer; what it had
        carried out stays done, and a repeat goes on from there.
        """
        request = self._requests.get(request_id)
        if request is None:
            self._forget()
            request = self._requests[request_id] = _Request(self._loop.time())
        if request.reply is not None:
            return request.reply
        if request.future is None:
            rest = operations[len(request.done) :]
            request.ticket, request.future = self._service.begin(rest)
        request.clients += 1
        future = request.future
        try:
            await asyncio.wait((future,))
        finally:
            request.clients -= 1
            if request.clients == 0 and not future.done():
                request.done += self._service.cancel(request.ticket)
                request.future = None
        results = future.result()
        if request.reply is None:
            request.reply = self._encode_reply(request.done + results)
            request.future = None
            self._bytes += len(request.reply)
        return request.reply

    def _forget(self) -> None:
        """Make room: drop the oldest requests while there are too many or they are too old."""
        too_old = self._loop.time() - self._keep_s
        for _ in range(len(self._requests)):
            request_id, request = next(iter(self._requests.items()))
            full = len(self._requests) >= self._keep_count or self._bytes > self._keep_bytes
            if not full and request.since > too_old:
                return
            if request.clients:  # still awaited: it counts as young
                request.since = self._loop.time()
                self._requests.move_to_end(request_id)
                continue
            del self._requests[request_id]
            self._bytes -= len(request.reply or b"")
