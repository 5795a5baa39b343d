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
    if not 1 <= state.next_token <= MAX_TOKEN:
        raise _impossible(f"its next token would be {state.next_token}")
    sure = [*state.outstanding, *held]
    others = [*(each.shard for each in state.quarantined), *(shard for shard, _ in state.losses)]
    for shard in (*sure, *others):
        if not _exists(dataset, shard):
            raise _impossible(f"{shard.name} are no shard")


def check_saved(dataset: m.Description, state: m.LedgerState) -> None:
    """Raise `UsageError` unless the numbers of a checkpoint fit each other.

    What the source has given is done, or is to do again; `check_shards` holds, too.
    """
    check_shards(dataset, state)
    if len(set(state.outstanding)) < len(state.outstanding):
        raise _impossible("a shard is to do twice")
    given, was_given = _given(dataset, state)
    if early := [shard for shard in state.outstanding if not was_given(shard)]:
        raise _impossible(f"{early[0].name} are to do again, and have not had their turn")
    left = {*state.outstanding, *filter(was_given, (each.shard for each in state.quarantined))}
    found = state.done_records + sum(shard.records for shard in left)
    if found != given:
        raise _impossible(f"{found} records are done or to do again, and {given} had their turn")
    most, size = state.done_records, dataset.shard_records
    if not -(-state.done_records // size) <= state.done <= most:
        raise _impossible(f"{state.done} shards cannot have {state.done_records} records")


def _impossible(why: str) -> UsageError:
    return UsageError(f"the saved shard progress cannot be one of this data set: {why}")


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
            raise _impossible("it is of another stream")
        offsets = source.offsets
        behind = [at - dataset.partitions[name] for name, at in offsets.items()]
        if min(behind, default=0) < 0:
            raise _impossible("a partition begins later")
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
