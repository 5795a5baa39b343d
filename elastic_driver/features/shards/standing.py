"""What one model was trained with of a data set, as the world that trains it knows.

The world's state holds a `ShardStanding` in the form of a `ShardCheckpoint`. It follows the shards
that the driver hands out and is kept, rolled back, sent and stored with the model. So the world can
tell the driver at any commit, and after any loss, what is to do: the driver's ledger is an account
of it, and knows besides which shards kill workers. Pure. Counts and offsets are records.
"""

from typing import Any

import msgspec

from elastic_driver.errors import UsageError
from elastic_driver.features.shards import messages as m
from elastic_driver.features.shards.messages import Shard
from elastic_driver.features.shards.sources import RangeSource

_HINT = "give the data that the model was trained with, or begin anew in another checkpoint_dir"
_MAY_CHANGE = ("epochs", "max_losses", "partitions")
_decode = msgspec.json.Decoder(m.ShardCheckpoint).decode


class ShardStanding:
    """What was done, what is to do, and how far the source was read: everything but shards in hand.

    Args:
        saved: the description of the data set, and the state that the driver and the world have
            agreed on.
    """

    def __init__(self, saved: m.ShardCheckpoint) -> None:
        self._saved = saved
        self._open = dict.fromkeys(saved.state.outstanding)  # in the order they come next
        self._next_token = saved.state.next_token
        self._done, self._done_records = saved.state.done, saved.state.done_records
        self._position: m.RangeState | m.StreamState = saved.state.source
        self._encoded = ""

    @classmethod
    def decoded(cls, text: str) -> "ShardStanding":
        """Return the standing that has this text."""
        standing = cls(_decode(text))
        standing._encoded = text
        return standing

    def encoded(self) -> str:
        """Return the standing as JSON, the same text for equal standings."""
        if not self._encoded:
            saved = m.ShardCheckpoint(self._saved.dataset, self.state)
            self._encoded = msgspec.json.encode(saved).decode()
        return self._encoded

    @property
    def state(self) -> m.LedgerState:
        """The same in the form in which the driver takes it."""
        return msgspec.structs.replace(
            self._saved.state,
            source=self._position,
            outstanding=tuple(self._open),
            done=self._done,
            done_records=self._done_records,
            next_token=self._next_token,
        )

    @property
    def epoch(self) -> int:
        """The epoch of the shards that come next."""
        first = next(iter(self._open), None)
        if first is not None:
            return first.epoch
        return self._position.epoch if isinstance(self._position, m.RangeState) else 0

    def granted(self, shard: Shard, token: int) -> None:
        """Note that the world has got a shard; what the source has before it is open."""
        self._encoded = ""
        self._next_token = max(self._next_token, token + 1)
        if isinstance(self._position, m.StreamState):
            self._take_range(self._position, shard)
        elif shard in self._open:
            del self._open[shard]
        else:
            self._read_to(self._position, shard)

    def done(self, shard: Shard) -> None:
        """Note that a shard was trained to the end, and reported."""
        self._encoded = ""
        self._done += 1
        self._done_records += shard.records

    def learn(self, found: m.LedgerState) -> None:
        """Take over what the driver knows beside the model: which shards kill workers.

        And how far a stream can be read. What was trained does not change.
        """
        self._encoded = ""
        self._saved = m.ShardCheckpoint(
            self._saved.dataset,
            msgspec.structs.replace(
                self._saved.state, quarantined=found.quarantined, losses=found.losses
            ),
        )
        position, theirs = self._position, found.source
        if isinstance(position, m.StreamState) and isinstance(theirs, m.StreamState):
            ends = {name: max(end, theirs.ends.get(name, 0)) for name, end in position.ends.items()}
            closed = tuple(sorted({*position.closed, *theirs.closed}))
            self._position = m.StreamState(position.offsets, ends, closed)

    def check(self, dataset: m.Description) -> None:
        """Raise `UsageError`, naming the difference, for another data set than this one's.

        The number of epochs may be another one, and a stream may have more partitions.
        """
        mine, theirs = msgspec.to_builtins(dataset), msgspec.to_builtins(self._saved.dataset)
        if mine["type"] != theirs["type"]:
            kinds = theirs["type"], mine["type"]
            raise UsageError(f"the data were a {kinds[0]}, and are a {kinds[1]} now; {_HINT}")
        for name in [name for name in theirs if name not in _MAY_CHANGE]:
            if mine[name] != theirs[name]:
                was, now = theirs[name], mine[name]
                raise UsageError(f"the data had {name}={was}, and have {now} now; {_HINT}")
        gone = sorted(set(theirs.get("partitions", ())) - set(mine.get("partitions", ())))
        if gone:
            raise UsageError(f"the data had a partition {gone[0]!r}, and lack it now; {_HINT}")

    # ---- sources -------------------------------------------------------------------------

    def _read_to(self, position: m.RangeState, shard: Shard) -> None:
        """Read the source up to a shard; a shard that was read before changes nothing."""
        dataset: Any = self._saved.dataset
        source = RangeSource(msgspec.structs.replace(dataset, epochs=None))
        source.load(position)
        if source.ahead(shard) < 0:
            return
        while (passed := source.take()) != shard:
            if passed is None:
                source.next_epoch()
            else:
                self._open[passed] = None
        self._position = source.save()

    def _take_range(self, position: m.StreamState, shard: Shard) -> None:
        """Take the records of a shard out of a partition, whatever the shards there were before."""
        name, start, stop = shard.partition, shard.start, shard.stop
        at = position.offsets[name]
        if stop > at:
            offsets = {key: value for key, value in position.offsets.items() if key != name}
            offsets[name] = stop  # behind the others, whose turn comes first
            ends = {**position.ends, name: max(position.ends[name], stop)}
            self._position = m.StreamState(offsets, ends, position.closed)
            self._add_range(name, at, start)
        for other in [o for o in self._open if o.partition == name]:
            if other.start < stop and start < other.stop:
                del self._open[other]
                self._add_range(name, other.start, start)
                self._add_range(name, stop, other.stop)

    def _add_range(self, partition: str, start: int, stop: int) -> None:
        size = self._saved.dataset.shard_records
        for first in range(start, stop, size):
            piece = Shard(0, partition, first, min(first + size, stop))
            self._open[piece] = None
