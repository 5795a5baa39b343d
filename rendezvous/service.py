"""The store on an event loop: batches are answered by callback, deadlines become a timer.

`RendezvousServer` owns one service, on its thread; everything here runs on that loop. It decides
nothing about keys (`store` does) and knows nothing about HTTP (`web` does).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from rendezvous.answers import AnswerMemory
from rendezvous.auth import Caller
from rendezvous.errors import StoppedError
from rendezvous.limits import Hits, Limits, Owner
from rendezvous.store import Answered, KVStore, Outcome
from rendezvous.wire import Operation, Result, Set, Written, size_of

log = logging.getLogger(__name__)

RENEWAL_S = 1.0  # for lease renewals that wait in socket buffers to be read
REJOIN_S = 0.05  # for a client whose connection broke to come back on a new one
_HELD_UP_S = 0.5  # a timer this late means that the loop itself was held up
_TOLD_S = 5.0  # a busy machine does it for a moment now and then

Results = tuple[Result, ...]
# Takes the new values of keys; None: it is gone.
OnChanges = Callable[[dict[str, bytes | None]], None]
# Takes the results of a batch, or None if the service was closed first.
Done = Callable[[Results | None], None]


@dataclass(eq=False)
class _WaitingRequest:
    """A batch with a request id that is being carried out, and the clients that wait for it."""

    operations: Sequence[Operation]
    before: Results  # of earlier attempts, whose clients have all gone
    clients: list[Done]
    ticket: Done  # of the current attempt
    owner: Owner


class StoreService:
    """Carries out batches on the store and answers those that wait.

    `on_lease_expired(key)` is called on the loop for each lease that expires. `on_client_left(key)`
    is called if a client goes away while its batch waits, for each lease that the batch has
    renewed, unless the client is back within `REJOIN_S`. `on_changes(values)` is called with what a
    later store has to have, too: the values of all keys but those that begin with one of `passing`,
    or have a lease. None of them may block.
    """

    def __init__(
        self,
        on_lease_expired: Callable[[str], None] | None = None,
        first_revision: int = 0,
        memory: AnswerMemory[Results] | None = None,
        on_client_left: Callable[[str], None] | None = None,
        *,
        on_changes: OnChanges | None = None,
        passing: tuple[str, ...] = (),
        limits: Limits | None = None,
        hits: Hits | None = None,
        system: tuple[str, ...] = (),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        kept = None if on_changes is None else passing
        self._store = KVStore(first_revision, kept, limits, hits, system, is_of_crowd=_is_of_crowd)
        self._on_changes = on_changes
        self._on_lease_expired, self._on_client_left = on_lease_expired, on_client_left
        self._requests: dict[str, _WaitingRequest] = {}
        self._memory = AnswerMemory() if memory is None else memory
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of batches that wait for a key."""
        return len(self._store.waiting)

    # ---- batches -------------------------------------------------------------------------

    def ask(
        self,
        operations: Sequence[Operation],
        done: Done,
        request_id: str = "",
        *,
        bounded: bool = True,
        owner: Owner = None,
    ) -> Callable[[], object]:
        """Carry out a batch and call `done` once with its results, perhaps at once.

        Return a function to call when the client goes away; after that `done` is not called.

        A request with an id is carried out once: a repeat gets the results of the first request, or
        waits with it. When all its clients have gone, it stops waiting. The operations that it has
        carried out stay done, and a repeat carries out the others. `bounded`: the limits hold, as
        they do for every batch but the driver's own. `owner`: see `StoreSpace`.
        """
        if self._closed:
            done(None)
        elif not request_id:
            self._submit(done, operations, bounded, owner)
            return partial(self._store.cancel, done)
        elif (request := self._requests.get(request_id)) is not None:
            request.clients.append(done)
            return partial(self._leave, request_id, request, done)
        elif len(before := self._memory.get(request_id) or ()) == len(operations):
            done(before)
        else:
            ticket = partial(self._answered, request_id, owner)
            request = self._requests[request_id] = _WaitingRequest(
                operations, before, [done], ticket, owner
            )
            self._submit(ticket, operations[len(before) :], bounded, owner)
            return partial(self._leave, request_id, request, done)
        return lambda: None

    async def carry_out(
        self,
        operations: Sequence[Operation],
        request_id: str = "",
        *,
        bounded: bool = True,
        owner: Owner = None,
    ) -> Results:
        """Return the results of a batch; raise StoppedError if the service is closed.

        A caller that is cancelled counts as a client that went away (see `ask`).
        """
        answer: asyncio.Future[Results | None] = self._loop.create_future()

        def done(results: Results | None) -> None:
            if not answer.done():
                answer.set_result(results)

        leave = self.ask(operations, done, request_id, bounded=bounded, owner=owner)
        try:
            results = await answer
        finally:
            leave()
        if results is None:
            raise StoppedError("the rendezvous server was stopped")
        return results

    def close(self) -> None:
        """Refuse the batches that wait, and every later one."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for ticket in self._store.waiting:
            self._store.cancel(ticket)
            _answer(cast("Done", ticket), None)

    def _answered(self, request_id: str, owner: Owner, results: Results | None) -> None:
        request = self._requests.pop(request_id)
        if results is not None:
            results = request.before + results
            self._remember(request_id, owner, results)
        for done in request.clients:
            _answer(done, results)

    def _leave(self, request_id: str, request: _WaitingRequest, done: Done) -> None:
        if self._requests.get(request_id) is not request:
            return
        request.clients.remove(done)
        if not request.clients:
            del self._requests[request_id]
            results = request.before + (self._store.cancel(request.ticket) or ())
            self._remember(request_id, request.owner, results)
            for operation, result in zip(request.operations, results, strict=False):
                if isinstance(operation, Set) and operation.lease and isinstance(result, Written):
                    renewed = operation.key, result.revision
                    self._loop.call_later(REJOIN_S, self._left, request_id, *renewed)

    def _left(self, request_id: str, key: str, revision: int) -> None:
        """Tell the listener about a client that went away and has not come back."""
        back = request_id in self._requests or self._store.revision_of(key) != revision
        if self._on_client_left is not None and not back and not self._closed:
            self._on_client_left(key)

    def _remember(self, request_id: str, owner: Owner, results: Results) -> None:
        size = sum(map(size_of, results))
        self._memory.put(request_id, results, size, self._loop.time(), owner=owner)

    # ---- the store -----------------------------------------------------------------------

    def _submit(
        self, ticket: Done, operations: Sequence[Operation], bounded: bool, owner: Owner
    ) -> None:
        now = self._loop.time()
        outcomes = self._store.submit(ticket, operations, now, bounded=bounded, owner=owner)
        self._deliver(outcomes)

    def _deliver(self, outcomes: list[Outcome]) -> None:
        if self._on_changes is not None and (changes := self._store.take_changes()):
            self._on_changes(changes)
        for outcome in outcomes:
            if isinstance(outcome, Answered):
                _answer(cast("Done", outcome.ticket), outcome.results)
            elif self._on_lease_expired is not None:
                try:
                    self._on_lease_expired(outcome.key)
                except Exception:
                    log.exception("lease %s expired, but telling its listener failed", outcome.key)
        deadline = self._store.next_deadline()
        # An earlier timer stays: it finds nothing due and is set again.
        if deadline is not None and (self._timer is None or self._timer.when() > deadline):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(deadline, self._expire, deadline)

    def _expire(self, planned: float) -> None:
        """End the leases and waits that are due.

        If the loop did not run for a while (SIGSTOP, overload), the holders of leases ran, but the
        loop could not read their renewals: the leases are extended by that time.
        """
        self._timer, now = None, self._loop.time()
        late = now - planned
        if late > _HELD_UP_S:
            self._store.postpone_leases(late + RENEWAL_S)
            level = logging.WARNING if late > _TOLD_S else logging.INFO
            log.log(level, "rendezvous was held up for %.1fs; leases postponed", late)
        self._deliver(self._store.expire(now))


def _answer(done: Done, results: Results | None) -> None:
    """Hand a client its results; an error there must not cost the other clients theirs."""
    try:
        done(results)
    except Exception:
        log.exception("a batch was carried out, but telling its client failed")


def _is_of_crowd(owner: Owner) -> bool:
    """Return whether an owner of keys is one of many; the others have room beside all of these."""
    return isinstance(owner, Caller) and owner.role.crowd
