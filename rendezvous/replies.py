"""Encodes what the store answers; an answer that many clients wait for is encoded once.

Pure. The server's loop owns one encoder, used for every batch, however it came in.
"""

from __future__ import annotations

from rendezvous.wire import Batch, Count, Entries, Get, Result, Watch, encode

_KEPT = 8  # answers that are shared
_SMALL = 256  # bytes to reckon with for an answer that only refers to a shared one


def reads_only(batch: Batch) -> bool:
    """Whether a batch changes nothing, so that a repeat may simply be carried out again."""
    return all(isinstance(operation, Get | Watch | Count) for operation in batch.operations)


class ReplyEncoder:
    """Encodes replies.

    The store hands the same `Entries` object to all who ask the same until something changes,
    so identity tells that the bytes are the same too. The entries kept here hold their objects,
    so that ids stay unique.
    """

    def __init__(self) -> None:
        self._parts: dict[int, tuple[Entries, bytes]] = {}
        self._replies: dict[int, tuple[Entries, bytes]] = {}

    def __call__(self, results: tuple[Result, ...]) -> bytes:
        """The bytes of `BatchReply(results)`; the same object for all who got one shared result."""
        if len(results) == 1 and isinstance(results[0], Entries):
            only = results[0]
            known = self._replies.get(id(only))
            return known[1] if known else _keep(self._replies, only, self._reply(results))
        return self._reply(results)

    def cost(self, results: tuple[Result, ...]) -> int:
        """About how many bytes it takes to remember these results beside what is kept anyway."""
        known = [result for result in results if isinstance(result, Entries)]
        shared = all(id(result) in self._parts for result in known)
        return _SMALL if shared else _SMALL + sum(len(self._part(result)) for result in known)

    def _reply(self, results: tuple[Result, ...]) -> bytes:
        return b'{"results":[' + b",".join(map(self._part, results)) + b"]}"

    def _part(self, result: Result) -> bytes:
        if not isinstance(result, Entries):
            return encode(result)
        known = self._parts.get(id(result))
        return known[1] if known else _keep(self._parts, result, encode(result))


def _keep(kept: dict[int, tuple[Entries, bytes]], entries: Entries, data: bytes) -> bytes:
    while len(kept) >= _KEPT:
        del kept[next(iter(kept))]
    kept[id(entries)] = (entries, data)
    return data
