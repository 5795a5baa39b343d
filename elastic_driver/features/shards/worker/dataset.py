"""A data set that the driver hands out in shards, trained by all workers of the world together.

    clicks = elastic.ShardedDataset("clicks", source, batch_size=32, records=10**9,
                                    shard_records=4096, num_workers=2)
    state = elastic.TorchState(model=model, optimizer=optimizer, clicks=clicks)

    @elastic.run
    def train(state):
        ddp = elastic.wrap(model)
        for batch in clicks:                 # all epochs; every rank makes the same steps
            ...
            optimizer.step()
            state.commit()

**The ranks share each shard.** If each rank took shards of its own, ranks would run
out at different steps, and one would wait in a collective for another that waits for data. So
rank 0 asks the driver and broadcasts the answer, once for many steps. Every step trains the next
records, each rank its part of them, and the end comes for all ranks after the same step.

**A record is trained when the optimizer steps with it.** The progress in each shard is part of the
state: it is rolled back with the state and sent to newcomers, and is never lost with a worker. A
shard is reported done when all of its records are in a *committed* step, not when it was read. So
after a kill no record is trained twice and none is left out. If the ranks cannot share the records
of a step evenly, some records are repeated, and counted in `replayed`.

**The model is the truth.** The state also has which shards the model was trained with. At the start
of each pass rank 0 tells the driver, and its account becomes that: when all workers were lost and
training goes on from a checkpoint, or from the beginning, the driver hands out again what is not in
the model, and nothing else. For that the data must be in the state.

`together=False` is for workers that train nothing in common: each takes shards of its own. If a
worker is lost, others train its unfinished shards from the beginning.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elastic_driver.arithmetic import Permutation, mix
from elastic_driver.errors import HostsUpdatedInterrupt, UsageError
from elastic_driver.features.shards.messages import (
    WORLD,
    Claim,
    End,
    Granted,
    Shard,
    ShardCheckpoint,
)
from elastic_driver.features.shards.standing import ShardStanding
from elastic_driver.features.shards.worker.shard_client import ShardClient
from elastic_driver.worker.current import rank_and_size
from elastic_driver.worker.positions import Counted
from elastic_driver.worker.state_sync.sharing import Route, carry_bytes
from elastic_driver.worker.world import session

__all__ = ["ShardedDataset"]

LINGER_S = 1.0  # seconds that a stream's step waits for more records before it is a short one
LOOK_S = 3.0  # the longest that a checkpoint waits for the driver
_numbers = count(1)  # of the objects of this process
_tellers: dict[str, int] = {}  # by data set: the first one that has told the driver of it


class HeldShard(Struct):
    """A shard in training: `trained` of its records, from the front, are in the model."""

    shard: Shard
    token: int
    trained: int = 0

    @property
    def left(self) -> int:
        """The records that are not trained yet."""
        return self.shard.records - self.trained


class ShardProgress(Struct):
    """The part of a `ShardedDataset` that a commit keeps, equal on every rank."""

    held: list[HeldShard] = []
    finished: list[HeldShard] = []  # trained to the end, not reported yet
    trained: int = 0  # records, over all epochs
    replayed: int = 0  # of them, repetitions that give each rank the same number
    standing: str = ""  # what else the model was trained with (`ShardStanding`); "": nothing


class ShardUpdate(Struct):
    """The driver's answers, which rank 0 sends to all; `end` when there is nothing more."""

    progress: ShardProgress | None  # rank 0's, which all take over at the start of a pass
    reported: list[int] = []  # tokens that the driver knows to be done
    granted: list[Granted] = []
    end: End | None = None


# The records of one step of the whole world, and how many of them are repeated.
_ShardStep = tuple[int, int]
_NO_STEP = (0, 0)


