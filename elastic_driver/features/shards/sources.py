"""Sources of data shards: a data set of known length, or partitions that grow.

A source makes one shard at a time, when the ledger asks for the next. So 10⁹ records in 10⁶ shards
take no more memory than ten shards. A source only goes forward; `ledger` keeps account of the
shards. A saved state is checked here, too, as a checkpoint comes from outside.

Pure. Counts and offsets are records.
"""

from collections.abc import Callable, Iterable

from elastic_driver.arithmetic import Permutation, mix
from elastic_driver.errors import UsageError
from elastic_driver.features.shards import messages as m
from elastic_driver.features.shards.messages import (
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


# A token has the driver's term in its upper bits (`shards.TERM_BITS`): 2²⁸ terms are enough.
MAX_TOKEN = 2**60


def check_shards(dataset: m.Description, state: m.LedgerState, held: Iterable[Shard] = ()) -> None:
    """Raise `UsageError` if a state, or what is held beside it, has a shard that cannot exist."""
    _raise(_strange_shards(dataset, state, held))


def check_saved(dataset: m.Description, state: m.LedgerState) -> None:
    """Raise `UsageError` unless the numbers of a checkpoint fit each other.

    What the source has given is done, or is to do again; `check_shards` holds, too.
    """
    check_shards(dataset, state)
    _raise(_strange_numbers(dataset, state))


def _raise(why: str) -> None:
    if why:
        raise UsageError(f"the saved shard progress cannot be one of this data set: {why}")


def _strange_shards(dataset: m.Description, state: m.LedgerState, held: Iterable[Shard]) -> str:
    """Return what cannot be, or ""."""
    if not 1 <= state.next_token <= MAX_TOKEN:
        return f"its next token would be {state.next_token}"
    done = (*(each.shard for each in state.quarantined), *(shard for shard, _ in state.losses))
    for shard in (*state.outstanding, *held, *done):
        if not _exists(dataset, shard):
            return f"{shard.name} are no shard"
    return ""


def _strange_numbers(dataset: m.Description, state: m.LedgerState) -> str:
    """Return which numbers do not fit, or ""."""
    if len(set(state.outstanding)) < len(state.outstanding):
        return "a shard is to do twice"
    given, was_given = _given(dataset, state)
    if early := [shard for shard in state.outstanding if not was_given(shard)]:
        return f"{early[0].name} are to do again, and have not had their turn"
    left = {*state.outstanding, *filter(was_given, (each.shard for each in state.quarantined))}
    found = state.done_records + sum(shard.records for shard in left)
    if found != given:
        return f"{found} records are done or to do again, and {given} had their turn"
    records, size = state.done_records, dataset.shard_records
    if not -(-records // size) <= state.done <= records:
        return f"{state.done} shards cannot have {records} records"
    return ""


def _exists(dataset: m.Description, shard: Shard) -> bool:
    size = dataset.shard_records
    if isinstance(dataset, m.StreamDescription):
        first = dataset.partitions.get(shard.partition)
        whole = first is not None and shard.epoch == 0 and first <= shard.start
        return whole and shard.start < shard.stop <= shard.start + size
    fits = shard.partition == "" and shard.start % size == 0 and shard.start < dataset.records
    return fits and shard.stop == min(shard.start + size, dataset.records)


def _given(dataset: m.Description, state: m.LedgerState) -> tuple[int, Callable[[Shard], bool]]:
    """Return how many records the source has given, and a function that tells whether a shard was.

    Raises `UsageError` for a source of another kind.
    """
    source = state.source
    if isinstance(dataset, m.StreamDescription):
        if not isinstance(source, m.StreamState) or source.offsets.keys() - dataset.partitions:
            raise UsageError("the saved shard progress is of another stream")
        offsets = source.offsets
        behind = [at - dataset.partitions[name] for name, at in offsets.items()]
        if min(behind, default=0) < 0:
            raise UsageError("the saved shard progress is of another stream, which begins earlier")
        return sum(behind), lambda shard: shard.stop <= offsets.get(shard.partition, 0)
    loaded = RangeSource(dataset)
    loaded.load(source)
    position, size = loaded.save(), dataset.shard_records
    of_epoch = position.taken * size
    if loaded.shards:
        last = Shard(position.epoch, "", (loaded.shards - 1) * size, dataset.records)
        if loaded.ahead(last) < 0:
            of_epoch -= size - last.records
    return position.epoch * dataset.records + of_epoch, lambda shard: loaded.ahead(shard) < 0
