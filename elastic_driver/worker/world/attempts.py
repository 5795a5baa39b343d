"""Carries out what may block for ever in a thread that can be given up.

Connecting to peers cannot be interrupted, neither in gloo nor in NCCL, and a peer that dies in that
moment would hold everybody until some timeout. So it is done in a daemon thread, and the caller
goes on as soon as the round is known to be over; the thread ends when it can. Times are seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class RoundOverError(Exception):
    """The round a group was being built for is over; wait for the next one."""


class Attempt(Generic[T]):
    """One thing to do in a thread; the caller waits, and may be told that the round is over."""

    def __init__(self) -> None:
        self._outcome: SimpleQueue[tuple[T] | Exception] = SimpleQueue()

    def make(self, work: Callable[[], T], name: str, within: float) -> T:
        """What `work` returns in a thread called `name`.

        Raises what it raises, and `RoundOverError` once `abandon` was called or `within` seconds
        have passed.
        """
        threading.Thread(target=self._carry_out, args=(work,), name=name, daemon=True).start()
        try:
            outcome = self._outcome.get(timeout=within)
        except Empty:
            raise RoundOverError(f"no group within {within:.0f} s") from None
        if isinstance(outcome, tuple):
            return outcome[0]
        raise outcome

    def abandon(self, reason: str) -> None:
        """Let `make` raise now; any thread may call it, at any time."""
        self._outcome.put(RoundOverError(reason))

    def _carry_out(self, work: Callable[[], T]) -> None:
        try:
            result = work()
        except Exception as error:  # carried over to the thread that waits
            self._outcome.put(error)
        else:
            self._outcome.put((result,))
