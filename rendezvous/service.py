"""The store on an event loop: batches become awaitables, deadlines become timers.

`RendezvousServer` owns one service, on its thread; everything here runs on that loop. It decides
nothing about keys (`store` does) and knows nothing about HTTP (`routes` does).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import count

from rendezvous.errors import StoppedError
from rendezvous.store import Answered, KeyExpired, KVStore, Outcome
from rendezvous.wire import Operation, Result

log = logging.getLogger(__name__)

RENEWAL_S = 1.0  # for lease renewals that wait in socket buffers to be read
_HELD_UP_S = 0.5  # a timer this late means that the loop itself was held up

Done = Callable[[tuple[Result, ...] | None], None]
"""Takes the results of a batch, or None if the service was closed first."""


class StoreService:
    """Carries out batches on the store and answers those that wait.

    `on_lease_expired(key)` is called on the loop for each lease that expires; it must not block.
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
        """Number of batches that wait for a key."""
        return self._store.waiting

    def begin(self, operations: Sequence[Operation], done: Done) -> int:
        """Start a batch and return its ticket; `done` is called once, perhaps before that.

        `cancel(ticket)` gives the batch up; `done` is then not called. Raises StoppedError if
        the service is closed.
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
        """Return the results of a batch; if the caller is cancelled, the batch is too."""
        answer: asyncio.Future[tuple[Result, ...] | None] = self._loop.create_future()
        ticket = self.begin(operations, into(answer))
        try:
            return results_of(await answer)
        finally:
            self.cancel(ticket)

    def post(self, operations: Sequence[Operation]) -> None:
        """Carry out a batch and drop its results."""
        if not self._closed:
            self._deliver(self._store.submit(next(self._tickets), operations, self._loop.time()))

    def close(self) -> None:
        """Refuse the batches that wait, and every later one."""
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
                case KeyExpired(key=key):
                    self._report_expired(key)
        self._alarm.set(self._store.next_deadline())

    def _report_expired(self, key: str) -> None:
        if self._on_lease_expired is None:
            return
        try:
            self._on_lease_expired(key)
        except Exception:
            log.exception("lease %s expired, but telling its listener failed", key)

    def _expire(self, now: float, held_up: float) -> None:
        if held_up:
            self._store.postpone_leases(held_up + RENEWAL_S)
            log.warning("rendezvous was held up for %.1fs; leases postponed", held_up)
        self._deliver(self._store.expire(now))


def into(future: asyncio.Future[tuple[Result, ...] | None]) -> Done:
    """Return a `Done` that sets this future's result, unless the future was cancelled."""

    def done(results: tuple[Result, ...] | None) -> None:
        if not future.done():
            future.set_result(results)

    return done


def results_of(answer: tuple[Result, ...] | None) -> tuple[Result, ...]:
    """Return the results that `Done` was called with; raise StoppedError for None."""
    if answer is None:
        raise StoppedError("the rendezvous server was stopped")
    return answer


class Alarm:
    """One timer on the loop, for an owner of many deadlines.

    Calls `ring(now, held_up)` on the loop, in the loop's time, once each time it is set. `held_up`
    is usually 0, else the seconds for which the loop did not run (SIGSTOP, overload). Holders of
    leases ran meanwhile, and their renewals could not be read: the owner postpones their leases
    by `held_up` plus `RENEWAL_S`.
    """

    def __init__(self, ring: Callable[[float, float], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, deadline: float | None) -> None:
        """Ring no later than `deadline`; None: nothing is due. Called on the loop.

        An earlier timer stays: its ring finds nothing due, and the owner sets the alarm again.
        """
        if deadline is None or (self._timer is not None and self._timer.when() <= deadline):
            return
        self.off()
        self._timer = asyncio.get_running_loop().call_at(deadline, self._due, deadline)

    def off(self) -> None:
        """Do not ring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self, planned: float) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        late = now - planned
        self._ring(now, late if late > _HELD_UP_S else 0.0)