class _ShardPass:
    """One pass over the shards of one world; ends when these must be trained to get more.

    A DataLoader draws its steps ahead of training. Each rank's draws the same steps at the same
    moments, so the broadcasts in them match.
    """

    def __init__(self, data: "ShardedDataset") -> None:
        self._data = data
        self.rank, self.size = rank_and_size() if data.together else (0, 1)
        self.steps: list[_ShardStep] = []  # drawn and not yet handed to the loop
        self.end: End | None = None
        self._drawn = data.progress.trained  # records, over all epochs
        self._update(first=True)

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the batches of this rank, as indices for the data set."""
        wanted = self._data.batch_size * self.size
        while True:
            if self._left() < wanted and self.end is None:
                self._update(first=False)
            records = min(wanted, self._left())
            if records == 0:
                return
            share = -(-records // self.size)
            places = [(self.rank * share + i) % records for i in range(share)]
            ahead = self._ahead()
            mine = [self._data.locate(ahead + place) for place in places]
            self.steps.append((records, share * self.size - records))
            self._drawn += records
            yield mine

    def _ahead(self) -> int:
        """Return the records that are drawn and not trained yet."""
        return self._drawn - self._data.progress.trained

    def _left(self) -> int:
        return sum(held.left for held in self._data.progress.held) - self._ahead()

    def _update(self, *, first: bool) -> None:
        """Collective: report finished shards, and take more."""
        data, written = self._data, b""
        if self.rank == 0:
            update = data.ask(data.batch_size * self.size + self._ahead(), first=first)
            written = msgspec.json.encode(update)
        if self.size > 1:
            written = carry_bytes(written or None, Route(0, frozenset(range(1, self.size))))
        data.follow(msgspec.json.decode(written, type=ShardUpdate))
        if first:
            self._drawn = data.progress.trained
        self.end = data.end


class ShardedDataset(IterableDataset[Any]):  # type: ignore[misc]  # mypy does not follow torch
    """Batches of the records that the driver hands out, over all epochs; iterate it directly.

    Each worker gets `batch_size` records a step. Loader processes (`num_workers`) read ahead;
    a record counts only when it is trained.

    Args:
        name: of the data set at the driver.
        source: returns records: `source[index]`, for a stream `source[partition, offset]`; with
            `__getitems__(list)` many at once.
        batch_size: records of one worker in one step.
        shard_records: records of one shard; with `together=False` also the records that may be
            trained twice when a worker dies.
        records: length of the data set.
        partitions: first offset of each partition of a stream, by name; instead of `records`.
        epochs: how often the data set is trained; None is for ever.
        shuffle: train shards, and the records in each, in a random order.
        seed: of that order.
        max_losses: a shard is left out when so many workers died on it without any progress.
        together: all ranks of the world train the same shards; else each worker its own.
        loader: `collate_fn`, `num_workers` and so on, as for `torch.utils.data.DataLoader`.

    Iterating raises `IncompleteDataError` at the end where shards were left out. The constructor
    raises `UsageError` for a batch size below 1 and as `ShardClient` does.
    """

    def __init__(
        self,
        name: str,
        source: Any,
        batch_size: int,
        *,
        shard_records: int,
        records: int | None = None,
        partitions: Mapping[str, int] | None = None,
        epochs: int | None = 1,
        shuffle: bool = True,
        seed: int = 0,
        max_losses: int = 3,
        together: bool = True,
        **loader: Any,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; give the records of one step, from 1")
        self.batch_size, self.together = batch_size, together
        self.source, self.seed, self.loader_options = source, seed, loader
        self.shuffle = shuffle and partitions is None
        self.client = ShardClient(
            name,
            worker=WORLD if together else None,
            shard_records=shard_records,
            records=records,
            partitions=partitions,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
            max_losses=max_losses,
        )
        self.client.while_away = self._leave_if_requested
        self.progress = ShardProgress()
        self.counted = Counted()
        self._streams = partitions is not None
        self._current: _ShardStep = _NO_STEP  # the batch in training
        # Shards finished at the last commit; None: no state has this data set.
        self._committed: set[Shard] | None = None
        self._standing: ShardStanding | None = None  # decoded from `progress`
        self._number = next(_numbers)
        self.end: End | None = None  # once the driver has nothing more

    @property
    def replayed(self) -> int:
        """The records trained twice so far, so that each rank has the same number."""
        return self.progress.replayed

    @property
    def epoch(self) -> int:
        """The epoch of the records that come next."""
        if known := self.progress.held or self.progress.finished:
            return known[0].shard.epoch
        return self.standing.epoch if self.progress.standing else 0

    @property
    def standing(self) -> ShardStanding:
        """What the model was trained with, apart from the shards in hand."""
        written = self.progress.standing
        if self._standing is None or self._standing.encoded() != written:
            self._standing = ShardStanding.decoded(written)
        return self._standing

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches, to the end of the last epoch."""
        if get_worker_info() is not None:
            raise UsageError(
                "a ShardedDataset makes its own loader; iterate it directly, and give num_workers "
                "to it and not to a DataLoader around it"
            )
        with self.client:  # a loop that is left leaves no connection behind
            while True:
                shards = _ShardPass(self)
                if shards.end is not None and not self.progress.held:
                    self.client.require_complete(shards.end)
                    return
                yield from self._batches(shards)

    def _batches(self, shards: _ShardPass) -> Iterator[Any]:
        """Yield the batches of one pass; the process's global generators are not drawn from."""
        generator = torch.Generator()
        generator.manual_seed(mix(self.seed, self.progress.trained) >> 1)
        for batch in DataLoader(
            self.source, batch_sampler=shards, generator=generator, **self.loader_options
        ):
            self._current = shards.steps.pop(0)
            yield batch
            self.advance()  # where no optimizer step has done so

    # ---- what the state calls ------------------------------------------------------------

    def advance(self) -> None:
        """Count the batch that the loop has as trained. A second call changes nothing."""
        progress, (left, repeated), self._current = self.progress, self._current, _NO_STEP
        progress.trained += left
        progress.replayed += repeated
        size = rank_and_size()[1] if self.together else 1
        self.counted = Counted(self.counted.samples + (left + repeated) // size)
        while left:
            front = progress.held[0]
            part = min(left, front.left)
            front.trained += part
            left -= part
            if not front.left:
                progress.finished.append(progress.held.pop(0))

    def reset(self) -> None:
        """Drop the batch in training: the world has changed, and shares the rest anew."""
        self._current = _NO_STEP

    def state_dict(self) -> dict[str, Any]:
        """Return the progress in each shard: plain values, equal on every rank at a commit."""
        if not self.together:
            raise UsageError(
                "a ShardedDataset(together=False) is each worker's own and belongs in no state; "
                "leave it out of TorchState"
            )
        self._committed = {held.shard for held in self.progress.finished}
        plain: dict[str, Any] = msgspec.to_builtins(self.progress)
        return plain

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another worker's progress, from the last commit, or from a checkpoint.

        Raises `UsageError` for the progress in another data set.
        """
        self.progress = msgspec.convert(dict(state), ShardProgress)
        if self.progress.standing:
            self.standing.check(self.client.dataset)
        self._committed = {held.shard for held in self.progress.finished}
        self.reset()

    def durable(self) -> Callable[[], bytes]:
        """Return a function that returns what the driver alone knows of a stream: how far it goes.

        Where the driver does not answer, the checkpoint has what rank 0 was told last.
        """
        if not (self._streams and self.together):
            return bytes

        def read() -> bytes:
            found = self.client.look(LOOK_S)
            return b"" if found is None else msgspec.json.encode(found)

        return read

    def restore_durable(self, data: bytes) -> None:
        """Take back what `durable` has read; what was trained is in the state."""
        if self.progress.standing:
            standing = self.standing
            standing.learn(msgspec.json.decode(data, type=ShardCheckpoint).state)
            self.progress.standing = standing.encoded()

    # ---- what a pass calls ---------------------------------------------------------------

    def locate(self, place: int) -> Any:
        """Return the source's index of the record `place` records behind the last trained one."""
        for held in self.progress.held:
            if place >= held.left:
                place -= held.left
                continue
            shard, place = held.shard, held.trained + place
            if self._streams:
                return shard.partition, shard.start + place
            if self.shuffle:
                key = mix(self.seed, shard.epoch, shard.start)
                place = Permutation(shard.records, key)[place]
            return shard.start + place
        raise IndexError("a step reaches beyond what the world holds")

    def follow(self, update: ShardUpdate) -> None:
        """Take over, on every rank, what rank 0 has from the driver."""
        progress = self.progress = update.progress or self.progress
        reported = [held for held in progress.finished if held.token in update.reported]
        progress.finished = [held for held in progress.finished if held not in reported]
        progress.held.extend(HeldShard(one.shard, one.token) for one in update.granted)
        self.end = update.end
        if self.together and (reported or update.granted):
            standing = self.standing
            for held in reported:
                standing.done(held.shard)
            for one in update.granted:
                standing.granted(one.shard, one.token)
            progress.standing = standing.encoded()

    def ask(self, wanted: int, *, first: bool) -> ShardUpdate:
        """On rank 0: report finished shards, then take more until `wanted` records are held.

        With `first`, driver and world agree anew on what is held: a world that was lost as a
        whole left shards behind, others may be in quarantine by now.
        """
        update, polls = ShardUpdate(None), 0
        if first:
            self._agree(update)
        self._report(update, everything=False)
        wanted -= sum(held.left for held in self.progress.held)
        while wanted > 0 and update.end is None:
            idle = not update.granted and not self.progress.held
            answer = self.client.poll(LINGER_S if self._streams or idle else 0.0)
            if isinstance(answer, Granted):
                update.granted.append(answer)
                wanted -= answer.shard.records
            elif isinstance(answer, End):
                update.end = answer
            elif not idle:
                break
            elif not self._report(update, everything=True):
                self._leave_if_requested()
                polls += 1
                if polls & (polls - 1) == 0:  # a grant that nobody received may hold all up
                    self._agree(update)
        return update

    def _agree(self, update: ShardUpdate) -> None:
        """Tell the driver what is trained, and take over what is held from now on."""
        progress = update.progress = self.progress
        known = [*progress.finished, *progress.held]
        if not self.together:
            lost = set(self.client.resume({held.token: held.trained for held in known}))
            progress.held = [held for held in progress.held if held.token not in lost]
            return
        state = self.standing.state if progress.standing else None
        # An object that has never been in the model, beside a model that was trained with others.
        other = _tellers.setdefault(self.client.name, self._number) != self._number
        follows = state is None and (self._committed is None or other)
        claims = [Claim(held.shard, held.token, held.trained) for held in known]
        agreed = self.client.agree(claims, state, follows=follows)
        mine = [HeldShard(claim.shard, claim.token, claim.trained) for claim in agreed.held]
        progress.held = [held for held in mine if held.left]
        progress.finished = [held for held in mine if not held.left]
        self._standing = ShardStanding(ShardCheckpoint(self.client.dataset, agreed.state))
        progress.standing = self._standing.encoded()

    def _report(self, update: ShardUpdate, *, everything: bool) -> bool:
        """Report shards whose last step is committed as done; return whether there were any.

        `everything` is for when nothing else is left to train: waiting for a commit would have no
        end. Should that step be rolled back after all, its records are trained again from the
        state.
        """
        committed = self._committed
        done = [
            held
            for held in self.progress.finished
            if everything or committed is None or held.shard in committed
            if held.token not in update.reported
        ]
        for held in done:
            self.client.done(Granted(held.shard, held.token, 0.0))
            update.reported.append(held.token)
        return bool(done)

    def _leave_if_requested(self) -> None:
        """Raise `HostsUpdatedInterrupt` at once: without data, no step boundary would come."""
        member = session.membership()
        if member is not None and member.progress.must_leave:
            raise HostsUpdatedInterrupt(member.progress.leave_reason)
