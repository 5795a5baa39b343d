"""A request that is sent twice is carried out once.

A client that lost an answer repeats its request under the same id. Answers are remembered for
`KEEP_S` seconds, or less if there are too many; a repeat that comes before the first answer waits
for that one. `Repeats` is for batches, which may wait long and are given up when all their
clients have gone; `PostsOnce` is for the other POST routes, which run to their end. Everything
runs on the server's loop.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from msgspec import Struct

from rendezvous.errors import StoppedError
from rendezvous.service import Done, StoreService, into, results_of
from rendezvous.web import JSON, shape_errors
from rendezvous.wire import BATCH_PATH, REQUEST_ID_HEADER, Entries, Operation, Result

KEEP_S = 120.0  # twice the longest wait: by then a client has repeated or given up
KEEP_COUNT = 65536
KEEP_BYTES = 64 * 1024 * 1024
_ANSWER_BYTES = 256  # assumed size of an answer without its values


class Limits(Struct, frozen=True):
    """The bounds of a memory: seconds, requests, bytes of answers."""

    seconds: float = KEEP_S
    count: int = KEEP_COUNT
    size: int = KEEP_BYTES


class _KnownRequest:
    """One remembered request."""

    __slots__ = ("since", "size")

    def __init__(self) -> None:
        self.since = 0.0
        self.size = 0  # bytes of the answer

    @property
    def pending(self) -> bool:
        """True while the request is being carried out; it must not be forgotten then."""
        raise NotImplementedError


V = TypeVar("V", bound=_KnownRequest)


class _Memory(Generic[V]):
    """Requests by id within limits, oldest first."""

    def __init__(self, limits: Limits | None) -> None:
        self._limits = limits or Limits()
        self._requests: OrderedDict[str, V] = OrderedDict()
        self._size = 0
        self.get = self._requests.get

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, request: V, now: float) -> None:
        """Add a request; drop the oldest ones while they are too old or too many."""
        for _ in range(len(self._requests)):
            oldest_id, oldest = next(iter(self._requests.items()))
            full = len(self) >= self._limits.count or self._size > self._limits.size
            if not full and oldest.since > now - self._limits.seconds:
                break
            if oldest.pending:  # counts as young
                oldest.since = now
                self._requests.move_to_end(oldest_id)
            else:
                self.drop(oldest_id)
        request.since = now
        self._requests[request_id] = request

    def answered(self, request: V, size: int) -> None:
        """Record that the request now holds an answer of this many bytes."""
        request.size = size
        self._size += size

    def drop(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._size -= request.size


class _KnownBatch(_KnownRequest):
    """A batch: the clients that wait for its results, and what is done of it."""

    __slots__ = ("done", "results", "ticket", "waiting")

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Done] = []
        self.ticket = 0  # of the running attempt; 0: there is none
        self.done: tuple[Result, ...] = ()  # by attempts that were given up
        self.results: tuple[Result, ...] | None = None

    @property
    def pending(self) -> bool:
        return bool(self.waiting)


class Repeats:
    """Carries out each batch once, however often it is asked for."""

    def __init__(self, service: StoreService, limits: Limits | None = None) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._memory: _Memory[_KnownBatch] = _Memory(limits)

    def __len__(self) -> int:
        return len(self._memory)

    async def results(self, request_id: str, operations: Sequence[Operation]) -> tuple[Result, ...]:
        """Return the results of this request, carried out now or earlier."""
        answer: asyncio.Future[tuple[Result, ...] | None] = self._loop.create_future()
        leave = self.ask(request_id, operations, into(answer))
        try:
            return results_of(await answer)
        finally:
            leave()

    def ask(
        self, request_id: str, operations: Sequence[Operation], done: Done
    ) -> Callable[[], None]:
        """Call `done` with the results of this request, carried out now or earlier.

        Returns a function to call when the client goes away. When all clients of a request have
        gone, it stops waiting; what it has carried out stays done, and a repeat goes on from
        there. Raises StoppedError if the service is closed.
        """
        batch = self._memory.get(request_id)
        if batch is None:
            batch = _KnownBatch()
            self._memory.add(request_id, batch, self._loop.time())
        if batch.results is not None:
            done(batch.results)
        else:
            batch.waiting.append(done)
            if not batch.ticket:
                self._begin(batch, operations[len(batch.done) :])
        return partial(self._leave, batch, done)

    def _begin(self, batch: _KnownBatch, rest: Sequence[Operation]) -> None:
        try:
            ticket = self._service.begin(rest, partial(self._answered, batch))
        except StoppedError:
            batch.waiting.clear()
            raise
        batch.ticket = ticket if batch.results is None else 0

    def _answered(self, batch: _KnownBatch, results: tuple[Result, ...] | None) -> None:
        batch.ticket = 0
        if results is not None:
            batch.results = results = batch.done + results
            self._memory.answered(batch, sum(map(_size_of, results)))
        waiting, batch.waiting = batch.waiting, []
        for done in waiting:
            done(results)

    def _leave(self, batch: _KnownBatch, done: Done) -> None:
        if done in batch.waiting:
            batch.waiting.remove(done)
            if not batch.waiting and batch.ticket:
                batch.done += self._service.cancel(batch.ticket)
                batch.ticket = 0


def _size_of(result: Result) -> int:
    """Return about how many bytes a remembered result takes."""
    entries = result.entries.values() if isinstance(result, Entries) else ()
    return _ANSWER_BYTES + sum(len(entry.value) for entry in entries)


class _KnownPost(_KnownRequest):
    """A POST: the future answer, or the answer as (status, body)."""

    __slots__ = ("answer", "task")

    def __init__(
        self,
        task: asyncio.Future[web.StreamResponse] | None = None,
        answer: tuple[int, bytes] = (204, b""),
    ) -> None:
        super().__init__()
        self.task, self.answer = task, answer

    @property
    def pending(self) -> bool:
        return self.task is not None and not self.task.done()


class PostsOnce:
    """Middleware: a POST with an X-Request-Id reaches its handler once.

    The handler runs to its end even if its client goes away, so that the repeat finds its
    answer; it must have its own deadline. Failures of the server itself (5xx) are not
    remembered, so that a repeat tries again.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._memory: _Memory[_KnownPost] = _Memory(limits)

    def __len__(self) -> int:
        return len(self._memory)

    def knows(self, path: str, request_id: str) -> bool:
        """Return whether this POST was received before."""
        return self._memory.get(f"{path} {request_id}") is not None

    def begin(self, path: str, request_id: str, now: float) -> None:
        """Record that a POST is being answered outside of the middleware; `remember` follows."""
        future = asyncio.get_running_loop().create_future()
        self._memory.add(f"{path} {request_id}", _KnownPost(future), now)

    def remember(self, path: str, request_id: str, status: int, body: bytes, now: float) -> None:
        """Record that a POST was answered with this status and JSON document."""
        key = f"{path} {request_id}"
        begun = self._memory.get(key)
        if begun is not None and begun.task is not None:
            begun.task.set_result(web.Response(body=body, status=status, content_type=JSON))
        self._memory.drop(key)
        if status < 500:
            post = _KnownPost(answer=(status, body))
            self._memory.add(key, post, now)
            self._memory.answered(post, len(body))

    def middleware(self) -> Middleware:
        """Return the middleware; it belongs behind the token check."""

        @web.middleware
        async def once(request: web.Request, handler: Handler) -> web.StreamResponse:
            request_id = request.headers.get(REQUEST_ID_HEADER)
            if request.method != "POST" or request.path == BATCH_PATH or not request_id:
                return await handler(request)
            await request.read()  # now, as the connection may end before the handler reads
            return await self._answer(f"{request.path} {request_id}", request, handler)

        return once

    async def _answer(
        self, request_id: str, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        post = self._memory.get(request_id)
        if post is None:
            task = loop.create_task(shape_errors(request, handler))
            post = _KnownPost(task)
            self._memory.add(request_id, post, loop.time())
            task.add_done_callback(lambda task: self._ended(request_id, post, task))
        answering = post.task
        if answering is None:
            status, body = post.answer
            return web.Response(body=body, status=status, content_type=JSON)
        await asyncio.wait((answering,))
        answer = answering.result()
        if not isinstance(answer, web.Response):
            return answer  # a stream belongs to the client that asked first
        return web.Response(body=answer.body, status=answer.status, headers=answer.headers)

    def _ended(
        self, request_id: str, post: _KnownPost, task: asyncio.Task[web.StreamResponse]
    ) -> None:
        if task.cancelled() or task.exception() is not None or task.result().status >= 500:
            self._memory.drop(request_id)
            return
        answer = task.result()
        body = answer.body if isinstance(answer, web.Response) else b""
        self._memory.answered(post, len(body) if isinstance(body, bytes) else 0)
