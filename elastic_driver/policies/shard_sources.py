"""Sources of data shards: a data set of known length, or partitions that grow.

A source makes one shard at a time, when the ledger asks for the next. So 10⁹ records in 10⁶ shards
take no more memory than ten shards. A source only goes forward; `shard_ledger`
keeps account of the shards. Counts and offsets are records.
"""

from elastic_driver.errors import UsageError
from elastic_driver.policies.permutation import Permutation, mix
from elastic_driver.policies.shard_messages import (
    RangeDescription,
    RangeState,
    Shard,
    StreamDescription,
    StreamState,
)


class RangeSource:
    """The shards of a `RangeDescription`; raises `UsageError` for one that makes no sense."""

    def __init__(self, dataset: RangeDescription) -> None:
        records, size, epochs = dataset.records, dataset.shard_records, dataset.epochs
        if records < 0 or size < 1 or (epochs is not None and epochs < 1):
            what = f"a data set of {records} records in shards of {size} for {epochs} epochs"
            least = "records start at 0, shard size and epochs at 1"
            raise UsageError(f"{what} makes no sense; {least}")
        self._dataset = dataset
        self._shards = -(-records // size)  # of one epoch
        self._begin(0, taken=0)

    @property
    def shards(self) -> int:
        """The number of shards of one epoch."""
        return self._shards

    def _begin(self, epoch: int, taken: int) -> None:
        self._epoch, self._taken = epoch, taken
        key = mix(self._dataset.seed, epoch)
        self._order = Permutation(self._shards, key) if self._dataset.shuffle else None

    def ahead(self, shard: Shard) -> int:
        """Return how many shards come before this one from now on; below 0: it was taken."""
        number = shard.start // self._dataset.shard_records
        place, epochs = number, shard.epoch - self._epoch
        if self._dataset.shuffle:
            place = Permutation(self._shards, mix(self._dataset.seed, shard.epoch)).position(number)
        return epochs * self._shards + place - self._taken

    def take(self) -> Shard | None:
        """Return the next shard of the epoch's order; None after the last one."""
        if self.drained():
            return None
        number = self._taken if self._order is None else self._order[self._taken]
        self._taken += 1
        size = self._dataset.shard_records
        stop = min((number + 1) * size, self._dataset.records)
        return Shard(epoch=self._epoch, partition="", start=number * size, stop=stop)

    def drained(self) -> bool:
        """Return True if every shard of this epoch was taken."""
        return self._taken >= self._shards

    def next_epoch(self) -> bool:
        """Begin the next epoch; return False after the last one, and if there are no records."""
        epochs = self._dataset.epochs
        if self._shards == 0 or (epochs is not None and self._epoch + 1 >= epochs):
            return False
        self._begin(self._epoch + 1, taken=0)
        return True

    def save(self) -> RangeState:
        """Return the progress as plain data."""
        return RangeState(epoch=self._epoch, taken=self._taken)

    def load(self, state: RangeState | StreamState) -> None:
        """Continue from `save()` of a source with the same description."""
        if not isinstance(state, RangeState) or state.taken > self._shards:
            hint = "restore it with the same records, shard size and seed"
            raise UsageError(f"the saved shard progress is of another data set; {hint}")
        self._begin(state.epoch, state.taken)


class StreamSource:
    """The shards of a `StreamDescription`, whose partitions grow while the job trains.

    Partitions take turns. The records between a partition's offset and its known end are cut
    into shards; `extend` moves the end, or says that it is final. Raises `UsageError` for a
    description that makes no sense.
    """

    def __init__(self, dataset: StreamDescription) -> None:
        offsets = dataset.partitions
        if dataset.shard_records < 1 or not offsets or min(offsets.values()) < 0:
            raise UsageError(
                "a stream needs partitions with offsets from 0 and shards of at least 1 record"
            )
        self._shard_records = dataset.shard_records
        self._offsets = dict(offsets)  # in the order of their turns
        self._ends = dict(offsets)
        self._closed: set[str] = set()

    def extend(self, partition: str, end: int, *, closed: bool = False) -> None:
        """Note that records below offset `end` can be read, and with `closed` never more.

        An earlier end changes nothing. Raises `UsageError` for an unknown partition.
        """
        if partition not in self._offsets:
            known = ", ".join(sorted(self._offsets)[:8])
            raise UsageError(f"no partition {partition!r} in this stream; it has {known}")
        if partition not in self._closed:
            self._ends[partition] = max(end, self._ends[partition])
        if closed:
            self._closed.add(partition)

    def take(self) -> Shard | None:
        """Return the next records of the partition whose turn it is; None if there are none."""
        for partition, start in self._offsets.items():
            stop = min(self._ends[partition], start + self._shard_records)
            if stop > start:
                del self._offsets[partition]  # it goes behind the others, whose turn comes first
                self._offsets[partition] = stop
                return Shard(epoch=0, partition=partition, start=start, stop=stop)
        return None

    def drained(self) -> bool:
        """Return True if every partition is closed and read to its end."""
        return all(p in self._closed and at >= self._ends[p] for p, at in self._offsets.items())

    def next_epoch(self) -> bool:
        """Return False: a stream is read once."""
        return False

    def save(self) -> StreamState:
        """Return the progress as plain data."""
        return StreamState(dict(self._offsets), dict(self._ends), tuple(sorted(self._closed)))

    def load(self, state: RangeState | StreamState) -> None:
        """Continue from `save()` of a stream with these partitions, or with some of them.

        How far partitions go is never forgotten: it does not depend on what was trained.
        """
        if not isinstance(state, StreamState) or not self._offsets.keys() >= state.offsets.keys():
            hint = "restore it with its partitions"
            raise UsageError(f"the saved shard progress is of another stream; {hint}")
        new = {name: at for name, at in self._offsets.items() if name not in state.offsets}
        self._offsets = {**state.offsets, **new}
        self._ends = {name: max(end, state.ends.get(name, 0)) for name, end in self._ends.items()}
        self._closed |= self._offsets.keys() & set(state.closed)


Source = RangeSource | StreamSource
