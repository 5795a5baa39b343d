"""Decides which operations all ranks are ready for, and the order in which they are carried out.

Ranks submit operations in any order; names decide which belong together. The coordinator, on rank
0 of the world, collects requests until all ranks of a process set have sent theirs. It checks that
they agree, and orders the transfer: all ranks get the same operations in the same order, so no
transfer waits for another one. Small tensors are fused into one transfer. Pure: no clock, thread
or socket; times are seconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastic_driver.horovod.engine.requests import (
    OPERATIONS,
    Agreement,
    Key,
    Request,
    agree,
    ranks,
    title,
)

Batch = list[Agreement]
_FUSED = frozenset({"allreduce", "broadcast", "allgather", "reducescatter"})
_REDUCED = frozenset({"allreduce", "reducescatter"})
ALONE = ("alone",)
LARGE_BYTES = 4 * 2**20  # tensors from this size on gain nothing by being copied together
JOIN = Request("join", "join")
REMEMBERED_LISTS = 256  # combinations of what the ranks have sent


@dataclass(frozen=True)
class Ordered:
    """A batch for the next transfer, and the ranks that get it."""

    batch: Batch
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class NegotiationLimits:
    """Bounds that scripts and flags may set.

    Args:
        fusion_bytes: the largest transfer that small tensors are fused into; 0: none are.
        stall_warning: seconds after which a tensor that some rank lacks is named; None: never.
        stall_failure: seconds after which it becomes an error; None: never.
    """

    fusion_bytes: int = 25 * 2**20
    stall_warning: float | None = 60.0
    stall_failure: float | None = None


@dataclass(eq=False)
class _Pending:
    """An operation that some ranks have not requested yet.

    `error`: what those get that request it after it has failed.
    """

    members: frozenset[int]
    since: float
    requests: dict[int, Request] = field(default_factory=dict)
    told: bool = False
    error: str = ""
    answered: set[int] = field(default_factory=set)  # with the error

    @property
    def first(self) -> Request:
        """Return the request that came first."""
        return next(iter(self.requests.values()))


class Coordinator:
    """Collects the requests of all ranks, and orders what they agree on."""

    def __init__(self, size: int, limits: NegotiationLimits = NegotiationLimits()) -> None:
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._members = {0: frozenset(range(size))}
        self._limits = limits
        self._pending: dict[Key, _Pending] = {}  # the oldest first
        self._joined: list[int] = []  # in this order
        self._left: set[int] = set()
        self._next_set = 1
        # Lists that ranks have sent while nothing else was pending; those of all ranks together
        # are ordered as they were when the same lists came before.
        self._lists: dict[int, tuple[float, tuple[Request, ...]]] = {}  # since when
        self._ordered: dict[tuple[tuple[Request, ...], ...], list[Ordered]] = {}

    @property
    def all_left(self) -> bool:
        """Return whether every rank has left."""
        return len(self._left) == len(self.sets[0])

    def ready(self, rank: int, requests: Iterable[Request], now: float) -> list[Ordered]:
        """Add what a rank is ready for; return what can be carried out now, in this order."""
        listed = tuple(requests)
        idle = not (self._pending or self._joined or self._left or rank in self._lists)
        if not idle or not all(r.process_set == 0 and r.kind in _FUSED for r in listed):
            return self._take_lists() + self._take(rank, listed, now)
        self._lists[rank] = now, listed
        if len(self._lists) < len(self.sets[0]):
            return []
        together = tuple([self._lists[rank][1] for rank in self.sets[0]])
        if (known := self._ordered.get(together)) is not None:
            self._lists.clear()
            return known
        ordered = self._take_lists()
        if not self._pending and not any(one.batch[0].error for one in ordered):
            if len(self._ordered) >= REMEMBERED_LISTS:
                del self._ordered[next(iter(self._ordered))]
            self._ordered[together] = ordered
        return ordered

    def _take_lists(self) -> list[Ordered]:
        """Take the requests of lists that were kept whole, one by one."""
        lists, self._lists = self._lists, {}
        return [
            one
            for rank, (since, listed) in lists.items()
            for one in self._take(rank, listed, since)
        ]

    def _take(self, rank: int, requests: Iterable[Request], now: float) -> list[Ordered]:
        found: list[tuple[Agreement, Request]] = []
        failed: list[Ordered] = []
        for request in requests:
            if request.kind == "join" and not self._left:
                found += self._join(rank, request)
            elif error := self._refusal(rank, request, now):
                failed.append(_failed(request, error, [rank]))
            elif request.kind != "join":
                pending = self._pending[request.key]
                if self._joined or len(pending.requests) == len(pending.members):
                    found += self._complete(pending)
        return failed + self._fused(found)

    def leave(self, rank: int) -> list[Ordered]:
        """Let a rank go; what the others wait for with it fails."""
        failed = self._take_lists()
        self._left.add(rank)
        for key, pending in list(self._pending.items()):
            if rank not in pending.members:
                continue
            pending.requests.pop(rank, None)
            if not pending.requests and not pending.error:
                del self._pending[key]
            elif not pending.error:
                failed.append(self._fail(pending, _left_error(pending.first, [rank])))
            self._forget_failed(key)
        failed += [_failed(JOIN, _left_error(JOIN, [rank]), [r]) for r in self._joined if r != rank]
        self._joined.clear()
        return failed

    def deadline(self) -> float | None:
        """Return when `stalled` has to be asked next; None: not before the next request."""
        if self._limits.stall_failure is None and self._limits.stall_warning is None:
            return None
        self._take_lists()  # completes nothing, as some rank has sent none
        times = []
        for pending in self._pending.values():
            if pending.error:
                continue
            if self._limits.stall_failure is not None:
                times.append(pending.since + self._limits.stall_failure)
            if self._limits.stall_warning is not None and not pending.told:
                times.append(pending.since + self._limits.stall_warning)
                break  # the others are younger
        return min(times, default=None)

    def stalled(self, now: float) -> tuple[list[str], list[Ordered]]:
        """Return warnings about operations that ranks lack, each once, and those that fail now."""
        warnings, failed = [], self._take_lists()
        warning, failure = self._limits.stall_warning, self._limits.stall_failure
        for pending in list(self._pending.values()):
            waited = now - pending.since
            if pending.error:
                continue
            if failure is not None and waited >= failure:
                failed.append(self._fail(pending, f"{self._missing(pending)} in {waited:.0f} s"))
            elif warning is not None and waited >= warning and not pending.told:
                pending.told = True
                warnings.append(f"{self._missing(pending)} in {waited:.0f} s")
        return warnings, failed

    # ---- requests ------------------------------------------------------------------------

    def _refusal(self, rank: int, request: Request, now: float) -> str:
        """Record a request; return why it fails at once, or ""."""
        members = self._members.get(request.process_set, frozenset())
        if rank not in members:
            return f"{title(request)}: there is no such process set with rank {rank}"
        key = request.key
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = _Pending(members, now)
        if self._left and not pending.error and (gone := self._left & members):
            pending.error = _left_error(request, sorted(gone))
        if not pending.error:
            pending.requests[rank] = request
            return ""
        pending.answered.add(rank)
        error = pending.error
        self._forget_failed(key)
        return error

    def _complete(self, pending: _Pending) -> list[tuple[Agreement, Request]]:
        """Return the agreement if all members are there."""
        requests = pending.requests
        missing = len(pending.members) - len(requests)
        joined: Sequence[int] = ()
        if missing and self._joined:
            joined = [r for r in self._joined if r in pending.members and r not in requests]
            missing -= len(joined)
        if missing:
            return []
        first = pending.first
        del self._pending[first.key]
        found = agree(self.sets[first.process_set], requests, joined)
        if not found.error:
            found = self._change_sets(found, first)
        return [(found, first)]

    def _change_sets(self, found: Agreement, request: Request) -> Agreement:
        if request.kind == "add_process_set":
            number, self._next_set = self._next_set, self._next_set + 1
            self.sets[number] = request.splits
            self._members[number] = frozenset(request.splits)
            return Agreement(found.kind, found.name, value=number)
        if request.kind == "remove_process_set":
            self.sets.pop(request.root, None)
            self._members.pop(request.root, None)
            self._pending = {k: p for k, p in self._pending.items() if k[2] != request.root}
        return found

    def _join(self, rank: int, request: Request) -> list[tuple[Agreement, Request]]:
        self._joined.append(rank)
        found: list[tuple[Agreement, Request]] = []
        for pending in list(self._pending.values()):
            if not pending.error:
                found += self._complete(pending)
        if len(self._joined) == len(self.sets[0]):
            found.append((Agreement("join", request.name, value=self._joined[-1]), request))
            self._joined.clear()
        return found

    # ---- failures ------------------------------------------------------------------------

    def _fail(self, pending: _Pending, error: str) -> Ordered:
        """Fail an operation for those that have requested it, and for the others when they do."""
        first, asked = pending.first, sorted(pending.requests)
        pending.error = error
        pending.answered.update(asked)
        self._forget_failed(first.key)
        return _failed(first, error, asked)

    def _forget_failed(self, key: Key) -> None:
        """Forget an operation that has failed once nobody is left that may request it."""
        pending = self._pending.get(key)
        if (
            pending is not None
            and pending.error
            and pending.members <= (pending.answered | self._left)
        ):
            del self._pending[key]

    def _missing(self, pending: _Pending) -> str:
        first, there = pending.first, sorted(pending.requests)
        missing = sorted(pending.members.difference(there, self._joined))
        others = {
            kind
            for (kind, name, _), other in self._pending.items()
            if name == first.name
            and kind != first.kind
            and not other.requests.keys().isdisjoint(missing)
        }
        instead = f", but {', '.join(sorted(others))} with this name" if others else ""
        return f"{title(first)}: {ranks(there)} called it, and {ranks(missing)} did not{instead}"

    # ---- fusion --------------------------------------------------------------------------

    def _fused(self, found: Sequence[tuple[Agreement, Request]]) -> list[Ordered]:
        """Return batches of agreements that can be one transfer, in the order of their first."""
        ordered: list[Ordered] = []
        open_batches: dict[tuple[object, ...], tuple[Batch | None, int]] = {}
        limit = self._limits.fusion_bytes
        for agreement, request in found:
            like = ALONE if request.nbytes >= LARGE_BYTES else _fused_with(agreement, request)
            batch, size = open_batches.get(like, (None, 0))
            if batch is None or size + request.nbytes > limit:
                batch, size = [], 0
                ordered.append(Ordered(batch, self.sets.get(request.process_set, self.sets[0])))
            batch.append(agreement)
            if like != ALONE:
                open_batches[like] = batch, size + request.nbytes
        return ordered


def _fused_with(agreement: Agreement, request: Request) -> tuple[object, ...]:
    """Return what operations of one transfer have in common; `ALONE` for those on their own."""
    adasum = request.kind == "allreduce" and OPERATIONS[request.op] == "Adasum"
    mixed = request.kind in _REDUCED and len(set(request.dtypes)) > 1
    if agreement.error or request.kind not in _FUSED or adasum or mixed:
        return ALONE
    return (
        request.kind,
        request.process_set,
        request.dtypes[:1] if request.kind in _REDUCED else "",
        request.op,
        request.root,
        request.prescale,
        request.postscale,
        request.device,
        agreement.absent,
    )


def _failed(request: Request, error: str, to: Sequence[int]) -> Ordered:
    found = Agreement(request.kind, request.name, request.process_set, error=error)
    return Ordered([found], tuple(to))


def _left_error(request: Request, gone: Sequence[int]) -> str:
    return f"{title(request)}: {ranks(gone)} called hvd.shutdown()"
