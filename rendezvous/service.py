"""The store on an event loop: batches become awaitables, deadlines become timers.

`RendezvousServer` owns one, on its thread; everything here runs on that loop and nowhere
else. It decides nothing about keys (`store` does) and knows nothing of HTTP (`routes` does).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import count

from rendezvous.alarm import RENEWAL_S, Alarm
from rendezvous.errors import StoppedError
from rendezvous.store import Answered, KVStore, LeaseExpired, Outcome
from rendezvous.wire import Operation, Result

log = logging.getLogger(__name__)

Done = Callable[[tuple[Result, ...] | None], None]
"""Takes the results of a batch, or None where the service was closed first."""


class StoreService:
    """Carries out batches on the store and wakes those who wait.

    `on_lease_expired(key)` is called on the loop for each lease that ends; it must not block.
    """

    def __init__(
        self, on_lease_expired: Callable[[str], None] | None = None, first_revision: int = 0
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._store = KVStore(first_revision)
        self._on_lease_expired = on_lease_expired
        self._tickets = count(1)
        self._answers: dict[int, Done] = {}
        self._alarm = Alarm(self._expire)
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many batches wait for a key."""
        return self._store.waiting

    def begin(self, operations: Sequence[Operation], done: Done) -> int:
        """Start a batch and return its ticket; `done` is called once, perhaps before that.

        `cancel(ticket)` gives the batch up; `done` is then not called any more. Raises StoppedError
        where the service is closed.
        """
        if self._closed:
            raise StoppedError("the rendezvous server is stopping; ask its successor")
        ticket = next(self._tickets)
        self._answers[ticket] = done
        self._deliver(self._store.submit(ticket, operations, self._loop.time()))
        return ticket

    def cancel(self, ticket: int) -> tuple[Result, ...]:
        """Give up a batch that waits; return the results it had so far."""
        self._answers.pop(ticket, None)
        return self._store.cancel(ticket) or ()

    async def carry_out(self, operations: Sequence[Operation]) -> tuple[Result, ...]:
        """The results of a batch; a caller that is cancelled leaves no waiter behind."""
        answer: asyncio.Future[tuple[Result, ...] | None] = self._loop.create_future()
        ticket = self.begin(operations, into(answer))
        try:
            return results_of(await answer)
        finally:
            self.cancel(ticket)

    def post(self, operations: Sequence[Operation]) -> None:
        """Carry out a batch nobody waits for."""
        if not self._closed:
            self._deliver(self._store.submit(next(self._tickets), operations, self._loop.time()))

    def close(self) -> None:
        """Turn away those who wait, and everyone from now on."""
        self._closed = True
        self._alarm.off()
        answers, self._answers = self._answers, {}
        for ticket, done in answers.items():
            self._store.cancel(ticket)
            done(None)

    def _deliver(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Answered(ticket=int(ticket), results=results):
                    done = self._answers.pop(ticket, None)
                    if done is not None:
                        done(results)
                case LeaseExpired(key=key):
                    self._tell_lease_expired(key)
        self._alarm.set(self._store.next_deadline())

    def _tell_lease_expired(self, key: str) -> None:
        if self._on_lease_expired is None:
            return
        try:
            self._on_lease_expired(key)
        except Exception:
            log.exception("lease %s expired, but telling its listener failed", key)

    def _expire(self, now: float, stood_still: float) -> None:
        if stood_still:
            self._store.postpone_leases(stood_still + RENEWAL_S)
            log.warning("rendezvous stood still for %.1fs; leases postponed", stood_still)
        self._deliver(self._store.expire(now))


def into(future: asyncio.Future[tuple[Result, ...] | None]) -> Done:
    """What puts the results into a future, unless somebody has given that up."""

    def done(results: tuple[Result, ...] | None) -> None:
        if not future.done():
            future.set_result(results)

    return done


def results_of(answer: tuple[Result, ...] | None) -> tuple[Result, ...]:
    """What `Done` was called with; raises StoppedError where that was None."""
    if answer is None:
        raise StoppedError("the rendezvous server was stopped")
    return answer
