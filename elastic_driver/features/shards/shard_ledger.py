"""The ledger of one data set: each shard is to do, with a worker, done, or in quarantine.

Fast workers come back for more, slow ones take fewer, and the shards of a lost worker go back to
the front of the queue. Nothing here reads data or a clock; times are monotonic seconds.

Each shard is handed out with a *token* that is larger than every token before it (a fencing token).
It tells the late report of a worker that was taken for dead from a report of the present holder.
A shard whose workers keep dying is put in quarantine by name; the data set is then not complete.
The ledger keeps no set of what is to do or done, since the source counts forward. Its memory grows
with the shards that are handed out, returned or in quarantine, not with the data set.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from msgspec import Struct

from elastic_driver.errors import UsageError
from elastic_driver.features.shards import messages as m
from elastic_driver.features.shards.messages import Quarantined, Shard
from elastic_driver.features.shards.sources import (
    RangeSource,
    Source,
    StreamSource,
    check_saved,
    check_shards,
)
from elastic_driver.kernel.tables import Tables, make, saved, set_defaults, table
from elastic_driver.words import counted

MAX_AGREED = 8  # answers that are kept for requests which come again


class _Held(NamedTuple):
    """A shard that a worker holds, as a table has it."""

    shard: Shard
    token: int
    request: str | None  # that got it


@dataclass(slots=True)
class _Holder:
    """The shards of one worker, oldest first, and the end of its lease."""

    expires: float
    tokens: dict[Shard, int] = field(default_factory=dict)
    # The requests that got them, as a request comes again if its answer was lost; and back.
    requests: dict[Shard, str] = field(default_factory=dict)
    asked: dict[str, Shard] = field(default_factory=dict)

    def shards(self) -> list[_Held]:
        return [_Held(each, n, self.requests.get(each)) for each, n in self.tokens.items()]

    @classmethod
    def of(cls, expires: float, held: list[_Held]) -> "_Holder":
        asked = {each.request: each.shard for each in held if each.request is not None}
        requests = {shard: request for request, shard in asked.items()}
        return cls(expires, {each.shard: each.token for each in held}, requests, asked)


class _Past(Struct):
    """The history of a shard that a worker has lost and none has done yet."""

    losses: int = 0  # workers that died while they trained it
    progress: int = 0  # records that a holder which lives on has trained of it
    tokens: list[int] = msgspec.field(default_factory=list)  # earlier ones, whose reports may come


@dataclass(init=False)
class ShardLedger:
    """Hands out the shards of one data set and keeps account of them.

    Args:
        dataset: the description of the data set; raises `UsageError` if it makes no sense.
        lease: seconds after which a silent worker's shards go to others.
        max_held: shards one worker may hold at a time (one trained, the others prefetched).
    """

    dataset: m.Description = saved()
    _lease: float = saved(name="lease")
    _max_held: int = saved(name="max_held")
    _holders: dict[str, _Holder] = field(default_factory=dict)
    _doing: dict[Shard, str] = saved(factory=dict, name="doing")  # the holder of each shard in work
    # To do before the next shard of the source.
    _returned: deque[Shard] = saved(factory=deque, name="returned")
    # Of shards that are returned, doing or quarantined.
    _past: dict[Shard, _Past] = saved(factory=dict, name="past")
    _quarantine: dict[Shard, Quarantined] = saved(factory=dict, name="quarantine")
    # The same by their records, for later epochs.
    _poison: dict[tuple[str, int, int], Quarantined] = saved(factory=dict, name="poison")
    # So that a repeated report is no error.
    _last_done: dict[str, tuple[Shard, int]] = saved(factory=dict, name="last_done")
    _epoch: int = saved(0, name="epoch")
    _done: int = saved(0, name="done")
    _done_records: int = saved(0, name="done_records")
    _first_token: int = saved(1, name="first_token")  # the first that still counts
    _next_token: int = saved(1, name="next_token")
    # Holders that lost a member and were not heard since.
    _blamed: set[str] = saved(factory=set, name="blamed")
    # The shard that was blamed for the newest loss of a holder, and why, until it tells of it.
    _suspects: dict[str, tuple[Shard, str]] = saved(factory=dict, name="suspects")
    # Where a world begins whose model knows nothing.
    _base: m.LedgerState | None = saved(None, name="base")
    _agreed: dict[str, m.Agreed] = saved(factory=dict, name="agreed")  # newest answers, by request
    users: set[str] = saved(factory=set)  # who has got shards, and has not ended

    def __init__(self, dataset: m.Description, *, lease: float = 60.0, max_held: int = 8) -> None:
        if dataset.max_losses < 1:
            raise UsageError(f"max_losses={dataset.max_losses}: it must be positive")
        set_defaults(self)
        self.dataset, self._lease, self._max_held = dataset, lease, max_held
        self.source = _source_of(dataset)

    def tables(self) -> Tables:
        """Return the state as tables."""
        holders = {worker: (h.expires, h.shards()) for worker, h in self._holders.items()}
        return {"": table(self), "source": self.source.save(), "holders": holders}

    @classmethod
    def from_tables(cls, found: Tables) -> "ShardLedger":
        """Return the ledger of these tables."""
        ledger = make(cls, found[""])
        ledger.source = _source_of(ledger.dataset)
        ledger.source.load(msgspec.convert(found["source"], m.RangeState | m.StreamState))
        holders = msgspec.convert(found["holders"], dict[str, tuple[float, list[_Held]]])
        ledger._holders = {worker: _Holder.of(*held) for worker, held in holders.items()}
        return ledger

    # ---- requests of workers ----------------------------------------------------------------

    def next(self, worker: str, now: float, request: str = "") -> m.NextAnswer:
        """Return a shard for this worker; `Wait` while others hold shards that may come back.

        A request that comes again gets the shard that it has got, as long as the worker holds it.
        """
        held = self._holders.get(worker)
        if held is not None and (same := held.asked.get(request)) is not None:
            self.renew(worker, now)
            return m.Granted(same, held.tokens[same], self._lease)
        if held is not None and len(held.tokens) >= self._max_held:
            self.renew(worker, now)
            return m.Wait(
                f"{worker} holds {counted(len(held.tokens), 'shard')}; report one done first"
            )
        shard = self._take()
        while shard is None:
            if self._doing:
                last = counted(len(self._doing), "shard is", "shards are")
                return m.Wait(f"the last {last} with {self._who_holds()}")
            if not self.source.drained():
                return m.Wait("the stream has no new records")
            if self._is_all_poison() or not self.source.next_epoch():
                return self._end()
            shard = self._take()
        self._blamed.discard(worker)
        token = self._hold(worker, shard, now)
        if request:
            held = self._holders[worker]
            held.requests[shard], held.asked[request] = request, shard
        self._epoch = shard.epoch
        return m.Granted(shard, token, self._lease)

    def _hold(self, worker: str, shard: Shard, now: float, token: int = 0) -> int:
        """Give a shard to a worker; return its token, a new one where none is given."""
        if not token:
            token, self._next_token = self._next_token, self._next_token + 1
        self.users.add(worker)
        self._holders.setdefault(worker, _Holder(expires=now)).tokens[shard] = token
        self._doing[shard] = worker
        self.renew(worker, now)
        return token

    def _take(self) -> Shard | None:
        """Return the next shard to do: first those that came back, then the source's.

        Records in quarantine stay there in later epochs: they would kill workers again.
        """
        if self._returned:
            return self._returned.popleft()
        while (shard := self.source.take()) is not None:
            poison = self._poison.get(_records(shard))
            if poison is not None:
                self._quarantine[shard] = Quarantined(shard, poison.losses, poison.reason)
            elif shard not in self._doing:
                break
        return shard

    def _is_all_poison(self) -> bool:
        """Return whether no later epoch can have a shard that is not in quarantine."""
        source = self.source
        return isinstance(source, RangeSource) and 0 < source.shards <= len(self._poison)

    def _who_holds(self) -> str:
        names = sorted(self._holders)
        return ", ".join(names[:3]) + (
            f" and {counted(len(names) - 3, 'other')}" if len(names) > 3 else ""
        )

    def _end(self) -> m.End:
        names = tuple(shard.name for shard in self._quarantine)
        reason = "every record was trained"
        if names:
            reason = (
                f"all but {counted(len(names), 'shard')} in quarantine were trained: {names[0]}"
            )
            reason += ", …" * (len(names) > 1)
        return m.End(complete=not names, quarantined=names, reason=reason)

    def done(self, worker: str, shard: Shard, token: int, now: float) -> m.DoneAnswer:
        """Record that the worker has trained a shard. A repeated report gets the same answer."""
        self._blamed.discard(worker)
        holder, past = self._doing.get(shard), self._past.get(shard)
        late = holder is None and past is not None and token in past.tokens
        if holder == worker and self._holders[worker].tokens[shard] == token:
            self.renew(worker, now)
            self._drop(shard)
        elif holder is not None:
            reason = f"{shard.name} was taken from {worker}; {holder} has it"
            return m.ShardRefused("held", reason)
        elif late:
            if self._quarantine.pop(shard, None) is None:
                self._returned.remove(shard)
            self._poison.pop(_records(shard), None)
        elif self._last_done.get(worker) == (shard, token):
            return m.ShardAccepted(shard)
        else:
            reason = f"{shard.name} is done, or was never given to {worker} as token {token}"
            return m.ShardRefused("done", reason)
        self._past.pop(shard, None)
        self._last_done[worker] = (shard, token)
        self._done += 1
        self._done_records += shard.records
        return m.ShardAccepted(shard, late)

    def renew(self, worker: str, now: float) -> None:
        """Extend the worker's lease of its shards."""
        if worker in self._holders:
            self._holders[worker].expires = now + self._lease

    def begin_tokens(self, first: int) -> None:
        """Give out no token below `first` any more: the journal may lack the last ones."""
        self._next_token = max(self._next_token, first)

    # ---- ends of workers -----------------------------------------------------------------

    def worker_lost(self, worker: str, reason: str) -> list[Quarantined]:
        """Move a lost worker's shards to the front of the queue, and blame its oldest one.

        The worker was training that one; its other shards were only prefetched. Returns the shards
        that are now in quarantine because of this.
        """
        shards = self.worker_left(worker)
        return self._blame(shards[0], f"{worker}: {reason}") if shards else []

    def worker_left(self, worker: str) -> list[Shard]:
        """Move a worker's shards to the front of the queue, oldest first; return them."""
        self._last_done.pop(worker, None)
        self.users.discard(worker)
        shards = list(self._holders[worker].tokens) if worker in self._holders else []
        self._return(shards)
        return shards

    def expire(self, now: float) -> list[Quarantined]:
        """Treat every worker whose lease is over as lost; return what `worker_lost` returns."""
        over = sorted(worker for worker, held in self._holders.items() if held.expires <= now)
        reason = f"it has not renewed its lease of {self._lease:g} s"
        return [found for worker in over for found in self.worker_lost(worker, reason)]

    def deadline(self) -> float | None:
        """Return the time of the next expiry; None if no shard is handed out."""
        return min((held.expires for held in self._holders.values()), default=None)

    def blame(self, worker: str, reason: str) -> list[Quarantined]:
        """Blame the oldest shard of a holder for a loss, though the holder lives on.

        Such a holder is a world whose members train its shards together, and one member was lost.
        The others go on, so only losses without progress between them count against a shard. Until
        the holder is heard again further losses count as the same one: the rest of the world died
        with its member. Returns the shard if it is now in quarantine.
        """
        held = self._holders.get(worker)
        if held is None or worker in self._blamed:
            return []
        self._blamed.add(worker)
        oldest, last = next(iter(held.tokens)), f"a member of {worker}: {reason}"
        self._suspects[worker] = oldest, last
        return self._blame(oldest, last)

    def settle_blame(self, worker: str, claims: Sequence[m.Claim]) -> list[Quarantined]:
        """Count a holder's newest loss against the shard that it was training, as it now tells.

        Its oldest shard was blamed. If that was trained to its end and only not reported yet, the
        loss is that of the next one. Returns the shard if it is now in quarantine; to be called
        before `agree`, which takes the other one out of it.
        """
        shard, last = self._suspects.pop(worker, (None, ""))
        trained = {claim.shard: claim.trained for claim in claims}
        if shard is None or trained.get(shard, 0) < shard.records:
            return []
        if (past := self._past.get(shard)) is not None:
            past.losses = max(0, past.losses - 1)
        unfinished = (claim.shard for claim in claims if claim.trained < claim.shard.records)
        guilty = next(unfinished, None)
        if guilty is None or self._doing.get(guilty) != worker:
            return []
        return self._blame(guilty, last)

    def resume(self, worker: str, held: Mapping[int, int], now: float) -> list[int]:
        """Agree with `worker` on what it holds (token → records trained); return tokens it lost.

        The shards of lost tokens are with other workers, returned or in quarantine. Shards that the
        worker holds but does not name go back to the front: it has forgotten them. A world that
        rolled back may name a token that was reported done; it trains these records again.
        """
        self.renew(worker, now)
        self._blamed.discard(worker)
        mine = self._holders.get(worker, _Holder(expires=now)).tokens
        for shard, token in mine.items():
            self._excuse(shard, held.get(token, 0))
        self._return([shard for shard, token in mine.items() if token not in held])
        lost = {token for past in self._past.values() for token in past.tokens}
        return [token for token in held if token in lost or token < self._first_token]

    def agree(self, request: m.AgreeRequest, now: float) -> m.Agreed:
        """Make the account that of the model of a world, which it tells; return what it holds now.

        What the model was not trained with is to do, whatever was reported before: the world may
        have gone back to a checkpoint, or begun anew. What was learned of shards on which workers
        die is kept. A request that comes again gets the same answer, and changes nothing.

        Raises `UsageError` for the state of another data set.
        """
        worker, held = request.worker, request.held
        if (answer := self._agreed.get(request.request)) is not None:
            return answer
        state = request.state
        if self._base is None or request.follows:
            self._base = self.checkpoint().state
        if state is None:
            state, held = self._base, ()
        check_shards(self.dataset, state, [claim.shard for claim in held])
        mine = dict(self._holders[worker].tokens) if worker in self._holders else {}
        self._go_back(state, {claim.shard for claim in held}, [worker])
        self._blamed.discard(worker)
        kept = []
        for claim in held:
            shard = claim.shard
            if claim.trained >= shard.records and shard in self._quarantine:
                del self._quarantine[shard]  # it was trained after all
                self._poison.pop(_records(shard), None)
            if shard in self._quarantine or shard in self._doing:
                continue
            self._excuse(shard, claim.trained)
            same = claim.token if mine.get(shard) == claim.token else 0
            kept.append(m.Claim(shard, self._hold(worker, shard, now, same), claim.trained))
        found = self.checkpoint().state
        to_do = (*self._returned, *self._quarantine)
        answer = m.Agreed(tuple(kept), msgspec.structs.replace(found, outstanding=to_do))
        if request.request:
            self._agreed[request.request] = answer
            if len(self._agreed) > MAX_AGREED:
                del self._agreed[next(iter(self._agreed))]
        return answer

    def _excuse(self, shard: Shard, trained: int) -> None:
        """Note how many records of a shard its holder has trained: progress speaks for it."""
        past = self._past.get(shard)
        if past is not None and trained > past.progress:
            past.progress, past.losses = trained, min(past.losses, 1)

    def _blame(self, shard: Shard, last: str) -> list[Quarantined]:
        """Count a death against a shard, which may put it in quarantine."""
        past = self._past.setdefault(shard, _Past())
        past.losses += 1
        if past.losses < self.dataset.max_losses:
            return []
        if shard in self._doing:
            past.tokens.append(self._drop(shard))
        else:
            self._returned.remove(shard)
        reason = f"{counted(past.losses, 'worker')} died training it, the last one {last}"
        entry = Quarantined(shard, past.losses, reason)
        self._quarantine[shard] = self._poison[_records(shard)] = entry
        return [entry]

    def _return(self, shards: list[Shard]) -> None:
        """Move shards from their holders to the front of the queue, and remember their tokens."""
        for shard in shards:
            self._past.setdefault(shard, _Past()).tokens.append(self._drop(shard))
        self._returned.extendleft(reversed(shards))

    def _drop(self, shard: Shard) -> int:
        """Remove a shard from its holder; return its token."""
        worker = self._doing.pop(shard)
        held = self._holders[worker]
        token = held.tokens.pop(shard)
        if (request := held.requests.pop(shard, None)) is not None:
            del held.asked[request]
        if not held.tokens:
            del self._holders[worker]
        return token

    # ---- state ---------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Return every violated invariant as a sentence."""
        held = {shard: worker for worker, h in self._holders.items() for shard in h.tokens}
        wrong = [] if held == self._doing else ["the holders' shards are not those in work"]
        twice = self._doing.keys() & {*self._returned, *self._quarantine}
        return [*wrong, *(f"{shard.name} is in work and to do again" for shard in twice)]

    def may_have_news(self) -> bool:
        """Return True if a worker that had to wait may get another answer now."""
        return bool(self._returned) or not self._doing or isinstance(self.source, StreamSource)

    def workers(self) -> list[str]:
        """Return the workers that hold shards."""
        return list(self._holders)

    def counts(self) -> m.ShardCounts:
        """Return the number of shards by state."""
        return m.ShardCounts(
            epoch=self._epoch,
            done=self._done,
            done_records=self._done_records,
            doing=len(self._doing),
            returned=len(self._returned),
            quarantined=len(self._quarantine),
            workers=len(self._holders),
        )

    def quarantined(self) -> tuple[Quarantined, ...]:
        """Return the shards in quarantine, with the reason of each."""
        return tuple(self._quarantine.values())

    def checkpoint(self) -> m.ShardCheckpoint:
        """Return the progress as plain data, to be kept beside a model's checkpoint.

        A shard that a worker holds may not be in that model, so it is to do again.
        """
        tokens = {shard: t for held in self._holders.values() for shard, t in held.tokens.items()}
        state = m.LedgerState(
            source=self.source.save(),
            outstanding=(*sorted(tokens, key=tokens.__getitem__), *self._returned),
            losses=tuple((shard, past.losses) for shard, past in self._past.items() if past.losses),
            quarantined=self.quarantined(),
            done=self._done,
            done_records=self._done_records,
            next_token=self._next_token,
        )
        return m.ShardCheckpoint(self.dataset, state)

    def restore(self, saved: m.ShardCheckpoint) -> None:
        """Go back to a checkpoint; tokens given out before are refused from now on.

        Raises `UsageError` for the checkpoint of another data set, or one that none can have made.
        """
        check_saved(self.dataset, saved.state)
        self._go_back(saved.state, set(), self.workers())
        self._last_done.clear()
        self._first_token = self._next_token
        self._base = None

    def _go_back(self, state: m.LedgerState, held: set[Shard], holders: list[str]) -> None:
        """Make everything to do that is in `state.outstanding`, or that its source has not given.

        `holders` lose all shards. `held`, which they get back, is in quarantine if it was before.
        What was learned of deadly shards is kept: they would kill workers again, without end.
        """
        self.source.load(state.source)
        for worker in holders:
            self._last_done.pop(worker, None)
            for shard in list(self._holders[worker].tokens if worker in self._holders else ()):
                self._drop(shard)
        to_do = held.union(state.outstanding)
        known = {shard: entry for shard, entry in self._quarantine.items() if shard in to_do}
        self._quarantine = {entry.shard: entry for entry in state.quarantined} | known
        self._poison |= {_records(shard): entry for shard, entry in self._quarantine.items()}
        not_now = self._quarantine.keys() | self._doing.keys() | held
        self._returned = deque(shard for shard in state.outstanding if shard not in not_now)
        for shard, losses in state.losses:
            past = self._past.setdefault(shard, _Past())
            past.losses = max(past.losses, losses)
        self._past = {shard: past for shard, past in self._past.items() if past.losses}
        for past in self._past.values():
            past.tokens.clear()
        self._done, self._done_records = state.done, state.done_records
        self._epoch = max((shard.epoch for shard in to_do), default=self._epoch)
        self._next_token = max(self._next_token, state.next_token)


def _records(shard: Shard) -> tuple[str, int, int]:
    """Return the records of a shard, the same in every epoch."""
    return shard.partition, shard.start, shard.stop


def _source_of(dataset: m.Description) -> Source:
    if isinstance(dataset, m.RangeDescription):
        return RangeSource(dataset)
    return StreamSource(dataset)
