"""A request that is sent twice is carried out once.

A client that lost an answer repeats its request under the same id. What was answered is
remembered for `KEEP_S` seconds, or less when there is too much of it; who asks while the
first answer is still awaited, waits for that one. Two kinds: `Repeats` for batches, which may
wait long and are given up when every client has gone, and `PostsOnce` for the other rooms'
POST routes, which run to their end. Everything runs on the server's loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from aiohttp import web
from msgspec import Struct

from rendezvous.calls import REQUEST_ID_HEADER
from rendezvous.errors import StoppedError
from rendezvous.replies import ReplyEncoder
from rendezvous.service import Done, StoreService, into, results_of
from rendezvous.web import JSON, shape_errors
from rendezvous.wire import BATCH_PATH, Operation, Result

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler, Middleware

KEEP_S = 120.0  # twice the longest wait: by then a client has repeated or given up
KEEP_COUNT = 65536
KEEP_BYTES = 64 * 1024 * 1024


class Limits(Struct, frozen=True):
    """How much is remembered: seconds, requests, bytes of answers."""

    seconds: float = KEEP_S
    count: int = KEEP_COUNT
    size: int = KEEP_BYTES


class _Request:
    """What is known of one request id; `pending` while somebody waits for its answer."""

    __slots__ = ("pending", "since", "size")

    def __init__(self) -> None:
        self.since = 0.0
        self.size = 0
        self.pending = 0  # clients that wait for the answer


V = TypeVar("V", bound=_Request)


class _Memory(Generic[V]):
    """Requests by id within limits, oldest first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._requests: OrderedDict[str, V] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> V | None:
        return self._requests.get(request_id)

    def add(self, request_id: str, request: V, now: float) -> None:
        """Take in a request; the oldest ones go while they are too old or too many."""
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
        """This request now holds an answer of so many bytes."""
        request.size = size
        self._size += size

    def drop(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._size -= request.size


class _BatchRequest(_Request):
    """A batch: what is done of it, the ticket of the rest, and in the end the results."""

    __slots__ = ("asking", "done", "results", "ticket")

    def __init__(self) -> None:
        super().__init__()
        self.ticket = 0  # of the attempt under way; 0: there is none
        self.asking: list[Asking] = []  # those who wait for the results
        self.done: tuple[Result, ...] = ()  # by an attempt whose client went away
        self.results: tuple[Result, ...] | None = None


class Asking:
    """One client's wait for the results of a batch; `leave` when it has gone."""

    __slots__ = ("_done", "_repeats", "_request")

    def __init__(self, repeats: Repeats, request: _BatchRequest, done: Done) -> None:
        self._repeats, self._request, self._done = repeats, request, done

    def leave(self) -> None:
        """Wait no longer. May be called again, and after the results have come."""
        if self in self._request.asking:
            self._repeats.left(self._request, self)

    def tell(self, results: tuple[Result, ...] | None) -> None:
        """The results are there; None: the server was stopped."""
        self._done(results)


class Repeats:
    """Answers each batch once, however often it is asked."""

    def __init__(
        self,
        service: StoreService,
        encode_reply: ReplyEncoder,
        limits: Limits | None = None,
    ) -> None:
        self._service = service
        self._encode_reply = encode_reply
        self._loop = asyncio.get_running_loop()
        self._memory: _Memory[_BatchRequest] = _Memory(limits or Limits())

    def __len__(self) -> int:
        return len(self._memory)

    async def answer(self, request_id: str, operations: Sequence[Operation]) -> bytes:
        """The encoded reply to this request, carried out now or earlier."""
        future: asyncio.Future[tuple[Result, ...] | None] = self._loop.create_future()
        asking = self.ask(request_id, operations, into(future))
        try:
            return self._encode_reply(results_of(await future))
        finally:
            asking.leave()

    def ask(self, request_id: str, operations: Sequence[Operation], done: Done) -> Asking:
        """Have `done` called with the results of this request, carried out now or earlier.

        When every client that waits for it has gone, the request waits no longer; what it had
        carried out stays done, and a repeat goes on from there. Raises StoppedError where the
        service is closed.
        """
        request = self._memory.get(request_id)
        if request is None:
            request = _BatchRequest()
            self._memory.add(request_id, request, self._loop.time())
        asking = Asking(self, request, done)
        if request.results is not None:
            asking.tell(request.results)
            return asking
        request.asking.append(asking)
        request.pending += 1
        if not request.ticket:
            self._begin(request, operations[len(request.done) :])
        return asking

    def _begin(self, request: _BatchRequest, rest: Sequence[Operation]) -> None:
        def done(results: tuple[Result, ...] | None) -> None:
            self._answered(request, results)

        request.ticket = -1  # it may be answered before it has a ticket
        try:
            ticket = self._service.begin(rest, done)
        except StoppedError:
            request.ticket, request.pending = 0, 0
            request.asking.clear()
            raise
        if request.ticket:
            request.ticket = ticket

    def _answered(self, request: _BatchRequest, results: tuple[Result, ...] | None) -> None:
        request.ticket = 0
        if results is not None:
            request.results = results = request.done + results
            self._memory.answered(request, self._encode_reply.cost(results))
        asking, request.asking, request.pending = request.asking, [], 0
        for one in asking:
            one.tell(results)

    def left(self, request: _BatchRequest, asking: Asking) -> None:
        """One who waited for a request waits no longer; for `Asking`."""
        request.asking.remove(asking)
        request.pending -= 1
        if not request.pending and request.ticket:
            request.done += self._service.cancel(request.ticket)
            request.ticket = 0


class _Post(_Request):
    """A POST to another room's route: the task that answers it, or (status, body) as answered."""

    __slots__ = ("said", "task")

    def __init__(
        self,
        task: asyncio.Task[web.StreamResponse] | None = None,
        said: tuple[int, bytes] | None = None,
    ) -> None:
        super().__init__()
        self.task, self.said = task, said


class PostsOnce:
    """Middleware: a POST with an X-Request-Id reaches its handler once.

    The handler runs to its end even if its client goes away, so that the repeat finds its
    answer; it must have its own deadline. Failures of the server itself (5xx) are not
    remembered: a repeat tries again.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._memory: _Memory[_Post] = _Memory(limits or Limits())

    def __len__(self) -> int:
        return len(self._memory)

    def knows(self, path: str, request_id: str) -> bool:
        """Whether this POST has been here before."""
        return self._memory.get(f"{path} {request_id}") is not None

    def remember(self, path: str, request_id: str, status: int, body: bytes, now: float) -> None:
        """A POST was answered with this JSON document; `body` may be shared by many."""
        self._memory.add(f"{path} {request_id}", _Post(said=(status, body)), now)

    def middleware(self) -> Middleware:
        """The middleware to put behind the token check."""

        @web.middleware
        async def once(request: web.Request, handler: Handler) -> web.StreamResponse:
            request_id = request.headers.get(REQUEST_ID_HEADER)
            if request.method != "POST" or request.path == BATCH_PATH or not request_id:
                return await handler(request)
            await request.read()  # in its own task: the connection may go, the body stays
            return await self._answer(f"{request.path} {request_id}", request, handler)

        return once

    async def _answer(
        self, request_id: str, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        post = self._memory.get(request_id)
        if post is None:
            task = loop.create_task(shape_errors(request, handler))
            post = _Post(task)
            self._memory.add(request_id, post, loop.time())
            post.pending += 1
            task.add_done_callback(lambda task: self._ended(request_id, post, task))
        if post.task is None:
            status, body = post.said or (204, b"")
            return web.Response(body=body, status=status, content_type=JSON)
        await asyncio.wait((post.task,))
        answer = post.task.result()
        if not isinstance(answer, web.Response):
            return answer  # a stream belongs to the one who asked first
        return web.Response(body=answer.body, status=answer.status, headers=answer.headers)

    def _ended(self, request_id: str, post: _Post, task: asyncio.Task[web.StreamResponse]) -> None:
        post.pending -= 1
        if task.cancelled() or task.exception() is not None or task.result().status >= 500:
            self._memory.drop(request_id)
            return
        answer = task.result()
        body = answer.body if isinstance(answer, web.Response) else b""
        self._memory.answered(post, len(body) if isinstance(body, bytes) else 0)
