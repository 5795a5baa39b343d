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

**Who takes a shard.** Training in step, ranks that each took shards of their own would run out
at different steps: one waits for data that another could only finish in a collective with
it. So the *world* takes them: rank 0 asks the driver, tells the others in one broadcast for
many steps, and every step trains the next records, each rank its part of them. The end comes
for all ranks after the same step.

**When is a record trained.** When the optimizer steps with it. What is trained, of which shard,
is part of the state: rolled back with it, sent to newcomers, never lost with a worker. A shard is
reported done when all of its records are in a *committed* step, never because it was read
ahead. So after a kill nothing is trained twice and nothing is left out. Where a step has fewer
records than ranks can share evenly, some are repeated, and counted in `replayed`.

`together=False` is for workers that train nothing in common: each takes shards of its own, and
what a lost one had not finished goes to the others from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elastic_driver.batch.permutation import Permutation, mix
from elastic_driver.errors import HostsUpdatedInterrupt, UsageError
from elastic_driver.policies.shards.messages import WORLD, End, Granted
from elastic_driver.policies.shards.sources import Shard
from elastic_driver.worker.current import rank_and_size
from elastic_driver.worker.shards import ShardClient
from elastic_driver.worker.state_sync.transfer import carry_bytes, to_all
from elastic_driver.worker.world import session

__all__ = ["ShardedDataset"]

LINGER_S = 1.0  # a stream's step waits so long for more records before it is a short one


class Held(Struct):
    """A shard in training: `trained` of its records, from the front, are in the model."""

    shard: Shard
    token: int
    trained: int = 0

    @property
    def left(self) -> int:
        """Records that are not trained."""
        return self.shard.records - self.trained


class Progress(Struct):
    """What a commit keeps, equal on every rank."""

    held: list[Held] = []
    finished: list[Held] = []  # trained to the end, not reported yet
    trained: int = 0  # records, over all epochs
    replayed: int = 0  # of them, repetitions that give each rank the same number


class News(Struct):
    """What rank 0 has learnt from the driver; `end` when there is nothing more."""

    progress: Progress | None  # at the start of a pass: whose word counts
    reported: list[int]  # tokens that the driver knows to be done
    granted: list[Granted]
    end: End | None


_encode, _decode_news = msgspec.json.Encoder().encode, msgspec.json.Decoder(News).decode


class _Step(Struct):
    """One step of a pass: how many records the world takes, and which are this rank's."""

    records: int
    padded: int
    mine: list[Any]


