"""The one membership of this process: `elastic.init()` starts it, `elastic.shutdown()` ends it.

Scripts call `init` themselves or leave it to `@elastic.run`. The membership stops when the script
ends, or as soon as an exception that ends it is shown: the process may take seconds to end, and the
others do not wait for that. A forked child drops it: it must neither send heartbeats nor hold on to
the connections of the training process. It keeps rank and size, which the processes of a loader ask
for. No process that a worker has started joins the job beside it.

A worker that makes no progress for long counts as hung (`heartbeat.watches`,
`job.hangs`). A commit is progress. A loop without commits calls `report_progress`; a long
phase that is not training, such as an evaluation, runs inside `busy`. Both do nothing in a process
that `elasticrun` did not start. Scripts call them on the training thread.

A script of Horovod calls `hvd.init()` first, and nobody knows then whether it will ever call
`hvd.elastic.run`. If it does not, its job counts as plain: the driver hears nothing of its workers,
and restarts them together after a loss. So they meet by themselves, with the ranks that they were
started with (`InitialMembership`), without a word to the driver. They may leave that world and meet
again as often as they like; no round changes.

`local_group()` and `cross_group()` serve collectives in two stages, such as a reduction within each
host and then between hosts. A group is connected when it is first asked for in a round, by its own
members only, and ends with the round (`groups`). Ranks are those of the current world. Times are
seconds.
"""

import atexit
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec
import torch.distributed as dist
from msgspec import Struct, field
from torch.distributed import DistStoreError, HashStore

from elastic_driver import contract
from elastic_driver.errors import UsageError, WorldBrokenError
from elastic_driver.words.orders import Reader, World, decode_place
from elastic_driver.words.progress import MAX_NAME_CHARS, MAX_NUMBERS
from elastic_driver.words.world import Member, SlotInfo
from elastic_driver.worker import context, current
from elastic_driver.worker.context import WorkerContext
from elastic_driver.worker.current import say
from elastic_driver.worker.heartbeat.training_progress import TrainingProgress
from elastic_driver.worker.world.groups import (
    BackendChoice,
    RoundOverError,
    choose_backend,
    stop_companions,
)
from elastic_driver.worker.world.member import ALONE, JobMembership
from rendezvous.client import RendezvousClient
from rendezvous.errors import RendezvousError
from rendezvous.torch_store import HTTPStore
from rendezvous.wire import DeletePrefix

# ---- the world that this process was started for ---------------------------------------

TELLING_S = 5.0  # for the driver to answer which rank a newcomer will have
MEETING_S = 600.0  # for all processes to come, as the default of --start-timeout
_meetings = itertools.count(1)  # of this process


class _Place(Struct, frozen=True):
    """The place of a worker at its start, in its variables: a `SlotInfo` without its slot."""

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
    numbers = msgspec.structs.asdict(found)
    round_id = numbers.pop("round")
    return SlotInfo(slot=born.slot, **numbers), round_id


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


# ---- the membership --------------------------------------------------------------------

BUSY_S = 3600.0  # the default limit of `busy`
LARGEST_COUNT = 2**53  # of steps and samples


class _Session:
    """The mutable field of this module."""

    membership: JobMembership | None = None
    initial: InitialMembership | None = None  # instead, until the script joins the job
    watched: bool = False  # for an exception that ends the script
    alone: bool = False  # no elasticrun has started this process, and that was said


def init(backend: str | None = None) -> None:
    """Join the job: wait for the first round with this process, and build its process group.

    Does nothing when this process is in a world already, or was started by one that is. Without
    `elasticrun` the process becomes a world of one, so that a script can be tried with plain
    `python`.

    Args:
        backend: as for torch's `init_process_group`: "gloo", or the accelerator's own, such as
            "nccl" or "xccl", for its tensors (gloo then carries CPU tensors). None: the
            accelerator's own in every round in which each worker has a device, else gloo.

    Raises:
        UsageError: the backend is unknown, there is no device for it, or the environment of a
            worker is incomplete.
        RendezvousError: the rendezvous cannot be reached or refuses this worker.
    """
    if _Session.membership is None and current.has_parent_in_world():
        return
    member = start(backend)
    if member.group is None:
        member.join("started")


def start(backend: str | None = None) -> JobMembership:
    """Return the membership of this process, started if it was not; do not wait for a round.

    `backend` counts in the first call only; see `init`.
    """
    if _Session.membership is None:
        told = current.rank() if current.is_initialized() else -1  # in a world without the driver
        leave_initial()
        born = _context()
        member = JobMembership(born, choose_backend(backend, born.slot if born else 0))
        member.told = told
        member.start()
        _Session.membership = member
    return _Session.membership


def meet_as_started() -> None:
    """Join the world that this process was started for, and tell the driver nothing.

    For scripts of which nobody knows yet whether they are elastic; see above. Does nothing in
    a process that is in a world.
    """
    if membership() is not None:
        return
    born = _context()
    member = InitialMembership(born, choose_backend(None, born.slot if born else 0))
    member.meet()
    _Session.initial = member


def leave_initial() -> None:
    """Leave the world of `meet_as_started`; does nothing in another one."""
    member, _Session.initial = _Session.initial, None
    if member is not None:
        member.stop()


