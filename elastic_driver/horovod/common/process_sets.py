"""Process sets: some ranks of the world, for which an operation can be called.

A set ends with its world: after a change of the world it is added again, in a reset callback.
"""

import os
from collections.abc import Sequence

from elastic_driver.horovod.common.exceptions import HorovodUsageError, NotInYetError
from elastic_driver.horovod.engine import lifecycle as running
from elastic_driver.horovod.engine.engine import Engine
from elastic_driver.horovod.engine.operation import Operation
from elastic_driver.horovod.engine.operation_log import INFO
from elastic_driver.horovod.engine.requests import Request

DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"
_added: list["ProcessSet"] = []  # in the present world


class ProcessSet:
    """Some ranks of the world; usable once `add_process_set` or `init` has added it.

    `process_set_id` is None before that, and again after the set was removed or its world has
    ended. `ranks` of the global process set are None outside of a world.
    """

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = sorted({int(rank) for rank in ranks_or_comm})

    def size(self) -> int:
        """Return the number of ranks."""
        return len(_engine_of(self).sets[self.process_set_id or 0].ranks)

    def rank(self) -> int:
        """Return this process's rank in the set; raises ValueError if it is not in it."""
        engine = _engine_of(self)
        index = engine.sets[self.process_set_id or 0].index
        if index < 0:
            raise HorovodUsageError(f"rank {engine.world.rank} is not in {self}")
        return index

    def included(self) -> bool:
        """Return whether this process is in the set."""
        return _engine_of(self).sets[self.process_set_id or 0].index >= 0

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a set, and return it; all ranks of the world call this with the same ranks.

    Raises ValueError for ranks that do not exist, and for a set of the same ranks as another one.
    """
    if os.environ.get(DYNAMIC, "").lower() not in ("1", "true"):
        raise HorovodUsageError(
            f"set {DYNAMIC}=1 to add or remove process sets after hvd.init(), "
            "or give them to hvd.init(process_sets=…)"
        )
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _add(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set; all ranks of the world call this. Return whether it was there."""
    number = process_set.process_set_id
    if process_set is global_process_set or number is None:
        return False
    engine = _engine()
    name = engine.next_name("remove_process_set", 0)
    _carry_out(engine, Request("remove_process_set", name, root=number))
    engine.remove_set(number)
    _added.remove(process_set)
    running.log().write(INFO, f"process set {number} was removed")
    process_set.process_set_id = None
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of each process set of this world, by its number; 0 is the global one."""
    return {number: list(place.ranks) for number, place in _engine().sets.items()}


def added_at_start(process_sets: Sequence[ProcessSet] | str) -> None:
    """Add the sets that `init` was given, in a new world."""
    engine = _engine()
    global_process_set.ranks = list(range(engine.world.size))
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise HorovodUsageError(f"hvd.init(process_sets={process_sets!r}): give sets")
        os.environ[DYNAMIC] = "1"
        return
    for process_set in process_sets:
        _add(process_set)


def forget() -> None:
    """Mark all sets as removed: their world has ended."""
    while _added:
        _added.pop().process_set_id = None
    global_process_set.ranks = []


def _add(process_set: ProcessSet) -> None:
    engine = _engine()
    ranks = process_set.ranks or []
    if not ranks or ranks[0] < 0 or ranks[-1] >= engine.world.size:
        raise HorovodUsageError(
            f"{process_set}: the world has the ranks 0 … {engine.world.size - 1}"
        )
    if any(place.ranks == tuple(ranks) for place in engine.sets.values()):
        raise HorovodUsageError(f"there is a process set with the ranks {ranks} already")
    name = engine.next_name("add_process_set", 0)
    number = _carry_out(engine, Request("add_process_set", name, splits=tuple(ranks)))
    engine.add_set(number, ranks)
    process_set.process_set_id = number
    _added.append(process_set)
    running.log().write(INFO, f"process set {number} has the ranks {ranks}")


def _carry_out(engine: Engine, request: Request) -> int:
    operation = Operation(request)
    engine.submit(operation, gather=False)
    return int(engine.wait(operation))


def _engine() -> Engine:
    engine = running.current()
    if engine is None:
        raise NotInYetError("Horovod is not initialized; call hvd.init() first")
    return engine


def _engine_of(process_set: ProcessSet) -> Engine:
    engine = _engine()
    if process_set.process_set_id is None:
        raise HorovodUsageError(f"{process_set} is not added to this world")
    return engine
