"""The ledger of one data set: each shard is to do, with a worker, done, or in quarantine.

Fast workers come back for more, slow ones take fewer, and the shards of a lost worker go back to
the front of the queue. Nothing here reads data or a clock; times are monotonic seconds.

A shard is handed out with a *token*, larger than every token before it (a fencing token), so that
a late report of a worker taken for dead differs from a report of the shard's present holder.
A shard whose workers keep dying is put in quarantine by name, and the data set is then not
complete. To do and done are not kept as sets: the source counts forward, so memory grows with the
shards that are handed out, returned or in quarantine, and not with the data set.
"""

from collections import deque
from collections.abc import Mapping

from msgspec import Struct, field

from elastic_driver.errors import UsageError
from elastic_driver.policies.shard_messages import (
    Description,
    DoneAnswer,
    End,
    Granted,
    LedgerState,
    NextAnswer,
    Quarantined,
    RangeDescription,
    RefusalCode,
    ShardAccepted,
    ShardCounts,
    ShardRefused,
    Wait,
)
from elastic_driver.policies.shard_sources import RangeSource, Shard, Source, StreamSource


class _Holder(Struct):
    """The shards of one worker, oldest first, and the end of its lease."""

    expires: float
    tokens: dict[Shard, int] = field(default_factory=dict)


class _Past(Struct):
    """The history of a shard that was lost at least once and is not done."""

    losses: int = 0  # of them, how many workers died training it
    progress: int = 0  # records that were trained nevertheless, where its holder lives on
    tokens: set[int] = field(default_factory=set)  # all that may still come late