class _Pass:
    """One pass over what the world holds and is given, by one world, until it must train first.

    A DataLoader draws its steps ahead of training; each rank's draws the same steps at the same
    moments, so the broadcasts in them match.
    """

    def __init__(self, data: ShardedDataset) -> None:
        self._data = data
        self.rank, self.size = rank_and_size() if data.together else (0, 1)
        self.steps: list[_Step] = []  # drawn and not yet handed to the loop
        self.end: End | None = None
        self._base = data.progress.trained
        self._drawn = 0  # records, since the pass began
        self._learn(first=True)

    def __iter__(self) -> Iterator[list[Any]]:
        """The batches of this rank, as indices for the data set."""
        wanted = self._data.batch_size * self.size
        while True:
            if self._left() < wanted and self.end is None:
                self._learn(first=False)
            records = min(wanted, self._left())
            if records == 0:
                return
            step = self._step(records)
            self.steps.append(step)
            self._drawn += records
            yield step.mine

    def _left(self) -> int:
        progress = self._data.progress
        ahead = self._base + self._drawn - progress.trained
        return sum(held.left for held in progress.held) - ahead

    def _step(self, records: int) -> _Step:
        share = -(-records // self.size)
        places = [(self.rank * share + i) % records for i in range(share)]
        progress = self._data.progress
        first = self._base + self._drawn - progress.trained
        mine = [self._data.locate(first + place) for place in places]
        return _Step(records, share * self.size - records, mine)

    def _learn(self, *, first: bool) -> None:
        """Collective: report what is finished, and have more shards."""
        data, news = self._data, None
        if self.rank == 0:
            ahead = self._base + self._drawn - data.progress.trained
            news = data.ask(data.batch_size * self.size + ahead, first=first)
        if self.size > 1:
            news = _decode_news(carry_bytes(None if news is None else _encode(news), to_all(0)))
        if news is None:
            raise AssertionError("rank 0 always has an answer")
        data.take_in(news)
        if news.progress is not None:
            self._base = data.progress.trained
        self.end = news.end


class ShardedDataset(IterableDataset[Any]):  # type: ignore[misc]  # mypy does not follow torch
    """Batches of the records that the driver hands out, over all epochs; iterate it directly.

    Each worker gets `batch_size` records a step. Loader processes (`num_workers`) read ahead;
    what they have read counts for nothing until it is trained.

    Args:
        name: of the data set at the driver.
        source: gives records: `source[index]`, for a stream `source[partition, offset]`; with
            `__getitems__(list)` many at once.
        batch_size: records of one worker in one step.
        records: length of the data set; or `partitions`, first offset of each, for a stream.
        shard_records: records of one shard; also how much may be read twice with
            `together=False` when a worker dies.
        epochs: None is for ever.
        shuffle, seed: the order of shards, and of the records in each.
        max_losses: a shard is left out when so many workers died on it without any progress.
        together: all ranks of the world train the same shards; else each worker its own.
        collate_fn, num_workers, **loader: as for `torch.utils.data.DataLoader`.

    Iterating raises `IncompleteDataError` at the end where shards were left out.
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
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **loader: Any,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; give the records of one step, from 1")
        self.batch_size, self.together = batch_size, together
        self.source, self.seed = source, seed
        self.shuffle = shuffle and partitions is None
        self.loader_options = {"collate_fn": collate_fn, "num_workers": num_workers, **loader}
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
        self.progress = Progress()
        self._streams = partitions is not None
        self._current: _Step | None = None  # the batch in training
        self._committed: set[int] | None = None  # tokens finished at the last commit; None: none

    @property
    def replayed(self) -> int:
        """Records trained twice so far, to give each rank the same number."""
        return self.progress.replayed

    @property
    def epoch(self) -> int:
        """The epoch of the records that come next."""
        progress = self.progress
        known = progress.held or progress.finished
        return known[0].shard.epoch if known else 0

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches, to the end of the last epoch."""
        if get_worker_info() is not None:
            raise UsageError(
                "a ShardedDataset makes its own loader; iterate it directly, and give num_workers "
                "to it and not to a DataLoader around it"
            )
        with self.client:  # a loop that is left leaves no connection behind
            while True:
                turn = _Pass(self)
                if turn.end is not None and not self.progress.held:
                    self.client.require_complete(turn.end)
                    return
                yield from self._batches(turn)

    def _batches(self, turn: _Pass) -> Iterator[Any]:
        """The batches of one pass; the process's global generators are not drawn from."""
        generator = torch.Generator()
        generator.manual_seed(mix(self.seed, self.progress.trained) >> 1)
        for batch in DataLoader(
            self.source, batch_sampler=turn, generator=generator, **self.loader_options
        ):
            self._current = turn.steps.pop(0)
            yield batch
            self.advance()  # where no optimizer has told

    # ---- what the state calls ------------------------------------------------------------

    def advance(self) -> None:
        """The optimizer has stepped: the batch the loop has is trained. Harmless to repeat."""
        step, self._current = self._current, None
        if step is None:
            return
        progress, left = self.progress, step.records
        progress.trained += left
        progress.replayed += step.padded
        while left:
            front = progress.held[0]
            part = min(left, front.left)
            front.trained += part
            left -= part
            if not front.left:
                progress.finished.append(progress.held.pop(0))

    def reset(self) -> None:
        """The world has changed: what is left is shared anew."""
        self._current = None

    def state_dict(self) -> dict[str, Any]:
        """What is trained of which shard: plain values, equal on every rank at a commit."""
        if not self.together:
            raise UsageError(
                "a ShardedDataset(together=False) is each worker's own and belongs in no state; "
                "leave it out of TorchState"
            )
        self._committed = {held.token for held in self.progress.finished}
        plain: dict[str, Any] = msgspec.to_builtins(self.progress)
        return plain

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from another worker's progress, or back to the last commit."""
        self.progress = msgspec.convert(dict(state), Progress)
        self._committed = {held.token for held in self.progress.finished}
        self.reset()

    # ---- what a pass asks ----------------------------------------------------------------

    def locate(self, place: int) -> Any:
        """The index in the source of the record `place` records behind the last trained one."""
        for held in self.progress.held:
            if place < held.left:
                return self._index(held.shard, held.trained + place)
            place -= held.left
        raise IndexError("a step reaches beyond what the world holds")

    def _index(self, shard: Shard, place: int) -> Any:
        if self._streams:
            return shard.partition, shard.start + place
        if not self.shuffle:
            return shard.start + place
        key = mix(self.seed, shard.epoch, shard.start)
        return shard.start + Permutation(shard.records, key)[place]

    def ask(self, wanted: int, *, first: bool) -> News:
        """On rank 0: report finished shards, then take more until `wanted` records are held.

        With `first`, driver and world agree anew on what is held: a world that was lost as a
        whole left shards behind, others may be in quarantine by now.
        """
        progress = self.progress
        if first:
            known = {held.token: held.trained for held in (*progress.held, *progress.finished)}
            lost = set(self.client.resume(known))
            progress.held = [held for held in progress.held if held.token not in lost]
        news = News(progress if first else None, [], [], None)
        self._report(news, everything=False)
        wanted -= sum(held.left for held in progress.held)
        while wanted > 0 and news.end is None:
            idle = not news.granted and not progress.held
            answer = self.client.poll(LINGER_S if self._streams or idle else 0.0)
            if isinstance(answer, Granted):
                news.granted.append(answer)
                wanted -= answer.shard.records
            elif isinstance(answer, End):
                news.end = answer
            elif not idle:
                break
            elif not self._report(news, everything=True):
                self._stand_aside()
        return news

    def _report(self, news: News, *, everything: bool) -> bool:
        """Tell the driver which shards are done: those whose last step is committed; whether any.

        `everything`, once nothing else is left to train: waiting for a commit would be for ever.
        Should that step be rolled back after all, its records are trained again from the state.
        """
        committed = self._committed
        done = [
            held
            for held in self.progress.finished
            if everything or committed is None or held.token in committed
            if held.token not in news.reported
        ]
        for held in done:
            self.client.done(Granted(held.shard, held.token, 0.0))
            news.reported.append(held.token)
        return bool(done)

    def take_in(self, news: News) -> None:
        """On every rank: go by what rank 0 has learnt."""
        if news.progress is not None:
            self.progress = news.progress
        progress = self.progress
        progress.finished = [h for h in progress.finished if h.token not in news.reported]
        progress.held.extend(Held(one.shard, one.token) for one in news.granted)

    def _stand_aside(self) -> None:
        """While there is nothing to train, a change of the world need not wait for a step."""
        member = session.membership()
        if member is not None and member.progress.version >= member.progress.leave_after:
            raise HostsUpdatedInterrupt(member.progress.leave_reason)
