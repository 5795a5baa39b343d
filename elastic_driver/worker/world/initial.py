"""The world that this process was started for, joined without a word to the driver.

A script of Horovod calls `hvd.init()` first, and nobody knows then whether it will ever call
`hvd.elastic.run`. If it does not, its job counts as plain: the driver hears nothing of its workers,
and restarts them together after a loss. So they meet by themselves, with the ranks that they were
started with. They may leave that world and meet again as often as they like; no round changes.
Times are seconds.
"""

import itertools
import os
from collections.abc import Mapping
from datetime import timedelta
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field
from torch.distributed import DistStoreError, HashStore

from elastic_driver import contract
from elastic_driver.errors import UsageError, WorldBrokenError
from elastic_driver.words.orders import Reader, World, decode_place
from elastic_driver.words.world import Member, SlotInfo
from elastic_driver.worker.context import WorkerContext
from elastic_driver.worker.worker_log import say
from elastic_driver.worker.world.backend import BackendChoice
from elastic_driver.worker.world.groups import RoundOverError
from elastic_driver.worker.world.membership import ALONE, JobMembership
from rendezvous.client import RendezvousClient
from rendezvous.errors import RendezvousError
from rendezvous.torch_store import HTTPStore
from rendezvous.wire import DeletePrefix

TELLING_S = 5.0  # for the driver to answer which rank a newcomer will have
MEETING_S = 600.0  # for all processes to come, as the default of --start-timeout
_meetings = itertools.count(1)  # of this process


class _Place(Struct, frozen=True):
    """The place of a worker at its start, in its variables."""

    host: str = field(name=contract.HOSTNAME)
    rank: int = field(name="RANK")
    size: int = field(name="WORLD_SIZE")
    local_rank: int = field(name="HOROVOD_LOCAL_RANK")
    local_size: int = field(name="HOROVOD_LOCAL_SIZE")
    cross_rank: int = field(name="HOROVOD_CROSS_RANK")
    cross_size: int = field(name="HOROVOD_CROSS_SIZE")
    node_rank: int = field(name="GROUP_RANK")
    node_count: int = field(name="GROUP_WORLD_SIZE")
    round: int = field(name=contract.ROUND)


def place_at_start(
    born: WorkerContext, environ: Mapping[str, str] | None = None
) -> tuple[SlotInfo, int]:
    """Return the place that a worker was started with, and the round that it was started for.

    Raises `UsageError` where a variable is missing or wrong.
    """
    env = dict(os.environ if environ is None else environ)
    try:
        found = msgspec.convert(env, _Place, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"the variables of this worker have changed: {error}; leave those of elasticrun as "
            "they are"
        ) from error
    place = SlotInfo(
        host=found.host,
        slot=born.slot,
        rank=found.rank,
        local_rank=found.local_rank,
        cross_rank=found.cross_rank,
        size=found.size,
        local_size=found.local_size,
        cross_size=found.cross_size,
        node_rank=found.node_rank,
        node_count=found.node_count,
    )
    return place, found.round


def place_of_now(born: WorkerContext) -> SlotInfo | None:
    """Return the place that the driver has told a newcomer since it was started; None: no other.

    A driver that is away tells nothing.
    """
    client = born.client(TELLING_S)
    key = contract.worker_place(born.worker)
    try:
        entry = client.get(key)
    except RendezvousError as error:
        say(f"the driver does not say which rank this worker will have ({error})")
        return None
    finally:
        client.close()
    return None if entry is None else Reader(say).read(decode_place, key, entry.value)


class InitialMembership(JobMembership):
    """Membership in the world that this process was started for."""

    def __init__(self, born: WorkerContext | None, choice: BackendChoice) -> None:
        super().__init__(None, choice)
        self._born = born
        self._client: RendezvousClient | None = None
        if born is not None:
            self._port = urlsplit(born.endpoint).port

    def meet(self) -> None:
        """Wait for all processes of the world, and build its process group.

        Raises `WorldBrokenError` where they do not come.
        """
        number = next(_meetings)
        if self._born is None:
            me = Member(worker="localhost.0.0", place=ALONE)
            self._enter(World(1, (me,), "started alone"), me, HashStore(), -1)
            return
        place, round_id = place_at_start(self._born)
        self._client = self._born.client()
        prefix = f"horovod/{round_id}/"
        store = HTTPStore(self._client, f"{prefix}{number}/", timedelta(seconds=MEETING_S))
        me = Member(worker=self._born.worker, place=place)
        try:
            members = _roll_call(store, me)
            self._enter(World(round_id, members, "as started"), me, store, -1)
        except (DistStoreError, RoundOverError) as error:
            raise WorldBrokenError(
                f"rank {place.rank} of {place.size} did not meet the others in hvd.init(): {error}"
            ) from error
        if place.rank == 0 and number > 1:  # all have left the meeting before this one
            self._client.batch(DeletePrefix(f"{prefix}{number - 1}/"))

    def stop(self, *, script_is_over: bool = False, error: BaseException | None = None) -> None:
        """Leave the world; bounded, whatever the peers do."""
        super().stop(script_is_over=script_is_over, error=error)
        if self._client is not None:
            self._client.close()


def _roll_call(store: HTTPStore, me: Member) -> tuple[Member, ...]:
    """Return all members by rank, once each of them has come."""
    store.set(f"member/{me.place.rank}", msgspec.json.encode(me))
    keys = [f"member/{rank}" for rank in range(me.place.size)]
    return tuple(msgspec.json.decode(found, type=Member) for found in store.multi_get(keys))
