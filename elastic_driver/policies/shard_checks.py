"""Whether a saved state can be one of a data set: a checkpoint comes from outside. Pure.

Counts and offsets are records.
"""

from collections.abc import Callable, Iterable

from elastic_driver.errors import UsageError
from elastic_driver.policies import shard_messages as m
from elastic_driver.policies.shard_messages import Shard
from elastic_driver.policies.shard_sources import RangeSource

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
