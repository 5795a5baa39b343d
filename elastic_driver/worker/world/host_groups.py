"""`elastic.local_group()` and `elastic.cross_group()`: the workers of a host, or one of each host.

They serve collectives in two stages, such as a reduction within each host and then between hosts.
A group is connected when it is first asked for in a round, by its own members only, and ends with
the round (`groups`). Ranks are those of the current world.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from elastic_driver.words.world import SlotInfo
from elastic_driver.worker import current
from elastic_driver.worker.world import session


def local_group() -> Any:
    """Return torch's process group of the workers on this host, in the order of local ranks.

    The first call in a round is a collective: all ranks call it, and `cross_group`, in the same
    order. Later calls return the same object. Ask again after each change of the world, as the
    function under `@elastic.run` does that begins with it. Raises `UsageError` before this process
    is in a world, and `RoundOverError`, which `@elastic.run` handles, if the round ends meanwhile.
    """
    me = current.place()
    return _group("local", lambda place: place.host == me.host)


def cross_group() -> Any:
    """Return torch's process group of the workers with this local rank, one of each host.

    They are in the order of cross ranks. See `local_group`.
    """
    me = current.place()
    return _group("cross", lambda place: place.local_rank == me.local_rank)


def _group(name: str, belongs: Callable[[SlotInfo], bool]) -> Any:
    member = session.membership()
    if member is None or member.group is None or member.world is None:
        raise current.NotInitializedError("the round is over; ask for groups in the next one")
    made = member.group.host_groups
    if name not in made:
        ranks = [m.place.rank for m in member.world.members if belongs(m.place)]
        made[name] = dist.new_group(ranks, use_local_synchronization=True)
    return made[name]