class ShardLedger:
    """Hands out the shards of one source and keeps account of them.

    Args:
        source: where shards come from.
        lease: seconds after which a silent worker's shards go to others.
        max_losses: so many workers may die training a shard before it is put in quarantine.
        max_held: shards one worker may hold at a time (one trained, the others prefetched).
    """

    def __init__(
        self, source: Source, *, lease: float = 60.0, max_losses: int = 3, max_held: int = 8
    ) -> None:
        if lease <= 0 or max_losses < 1 or max_held < 1:
            raise UsageError(
                f"lease={lease}, max_losses={max_losses}, max_held={max_held}: "
                "all three must be positive"
            )
        self._source = source
        self._lease, self._max_losses, self._max_held = lease, max_losses, max_held
        self._holders: dict[str, _Holder] = {}
        self._doing: dict[Shard, str] = {}  # invariant: the holders' shards, by shard
        self._returned: deque[Shard] = deque()  # to do, before the source's next
        self._past: dict[Shard, _Past] = {}  # of shards that are returned, doing or quarantined
        self._quarantine: dict[Shard, Quarantined] = {}
        self._poison: dict[tuple[str, int, int], Quarantined] = {}  # the same, for later epochs
        self._last_done: dict[str, tuple[Shard, int]] = {}  # so that a repeated report is no error
        self._epoch = 0
        self._done = self._done_records = 0
        self._first_token = self._next_token = 1  # first: of those that still count

    # ---- requests of workers ----------------------------------------------------------------

    def next(self, worker: str, now: float) -> NextAnswer:
        """Return a shard for this worker; `Wait` while others hold shards that may come back."""
        held = self._holders.get(worker)
        if held is not None and len(held.tokens) >= self._max_held:
            self.renew(worker, now)
            return Wait(f"{worker} holds {len(held.tokens)} shards; report one done first")
        while True:
            shard = self._take()
            if shard is not None:
                return self._grant(shard, worker, now)
            if self._doing:
                return Wait(f"the last {len(self._doing)} shards are with {self._who_holds()}")
            if not self._source.drained():
                return Wait("the stream has no new records")
            if not self._source.next_epoch():
                return self._end()

    def done(self, worker: str, shard: Shard, token: int, now: float) -> DoneAnswer:
        """Take in that the worker has trained a shard. A repeated report gets the same answer."""
        holder = self._doing.get(shard)
        if holder == worker and self._holders[worker].tokens[shard] == token:
            self.renew(worker, now)
            self._drop(worker, shard)
            return self._finish(worker, shard, token, late=False)
        if holder is not None:
            return ShardRefused(
                RefusalCode.HELD, f"{shard.name} was taken from {worker}; {holder} has it"
            )
        past = self._past.get(shard)
        if past is not None and token in past.tokens:
            if self._quarantine.pop(shard, None) is None:
                self._returned.remove(shard)
            self._poison.pop(_records(shard), None)
            return self._finish(worker, shard, token, late=True)
        if self._last_done.get(worker) == (shard, token):
            return ShardAccepted(shard)
        return ShardRefused(
            RefusalCode.DONE,
            f"{shard.name} is done, or was never given to {worker} as token {token}",
        )

    def renew(self, worker: str, now: float) -> None:
        """Extend the worker's lease of its shards."""
        if worker in self._holders:
            self._holders[worker].expires = now + self._lease

    # ---- ends of workers -----------------------------------------------------------------

    def worker_lost(self, worker: str, reason: str) -> list[Quarantined]:
        """Return a lost worker's shards to the front; blame its oldest one, which it was training.

        Its other shards were only prefetched. Returns the shards newly in quarantine.
        """
        held = self._take_back(worker)
        self._last_done.pop(worker, None)
        if not held:
            return []
        blamed = held[0]
        past = self._past[blamed]
        past.losses += 1
        if past.losses < self._max_losses:
            return []
        self._returned.remove(blamed)
        return [self._lock_up(blamed, past.losses, f"{worker}: {reason}")]

    def worker_left(self, worker: str) -> None:
        """Return the shards of a worker that leaves as planned to the front; blame none."""
        self._take_back(worker)
        self._last_done.pop(worker, None)

    def expire(self, now: float) -> list[Quarantined]:
        """Take the shards of all workers whose lease is over; as `worker_lost` for each."""
        over = sorted(worker for worker, held in self._holders.items() if held.expires <= now)
        reason = f"it has not renewed its lease of {self._lease:g} s"
        return [found for worker in over for found in self.worker_lost(worker, reason)]

    def deadline(self) -> float | None:
        """Return the time of the next expiry; None if no shard is handed out."""
        return min((held.expires for held in self._holders.values()), default=None)

    def blame(self, worker: str, reason: str) -> list[Quarantined]:
        """Blame the oldest shard of a holder that lives on for a loss; may quarantine it.

        Such a holder is a world whose members train its shards together: it goes on where it was,
        so only losses without progress between them count against a shard.
        """
        held = self._holders.get(worker)
        if held is None:
            return []
        shard, token = next(iter(held.tokens.items()))
        past = self._past.setdefault(shard, _Past())
        past.losses += 1
        if past.losses < self._max_losses:
            return []
        past.tokens.add(token)
        self._drop(worker, shard)
        return [self._lock_up(shard, past.losses, f"a member of {worker}: {reason}")]

    def resume(self, worker: str, held: Mapping[int, int], now: float) -> list[int]:
        """Agree with `worker` on what it holds (token → records trained); return tokens it lost.

        Those shards are with other workers, returned or in quarantine. Shards it holds but does not
        name go back to the front, since the worker has forgotten them. A world that rolled back may
        name a token that was reported done; it trains these records again.
        """
        self.renew(worker, now)
        mine = self._holders.get(worker, _Holder(expires=now)).tokens
        for shard, token in mine.items():
            past = self._past.get(shard)
            if past is not None and held.get(token, 0) > past.progress:
                past.progress, past.losses = held[token], min(past.losses, 1)
        forgotten = [shard for shard, token in mine.items() if token not in held]
        for shard in forgotten:
            self._past.setdefault(shard, _Past()).tokens.add(mine[shard])
            self._drop(worker, shard)
        self._returned.extendleft(reversed(forgotten))
        lost = {token for past in self._past.values() for token in past.tokens}
        return [token for token in held if token in lost or token < self._first_token]

    # ---- state ---------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Return every violated invariant as a sentence."""
        held = {shard: worker for worker, h in self._holders.items() for shard in h.tokens}
        wrong = [] if held == self._doing else ["the holders' shards are not those in work"]
        twice = self._doing.keys() & {*self._returned, *self._quarantine}
        return [*wrong, *(f"{shard.name} is in work and to do again" for shard in twice)]

    def workers(self) -> list[str]:
        """Return the workers that hold shards."""
        return list(self._holders)

    def counts(self) -> ShardCounts:
        """Return the number of shards by state."""
        return ShardCounts(
            epoch=self._epoch,
            done=self._done,
            done_records=self._done_records,
            doing=len(self._doing),
            returned=len(self._returned),
            quarantined=len(self._quarantine),
            workers=len(self._holders),
        )

    def quarantined(self) -> list[Quarantined]:
        """Return the shards in quarantine, with the reason of each."""
        return list(self._quarantine.values())

    def checkpoint(self) -> LedgerState:
        """Return the progress as plain data, to be kept beside a model's checkpoint.

        A shard that a worker holds may not be in that model: it counts as to do again.
        """
        doing = sorted(
            self._doing, key=lambda shard: self._holders[self._doing[shard]].tokens[shard]
        )
        losses = tuple((shard, past.losses) for shard, past in self._past.items() if past.losses)
        return LedgerState(
            source=self._source.save(),
            outstanding=(*doing, *self._returned),
            losses=losses,
            quarantined=tuple(self._quarantine.values()),
            done=self._done,
            done_records=self._done_records,
            next_token=self._next_token,
        )

    def restore(self, state: LedgerState) -> None:
        """Go back to a checkpoint; tokens given out before are refused from now on."""
        self._source.load(state.source)
        self._holders.clear()
        self._doing.clear()
        self._last_done.clear()
        self._returned = deque(state.outstanding)
        self._past = {shard: _Past(losses=losses) for shard, losses in state.losses}
        self._quarantine = {entry.shard: entry for entry in state.quarantined}
        self._poison = {_records(entry.shard): entry for entry in state.quarantined}
        self._done, self._done_records = state.done, state.done_records
        self._epoch = max((shard.epoch for shard in state.outstanding), default=self._epoch)
        self._first_token = self._next_token = max(self._next_token, state.next_token)

    # ---- inside --------------------------------------------------------------------------

    def _take(self) -> Shard | None:
        """Return the next shard to do: returned ones first, then the source's.

        Records that were quarantined in an earlier epoch stay so: they would kill workers again.
        """
        if self._returned:
            return self._returned.popleft()
        shard = self._source.take()
        while shard is not None and (poison := self._poison.get(_records(shard))) is not None:
            self._quarantine[shard] = Quarantined(shard, poison.losses, poison.reason)
            shard = self._source.take()
        return shard

    def _grant(self, shard: Shard, worker: str, now: float) -> Granted:
        token = self._next_token
        self._next_token += 1
        held = self._holders.setdefault(worker, _Holder(expires=now + self._lease))
        held.tokens[shard] = token
        self._doing[shard] = worker
        self._epoch = shard.epoch
        self.renew(worker, now)
        return Granted(shard, token, self._lease)

    def _drop(self, worker: str, shard: Shard) -> None:
        """Remove a shard from its holder."""
        del self._doing[shard]
        held = self._holders[worker]
        del held.tokens[shard]
        if not held.tokens:
            del self._holders[worker]

    def _finish(self, worker: str, shard: Shard, token: int, *, late: bool) -> ShardAccepted:
        self._past.pop(shard, None)
        self._last_done[worker] = (shard, token)
        self._done += 1
        self._done_records += shard.records
        return ShardAccepted(shard, late)

    def _lock_up(self, shard: Shard, losses: int, last: str) -> Quarantined:
        sentence = f"{losses} workers died training it, the last one {last}"
        entry = Quarantined(shard, losses, sentence)
        self._quarantine[shard] = self._poison[_records(shard)] = entry
        return entry

    def _take_back(self, worker: str) -> list[Shard]:
        """Return a worker's shards to the front, oldest first, and remember their tokens."""
        held = self._holders.pop(worker, None)
        if held is None:
            return []
        for shard, token in held.tokens.items():
            del self._doing[shard]
            self._past.setdefault(shard, _Past()).tokens.add(token)
        shards = list(held.tokens)
        self._returned.extendleft(reversed(shards))
        return shards

    def _who_holds(self) -> str:
        names = sorted(self._holders)
        return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")

    def _end(self) -> End:
        names = tuple(shard.name for shard in self._quarantine)
        reason = "every record was trained"
        if names:
            reason = f"all but {len(names)} shards in quarantine were trained: {names[0]}, …"
        return End(complete=not names, quarantined=names, reason=reason)


def _records(shard: Shard) -> tuple[str, int, int]:
    """Return the records of a shard, the same in every epoch."""
    return shard.partition, shard.start, shard.stop


def open_ledger(
    dataset: Description, *, lease: float, max_held: int
) -> tuple[ShardLedger, StreamSource | None]:
    """Return a new ledger of the described data set, and its source if it is a stream.

    Raises `UsageError` for an invalid description.
    """
    source: RangeSource | StreamSource
    if isinstance(dataset, RangeDescription):
        epochs, shuffle, seed = dataset.epochs, dataset.shuffle, dataset.seed
        size = dataset.shard_records
        source = RangeSource(dataset.records, size, epochs=epochs, shuffle=shuffle, seed=seed)
    else:
        source = StreamSource(dataset.partitions, dataset.shard_records)
    ledger = ShardLedger(source, lease=lease, max_losses=dataset.max_losses, max_held=max_held)
    return ledger, source if isinstance(source, StreamSource) else None