def _context() -> context.WorkerContext | None:
    """Return the context of this process, and use it; None where elasticrun has not started it."""
    born = context.from_environment()
    if born is not None and current.has_parent_in_world():
        raise UsageError(
            f"this process was started by worker {born.worker}, which trains in the job, and "
            "cannot join beside it; begin the script's training under "
            'if __name__ == "__main__":, which the processes of a loader leave out'
        )
    if born is None:
        if not _Session.alone:
            say("not started by elasticrun: training in this process alone, as a world of one")
        _Session.alone = True
        return None
    if born.scratch:
        context.use_scratch(born.scratch)
    if not _Session.watched:
        _leave_upon_exception()
    return born


def _leave_upon_exception() -> None:
    """Have this process leave its world as soon as an exception that ends the script is shown."""
    _Session.watched, show = True, sys.excepthook

    def show_and_leave(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            show(kind, error, trace)
        finally:
            if membership() is not None:
                stop_companions(broken=True)
            _shutdown(script_is_over=True, error=error)

    sys.excepthook = show_and_leave


def membership() -> JobMembership | None:
    """Return the membership of this process; None before `init()` and after `shutdown()`."""
    return _Session.membership or _Session.initial


def is_in_job() -> bool:
    """Return whether this process has joined the job: it is not in the world of its start only."""
    return _Session.membership is not None


def expect_round() -> None:
    """Take the place that this process will have in a round, until it joins one.

    For newcomers, which need not wait for a round to know their rank.
    """
    born = _context()
    if born is not None and membership() is None:
        place, round_id = place_at_start(born)
        current.enter(place_of_now(born) or place, round_id)


def shutdown() -> None:
    """Leave the world and end the heartbeat. Called at exit; a second call does nothing."""
    _shutdown(script_is_over=False)


def _shutdown(*, script_is_over: bool, error: BaseException | None = None) -> None:
    leave_initial()
    member, _Session.membership = _Session.membership, None
    if member is not None:
        member.stop(script_is_over=script_is_over, error=error)


# ---- progress --------------------------------------------------------------------------


def report_progress(
    step: int | None = None,
    samples: int | None = None,
    *,
    total: int | None = None,
    **numbers: float,
) -> None:
    """Report that this worker makes progress. `commit()` does so by itself.

        elastic.report_progress(loss=loss.item(), total=10_000)

    Status, page and metrics show what was reported last.

    Args:
        step: the number of the finished step, for loops without commits. The times between reported
            steps determine the length of silence that counts as a hang. None, and nothing else
            either: report life only, from within a long step or an evaluation.
        samples: samples that this process has trained since its last call with samples. Samples
            that a `FixedBatch`, an `ElasticSampler` or a `ShardedDataset` of the state counts need
            not be reported.
        total: the number of steps that the whole training has.
        numbers: up to eight numbers by name, such as the loss. One that is not finite is left out.

    Costs a few microseconds. Raises `UsageError` for what is no number, a count below 0, and too
    many numbers.
    """
    for name, count in (("step", step), ("samples", samples), ("total", total)):
        if count is not None and not 0 <= count <= LARGEST_COUNT:
            raise UsageError(f"report_progress({name}={count}): give a number from 0 on")
    progress = _progress()
    now = time.monotonic()
    if numbers:
        progress.numbers = _checked(numbers)
    if total is not None:
        progress.total = int(total)
    if samples is not None:
        progress.reported_samples += int(samples)
    if step is not None:
        progress.record_reported_step(now, int(step))
    elif samples is None and total is None and not numbers:
        progress.active_at = now


def _checked(numbers: dict[str, float]) -> dict[str, float]:
    """Return the finite ones of a script's numbers; raises `UsageError` for what is no number."""
    if len(numbers) > MAX_NUMBERS:
        raise UsageError(
            f"report_progress got {len(numbers)} numbers; up to {MAX_NUMBERS} are shown"
        )
    found = {}
    for name, value in numbers.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            kind = type(value).__name__
            raise UsageError(f"report_progress({name}=…): give a number, not a {kind}") from None
        if math.isfinite(number):
            found[name[:MAX_NAME_CHARS]] = number
    return found


@contextmanager
def busy(what: str, within: float = BUSY_S) -> Iterator[None]:
    """Allow this worker to be silent inside: `with elastic.busy("evaluation"): ...`.

    Peers that wait for it meanwhile do not count as hung either. Blocks may be nested; the later
    end counts. Heartbeats go on: a worker that is stopped or killed is noticed as always.

    Args:
        what: a name for readers of the script.
        within: seconds after which silence counts again.
    """
    del what
    progress = _progress()
    before = progress.busy_until
    progress.busy_until = max(before, time.monotonic() + within)
    try:
        yield
    finally:
        progress.active_at = time.monotonic()
        progress.busy_until = before


def _progress() -> TrainingProgress:
    """Return the record that heartbeats report; outside of a job, a record that no one reads."""
    member = _Session.membership
    return TrainingProgress() if member is None else member.progress


# ---- forks and the end of the process --------------------------------------------------


def _forget_in_child() -> None:
    member = membership()
    _Session.membership = _Session.initial = None
    if member is not None:
        member.forget_in_child()
    current.inherit()


atexit.register(_shutdown, script_is_over=True)
os.register_at_fork(after_in_child=_forget_in_child)


# ---- groups of a host, and across hosts ------------------------------------------------


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
    member = membership()
    if member is None or member.group is None or member.world is None:
        raise current.NotInitializedError("the round is over; ask for groups in the next one")
    made = member.group.host_groups
    if name not in made:
        ranks = [m.place.rank for m in member.world.members if belongs(m.place)]
        made[name] = dist.new_group(ranks, use_local_synchronization=True)
    return made[name]
