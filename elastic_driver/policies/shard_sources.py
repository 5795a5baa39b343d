"""Sources of data shards: a data set of known length, or partitions that grow.

A source cuts its records into shards one at a time, when the `ledger` asks for the next, so that
10⁹ records in 10⁶ shards take no more memory than ten. A source only goes forward; the ledger
keeps account of the shards. Counts and offsets are records.
"""

from collections.abc import Mapping
from typing import Annotated, Protocol

from msgspec import Meta, Struct

from elastic_driver.errors import UsageError
from elastic_driver.policies.permutation import Permutation, mix

__all__ = ["Offset", "RangeSource", "RangeState", "Shard", "Source", "SourceState", "StreamSource"]

Offset = Annotated[int, Meta(ge=0, le=2**62)]


class Shard(Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Records start … stop − 1 of a partition, in one epoch. Its value is its identity."""

    epoch: Offset
    partition: Annotated[str, Meta(max_length=512)]  # "" for a data set without partitions
    start: Offset
    stop: Offset

    @property
    def name(self) -> str:
        """The name for people: `epoch 0, records 512–1023` or `epoch 0, clicks-3 records 0–99`."""
        where = f"{self.partition} records" if self.partition else "records"
        return f"epoch {self.epoch}, {where} {self.start}–{self.stop - 1}"

    @property
    def records(self) -> int:
        """The number of its records."""
        return self.stop - self.start


class RangeState(Struct, frozen=True, tag="range"):
    """Progress of a `RangeSource`."""

    epoch: int
    taken: int  # shards of this epoch


class StreamState(Struct, frozen=True, tag="stream"):
    """Progress of a `StreamSource`."""

    offsets: dict[str, int]  # the first record of each partition that is in no shard yet
    ends: dict[str, int]
    closed: tuple[str, ...]


SourceState = RangeState | StreamState


class Source(Protocol):
    """A source, as the ledger uses it."""

    def take(self) -> Shard | None:
        """Return the next shard that was never handed out; None if there is none now."""

    def drained(self) -> bool:
        """Return True if this epoch has no further shard and will get none."""

    def next_epoch(self) -> bool:
        """Begin the next epoch of a drained source; return False if there is none."""

    def save(self) -> SourceState:
        """Return the progress as plain data."""

    def load(self, state: SourceState) -> None:
        """Continue from a saved progress."""


class RangeSource:
    """A data set of `records` records, cut into shards of `shard_records`, for some epochs.

    `shuffle` draws the shards of each epoch in an order given by (seed, epoch); the records
    inside a shard are the trainer's to shuffle. `epochs` None: for ever.
    """

    def __init__(
        self,
        records: int,
        shard_records: int,
        *,
        epochs: int | None = 1,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if records < 0 or shard_records < 1 or (epochs is not None and epochs < 1):
            raise UsageError(
                f"a data set of {records} records in shards of {shard_records} for {epochs} epochs "
                "makes no sense; records start at 0, shard size and epochs at 1"
            )
        self.records = records
        self.shard_records = shard_records
        self.epochs, self.shuffle, self.seed = epochs, shuffle, seed
        self.shards = -(-records // shard_records)  # of one epoch
        self._begin(0, taken=0)

    def _begin(self, epoch: int, taken: int) -> None:
        self.epoch, self._taken = epoch, taken
        self._order = Permutation(self.shards, mix(self.seed, epoch)) if self.shuffle else None

    def take(self) -> Shard | None:
        """Return the next shard of the epoch's order."""
        if self.drained():
            return None
        number = self._taken if self._order is None else self._order[self._taken]
        self._taken += 1
        start = number * self.shard_records
        stop = min(start + self.shard_records, self.records)
        return Shard(epoch=self.epoch, partition="", start=start, stop=stop)

    def drained(self) -> bool:
        """Return True if every shard of this epoch was taken."""
        return self._taken >= self.shards

    def next_epoch(self) -> bool:
        """Begin the next epoch; return False after the last one, and if there are no records."""
        last = self.epochs is not None and self.epoch + 1 >= self.epochs
        if last or self.records == 0:
            return False
        self._begin(self.epoch + 1, taken=0)
        return True

    def save(self) -> RangeState:
        """Return the progress: two numbers for any length of the data set."""
        return RangeState(epoch=self.epoch, taken=self._taken)

    def load(self, state: SourceState) -> None:
        """Continue from `save()` of a source with the same settings."""
        if not isinstance(state, RangeState) or state.taken > self.shards:
            raise UsageError(
                "the saved shard progress is of another data set; "
                "restore it with the same records, shard size and seed"
            )
        self._begin(state.epoch, state.taken)


class StreamSource:
    """Partitions with offsets (of a log, a queue) that grow while the job trains.

    Partitions take turns. The records between a partition's offset and its known end are cut
    into shards of at most `shard_records`; `extend` moves the end, `close` says it is final.
    """

    def __init__(self, offsets: Mapping[str, int], shard_records: int) -> None:
        if shard_records < 1 or not offsets or any(offset < 0 for offset in offsets.values()):
            raise UsageError(
                "a stream needs partitions with offsets from 0 and shards of at least 1 record"
            )
        self.shard_records = shard_records
        self._offsets = dict(offsets)  # in the order of their turns
        self._ends = dict(offsets)
        self._closed: set[str] = set()

    def extend(self, partition: str, end: int) -> None:
        """Note that records below offset `end` can be read; an earlier end changes nothing."""
        self._known(partition)
        if partition not in self._closed:
            self._ends[partition] = max(end, self._ends[partition])

    def close(self, partition: str) -> None:
        """Note that nothing will be added to this partition."""
        self._known(partition)
        self._closed.add(partition)

    def _known(self, partition: str) -> None:
        if partition not in self._offsets:
            known = ", ".join(sorted(self._offsets)[:8])
            raise UsageError(f"no partition {partition!r} in this stream; it has {known}")

    def take(self) -> Shard | None:
        """Return the next records of the partition whose turn it is."""
        for partition, start in self._offsets.items():
            stop = min(self._ends[partition], start + self.shard_records)
            if stop > start:
                del self._offsets[partition]  # behind the others: their turn comes first
                self._offsets[partition] = stop
                return Shard(epoch=0, partition=partition, start=start, stop=stop)
        return None

    def drained(self) -> bool:
        """Return True if every partition is closed and read to its end."""
        return all(
            partition in self._closed and start >= self._ends[partition]
            for partition, start in self._offsets.items()
        )

    def next_epoch(self) -> bool:
        """Return False: a stream is read once."""
        return False

    def save(self) -> StreamState:
        """Return the offsets and ends of all partitions."""
        return StreamState(
            offsets=dict(self._offsets), ends=dict(self._ends), closed=tuple(sorted(self._closed))
        )

    def load(self, state: SourceState) -> None:
        """Continue from `save()` of a stream with the same partitions."""
        if not isinstance(state, StreamState) or state.offsets.keys() != self._offsets.keys():
            raise UsageError(
                "the saved shard progress is of another stream; restore it with its partitions"
            )
        self._offsets, self._ends = dict(state.offsets), dict(state.ends)
        self._closed = set(state.closed)
