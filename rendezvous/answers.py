"""What a server remembers of its answers: those that may be asked for again, and their times.

A client whose connection broke asks again. `AnswerMemory` keeps answers of any kind. `PostsOnce`
knows which POSTs were answered or are being answered, whichever way they came: the fast path and
the middleware of aiohttp share one. Both run on the server's loop.

`RequestTimes` has histograms of the time of each kind of request. A histogram is a fixed array of
counters, so recording a duration takes a fraction of a microsecond and its memory never grows. One
thread writes a histogram; any thread may read it. Times are seconds.
"""

import asyncio
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from rendezvous import wire
from rendezvous.auth import Caller
from rendezvous.fairness import Shares, owner_of
from rendezvous.limits import Owner

_ANSWER_BYTES = 1024  # assumed size of an answer that is kept, without its body and key
_MOST_PENDING = 65536  # POSTs that are being answered; each may outlive its client's connection
V = TypeVar("V")


@dataclass(slots=True)
class _Kept(Generic[V]):
    """An answer that is kept, about how many bytes it has, since when, and of whom it is."""

    answer: V
    size: int
    since: float
    owner: Owner


class AnswerMemory(Generic[V]):
    """Answers by request id: at most `count`, `size` bytes in all, none older than `seconds`.

    One owner (None: the driver, which may have all) has a quarter of both at most: who asks without
    end pushes out no answers but its own.
    By default an answer is kept for twice the longest wait: by then its client has repeated the
    request or given up.
    """

    def __init__(
        self, seconds: float = 120.0, count: int = 65536, size: int = 64 * 1024 * 1024
    ) -> None:
        self._seconds, self._count, self._max_size = seconds, count, size
        self._size = 0
        self._kept: OrderedDict[str, _Kept[V]] = OrderedDict()  # the oldest first
        self._ids_of: dict[Owner, OrderedDict[str, None]] = {}  # the same, by owner
        self._size_of: Counter[Owner] = Counter()

    def get(self, request_id: str) -> V | None:
        """Return the answer to a request; None if it is not known."""
        kept = self._kept.get(request_id)
        return None if kept is None else kept.answer

    def put(
        self, request_id: str, answer: V, size: int, now: float, *, owner: Owner = None
    ) -> None:
        """Keep an answer of about `size` bytes; drop the oldest while they are too old or many."""
        self._drop(request_id)
        while (own := self._ids_of.get(owner)) and owner is not None:
            if not self._is_full(len(own), self._size_of[owner], 4):
                break
            self._drop(next(iter(own)))
        while self._kept:
            oldest, found = next(iter(self._kept.items()))
            full = self._is_full(len(self._kept), self._size, 1)
            if not full and found.since > now - self._seconds:
                break
            self._drop(oldest)
        self._kept[request_id] = _Kept(answer, size, now, owner)
        if (own := self._ids_of.get(owner)) is None:
            own = self._ids_of[owner] = OrderedDict()
        own[request_id] = None
        self._size += size
        self._size_of[owner] += size

    def _is_full(self, count: int, size: int, parts: int) -> bool:
        return count >= max(1, self._count // parts) or size > self._max_size // parts

    def _drop(self, request_id: str) -> None:
        kept = self._kept.pop(request_id, None)
        if kept is None:
            return
        self._size -= kept.size
        self._size_of[kept.owner] -= kept.size
        own = self._ids_of[kept.owner]
        del own[request_id]
        if not own:
            del self._ids_of[kept.owner], self._size_of[kept.owner]


class PostAnswer(NamedTuple):
    """The answer to a POST that is kept for its repeats."""

    status: int
    body: bytes
    headers: Mapping[str, str]


class PostsOnce:
    """A POST with an X-Request-Id reaches its handler once; keys are `path id`.

    The handler runs to its end even if its client goes away, so that the repeat finds its
    answer; it must have its own deadline. Failures of the server itself (5xx) are not kept, so
    that a repeat tries again. Batches of the store have their own memory, in `StoreService`, and
    POSTs without a token have none: strangers choose their ids.
    """

    def __init__(self) -> None:
        self._memory: AnswerMemory[PostAnswer] = AnswerMemory()
        self._pending: dict[str, asyncio.Future[PostAnswer]] = {}
        self._shares = Shares(_MOST_PENDING)  # of those that are pending

    def key_of(self, caller: Caller | None, path: str, request_id: str | None) -> str:
        """Return the key of a POST; "" if it has none, and is not kept."""
        if not request_id or caller is None or path == wire.BATCH_PATH:
            return ""
        return f"{path} {caller.own_id(request_id)}"

    def knows(self, key: str) -> bool:
        """Return whether this POST was received before."""
        return key in self._pending or self._memory.get(key) is not None

    def may_begin(self, caller: Caller) -> bool:
        """Return whether one more POST of a client may be answered now."""
        return self._shares.has_room(caller)

    def begin(self, key: str, caller: Caller) -> bool:
        """Record that a POST is being answered; `end` follows. False: its client has its share."""
        if not self._shares.take(caller):
            return False
        self._pending[key] = asyncio.get_running_loop().create_future()
        return True

    def end(self, key: str, caller: Caller, answer: PostAnswer | None) -> None:
        """Record the answer to a POST, with or without `begin`; None: there will be none."""
        if answer is not None and answer.status < 500:
            size = _ANSWER_BYTES + len(key) + len(answer.body)
            now = asyncio.get_running_loop().time()
            self._memory.put(key, answer, size, now, owner=owner_of(caller))
        pending = self._pending.pop(key, None)
        if pending is None:
            return
        self._shares.give_back(caller)
        if answer is None:
            pending.cancel()
        else:
            pending.set_result(answer)

    async def answer_to(self, key: str) -> PostAnswer:
        """Return the answer to a POST that was received before, once there is one."""
        kept = self._memory.get(key)
        return await asyncio.shield(self._pending[key]) if kept is None else kept


# ---- times -------------------------------------------------------------------------------

WAITS = "waits"  # requests that waited for a key to be written
REQUEST_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class Histogram:
    """Counts of durations; bucket `i` has those up to `bounds[i]`, the last one all longer ones."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Record a duration that was measured this many times."""
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.sum += seconds * times

    def cumulative(self) -> list[tuple[str, int]]:
        """Return for each bound, as Prometheus writes it, how many durations were not longer."""
        found, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), tuple(self.counts), strict=True):
            total += count
            found.append((bound, total))
        return found


class RequestTimes:
    """The seconds from a request's arrival until its answer was written, by kind of route.

    The kind is the first word of the route's path, so there are as many as the server has routes.
    """

    def __init__(self) -> None:
        self._times: dict[str, Histogram] = {}
        self._of_path: dict[str, Histogram] = {}  # the same, by path

    def of(self, path: str) -> Histogram:
        """Return the histogram of a route, by its path in the router."""
        found = self._of_path.get(path)
        if found is None:
            kind = path.removeprefix("/v1").strip("/").partition("/")[0]
            found = self._of_path[path] = self.of_kind(kind)
        return found

    def of_kind(self, kind: str) -> Histogram:
        """Return the histogram of one kind of route."""
        return self._times.setdefault(kind, Histogram(REQUEST_BOUNDS))

    def record(self, path: str, seconds: float, *, waited: bool) -> None:
        """Record the time of an answered request by its route; `waited`: for a key."""
        (self.of_kind(WAITS) if waited else self.of(path)).observe(seconds)

    def snapshot(self) -> Mapping[str, Histogram]:
        """Return the histograms by kind of route."""
        return dict(self._times)
