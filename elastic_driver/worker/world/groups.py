"""Builds, breaks and takes down the torch process group of one round.

**The backend** follows from the script's wish and this machine's accelerator (`choose_backend`).
The type of device is torch's (`torch.accelerator`), and so is the library of its collectives: NCCL,
XCCL, or that of a plug-in. Gloo carries CPU tensors in any case.

**Building.** Connecting to peers cannot be interrupted, neither in gloo nor in NCCL, and a peer
that dies in that moment would hold up all others until some timeout. So `membership` runs it in a
daemon thread and goes on as soon as the round is known to be over; the thread ends when it can.

Torch's global state must be touched by the main thread only. So the thread makes the bare
`ProcessGroupGloo`; the main thread then calls `init_process_group(backend="elastic_gloo")`, whose
creator, registered through torch's public extension point, returns the object that is ready. Where
a device has collectives of its own, torch makes that half itself (`cpu:elastic_gloo,xpu:xccl`; see
`device`). In rounds without it gloo carries the device's tensors, too, by way of the host's memory:
our backend is registered for them.

**The name.** Collectives, DDP and `new_group()` behave as with "gloo", because the object is gloo's
own, under another name. Scripts, and torch itself, ask for the name: `monitored_barrier()` and the
differentiable `all_to_all()` are for "gloo" only. So torch's functions that take or return a name
are replaced by ones that translate it (`translate`). Where a device has collectives of its own, its
half names the group.

**Companions** are parts of the script's process that live as long as a world, such as the engine of
Horovod's operations. `run` starts them in each new world; `membership` stops them before the
world's process group is taken down.

Times are seconds.
"""

import contextlib
import functools
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import Join

from elastic_driver import contract
from elastic_driver.contract import VISIBLE_DEVICES, no_port_left
from elastic_driver.errors import ClusterError, UsageError, WorldBrokenError
from elastic_driver.words.orders import World
from elastic_driver.worker import torch_seams
from elastic_driver.worker.world import nccl
from elastic_driver.worker.world.device import Accelerator, DeviceHalf
from elastic_driver.worker.world.gloo import GroupConnections
from elastic_driver.worker.world.wrapping import tear_down_wrappers
from rendezvous.torch_store import HTTPStore

COLLECTIVE_TIMEOUT_S = 1800.0  # torch's default; the lease of a hung peer expires long before
CONNECT_TIMEOUT_S = 120.0  # of the construction; an abandoned thread lives no longer
LINGER_S = 1.0  # the longest wait for peers to receive our data, before the device is cut off
CALLBACKS_S = 1.0  # the longest wait for gloo's threads to forget a script's callbacks
FIRST_POLL_S, LONGEST_POLL_S = 0.005, 1.0  # between two looks whether gloo's operations have ended
_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "::1"})
GroupCreator = Callable[[Store, int, int, timedelta], Any]

# ---- the choice of the backend -----------------------------------------------------------


@dataclass(frozen=True)
class BackendChoice:
    """The device half of this worker's groups; None: gloo carries everything.

    `by_vote`: the half exists only in rounds in which every worker votes with a device, because
    the script has not asked for it. `early`: open the device before there is a round, because it
    is hardly another worker's, too.
    """

    device: Accelerator | None = None
    by_vote: bool = False
    early: bool = False


def accelerator_names() -> tuple[str, str]:
    """Return torch's names of this installation's type of device and of its collectives.

    They are NCCL's if torch was built for no accelerator, and the second is "gloo" for a type that
    has none of its own. No device is touched.
    """
    device = torch.accelerator.current_accelerator()
    if device is None:
        return nccl.KIND, nccl.BACKEND
    try:
        return device.type, dist.get_default_backend_for_device(device)
    except ValueError:  # a plug-in without collectives
        return device.type, "gloo"


def choose_backend(backend: str | None, slot: int) -> BackendChoice:
    """Return the choice of the worker in this slot.

    `backend`: a name as torch's `init_process_group` takes it; None: not specified. Raises
    `UsageError` for an unknown name, and where it names a device's backend and there is no device.
    """
    kind, own = accelerator_names()
    names = set((backend or own).lower().replace(" ", "").split(","))
    if names in ({"gloo"}, {"cpu:gloo"}, {"cpu:gloo", f"{kind}:gloo"}):
        return BackendChoice()
    both = f"cpu:gloo,{kind}:{own}"
    if names not in ({own}, {f"{kind}:{own}"}, set(both.split(","))):
        raise UsageError(f"backend {backend!r} is not supported; use one of gloo, {own}, or {both}")
    built = dist.is_backend_available(own)
    index = device_of(slot, kind) if built else None
    if index is not None:
        device = nccl.Nccl(index) if own == nccl.BACKEND else Accelerator(kind, own, index)
        return BackendChoice(device, backend is None, early=backend is not None or index == slot)
    if backend is None:
        # Where torch has no such backend, no worker of the job has it, and no vote is needed.
        return BackendChoice(by_vote=built)
    if not built:
        name = own.upper()
        raise UsageError(f"backend {backend!r} needs a torch that is built with {name}; use gloo")
    visible = [f"{n}={os.environ[n]}" for n in VISIBLE_DEVICES if n in os.environ]
    seen = f" ({', '.join(visible)})" if visible else ""
    raise UsageError(
        f"backend {backend!r} needs a GPU for each worker, and slot {slot} has none{seen}; "
        "start no more workers on a host than it has GPUs, or use gloo"
    )


def device_of(slot: int, kind: str) -> int | None:
    """Return the visible device of the worker in this slot; None if it has none.

    If the launcher shows each worker one device only, or the script uses a device already, it is
    that one. Reads the number of devices from the driver and does not start a device.
    """
    module = torch.get_device_module(kind)
    if not module.is_available():
        return None
    if module.is_initialized():
        return int(module.current_device())
    devices = module.device_count()
    if slot < devices:
        return slot
    return 0 if devices == 1 else None


# ---- the group of a round ----------------------------------------------------------------


class RoundOverError(Exception):
    """The round a group was being built for is over; wait for the next one."""


class _Handover:
    """Holds the function that makes the groups of our backend; None outside of a round."""

    create: GroupCreator | None = None


@dataclass(eq=False)
class RoundGroup:
    """The gloo group of one round, with its connections and those of its subgroups."""

    backend: Any  # gloo's object
    connections: GroupConnections
    subgroups: list[Any] = field(default_factory=list)  # gloo's objects of `new_group()`
    store: Store | None = None  # the one it was built with
    half: DeviceHalf | None = None  # carries the accelerator's tensors, where there is one
    elected: bool = True  # whether the vote, if there was one, was for such a half
    host_groups: dict[str, Any] = field(default_factory=dict)  # torch's, made by `session`

    def vote(self, identity: str) -> bool:
        """Return whether every worker has a device of its own; a collective.

        `identity`: a unique name of this worker's device, "" without one.
        """
        ballot = torch.zeros(self.backend.size(), dtype=torch.int64)
        ballot[self.backend.rank()] = zlib.crc32(identity.encode()) + 1 if identity else 0
        # With a timeout the wait is torch's own. The waits of now are those of the round that was
        # left, and they end at once if they were given up (`gloo`).
        self.backend.allreduce([ballot]).wait(timedelta(seconds=CONNECT_TIMEOUT_S))
        return 0 not in ballot and len(ballot.unique()) == len(ballot)

    def linger(self) -> None:
        """Wait until all peers call this too, for `LINGER_S` at most."""
        try:
            self.backend.barrier().wait(timedelta(seconds=LINGER_S))
        except RuntimeError:  # a peer is late, has left already, or is gone
            self.connections.shut_reads()  # the barrier must not hold up the end of the group

    def cut_off_device(self, *, broken: bool) -> str | None:
        """Cut the device off, if there is one, and wait until it is idle.

        Unless the round is `broken` or the device is cut off already, it first finishes its work.
        Returns the problem where that fails.
        """
        half = self.half
        if half is None:
            return None
        if not broken and half.reason is None:
            with contextlib.suppress(WorldBrokenError):
                half.settle()
                self.linger()
        half.cut_off("this round is left")
        half.wait_until_cut_off()
        return half.problem()

    def install(self, create_subgroup: GroupCreator, device_backends: str | None = None) -> None:
        """Make this torch's default process group; on the main thread.

        Args:
            create_subgroup: makes the groups of `new_group()`.
            device_backends: those that torch makes itself, for other devices ("xpu:xccl").
        """
        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, _create, devices=_kinds())
        translate()
        _Handover.create = lambda *_: self.backend
        excepthook = sys.excepthook
        name = f"cpu:{BACKEND},{device_backends}" if device_backends else BACKEND
        rank = self.backend.rank()
        size = self.backend.size()
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        try:
            make_group(name, None, timeout, size, rank, self.store)
        finally:
            _Handover.create = create_subgroup
            # Torch's hook puts `[rank0]:` before each line of a traceback, later a wrong rank.
            sys.excepthook = excepthook

    def take_down(self, ended: Callable[[], bool] = lambda: True) -> threading.Thread:
        """Take down torch's process groups, healthy or broken, without waiting for a peer.

        On the main thread, and after the device was cut off. The connections stay open. Gloo's
        destructor waits for its threads, and one of them may sleep for ever in a send that gloo
        has forgotten. So the objects end on the thread that this returns, once `ended()`: until
        then it holds them, also while the interpreter ends, whose main thread would hang in that
        destructor. A thread that is inside the destructor would abort the interpreter's end, so it
        must be joined before.

        A callback of the script on one of gloo's threads may hold torch's group, and that thread
        cannot wait for itself. So our reference is dropped when no other is left, or a moment later
        than such callbacks last.
        """
        self.connections.shut_writes()
        tear_down_wrappers()
        self.host_groups.clear()
        last = [self.backend, *self.subgroups]
        self.backend = None
        self.subgroups = []
        _Handover.create = None  # it holds the group
        torchs = [] if self.half is not None or not dist.is_initialized() else [dist.group.WORLD]
        if self.half is not None and dist.is_initialized():
            _close(self.store)  # else a thread of torch, which ends here, may wait for the driver
            self.half.device.forget()
        elif dist.is_initialized():
            dist.destroy_process_group()

        def end() -> None:
            pause = FIRST_POLL_S
            while not ended():
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL_S)
            until = time.monotonic() + CALLBACKS_S
            # The list, and the argument.
            while torchs and sys.getrefcount(torchs[0]) > 2 and time.monotonic() < until:
                time.sleep(FIRST_POLL_S)
            torchs.clear()
            last.clear()

        ending = threading.Thread(target=end, name="elastic-old-group", daemon=True)
        ending.start()
        return ending

    def end(self) -> None:
        """Free the connections and the store; called when every member has left the group."""
        self.connections.close()
        _close(self.store)


Run = Callable[[Callable[[], RoundGroup]], RoundGroup]  # calls its argument in a thread


def build(
    run: Run, store: Store, rank: int, size: int, *, device: Any, port: int | None, vote: str | None
) -> RoundGroup:
    """Build a group; `run` calls the part that blocks, in a thread that can be given up.

    Args:
        run: returns what its argument returns, or raises `RoundOverError`.
        store: the peers exchange their addresses through it.
        rank, size: of this process in the group.
        device: gloo's network device.
        port: the rendezvous' port; connections to it are not the group's.
        vote: the name of this worker's device, see `RoundGroup.vote`; None: there is no vote.

    Raises `RoundOverError` where `run` is given up or the peers cannot be reached.
    """
    # Gloo then sends one request a rank instead of one a peer.
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    connections = GroupConnections(port)

    def construct() -> RoundGroup:
        backend = make_gloo(store, rank, size, device)
        connections.finish(size - 1)
        group = RoundGroup(backend, connections, store=store)
        if vote is not None:
            group.elected = group.vote(vote)
        return group

    try:
        return run(construct)
    except Exception as error:
        connections.finish()  # a half-built group must not keep the others waiting
        connections.shut_writes()
        connections.shut_reads()
        connections.close()
        _close(store)  # the thread may still be waiting for keys
        raise RoundOverError(str(error).partition("\n")[0]) from error


def make_gloo(store: Store, rank: int, size: int, device: Any) -> ProcessGroupGloo:
    """Return a gloo group over `store`; blocks until every peer is connected."""
    limits = {
        "connect": timedelta(seconds=CONNECT_TIMEOUT_S),
        "collective": timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    }
    return torch_seams.make_gloo(store, rank, size, device, **limits)


def gloo_device(world: World) -> Any:
    """Return gloo's network device.

    It is that of GLOO_SOCKET_IFNAME, which the agent sets where it knows the interface to the other
    hosts; else loopback in a world on one host, else gloo's own choice.
    """
    try:
        if named := os.environ.get("GLOO_SOCKET_IFNAME"):
            return ProcessGroupGloo.create_device(interface=named.split(",")[0])
        hosts = {member.place.host for member in world.members}
        if len(hosts) == 1 or all(h in _LOOPBACK_NAMES or h.startswith("127.") for h in hosts):
            return ProcessGroupGloo.create_device(hostname="127.0.0.1")
        return ProcessGroupGloo.create_default_device()
    except RuntimeError as error:
        if (given := os.environ.get(contract.PORTS)) is None or "bind: " not in str(error):
            raise
        low, high = map(int, given.rpartition(":")[2].split("-"))
        host = os.environ.get(contract.HOSTNAME, "this host")
        raise ClusterError(no_port_left((low, high), "gloo", host)) from error


def _kinds() -> list[str]:
    """Return the types of device whose tensors gloo carries; no device is touched."""
    has_device = torch.accelerator.current_accelerator() is not None
    return ["cpu", accelerator_names()[0]] if has_device else ["cpu"]


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    if _Handover.create is None:
        raise RuntimeError(f"the {BACKEND} backend is made by elastic.init(), not by hand")
    return _Handover.create(store, rank, size, timeout)


def _close(store: Store | None) -> None:
    if isinstance(store, HTTPStore):  # torch's own stores need no end
        store.close()


# ---- the name of the group -------------------------------------------------------------

BACKEND = "elastic_gloo"
_REMOVE = "remove the call, or make it only where elastic-driver is not used"


class _Installed:
    """The mutable fields of this module."""

    done = False
    ours = False  # the call of `init_process_group` is that of `groups`


def translate() -> None:
    """Have torch's functions speak of "gloo"; a second call does nothing. On the main thread."""
    if _Installed.done:
        return
    _Installed.done = True
    _replace("get_backend", _get_backend)
    _replace("new_group", _new_group)
    _replace("init_process_group", _init_process_group)
    notify = Join.notify_join_context

    @functools.wraps(notify)
    def notify_join_context(joinable: Any) -> Any:
        work = notify(joinable)
        if (see := getattr(joinable, "see_join_work", None)) is not None:
            see(work)
        return work

    Join.notify_join_context = staticmethod(notify_join_context)


def make_group(name: str, *args: Any) -> None:
    """Call torch's `init_process_group`; raises `UsageError` where the script has called it."""
    if dist.is_initialized():
        raise UsageError(
            "the script has called init_process_group() before the function under @elastic.run, in "
            f"which elastic-driver makes torch's process group: {_REMOVE}"
        )
    _Installed.ours = True
    try:
        dist.init_process_group(name, *args)
    finally:
        _Installed.ours = False


def _replace(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    replaced = make(getattr(c10d, name))
    setattr(c10d, name, replaced)
    setattr(dist, name, replaced)


def _get_backend(of_torch: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(of_torch)
    def get_backend(group: Any = None) -> str:
        name = of_torch(group)
        if BACKEND not in name:
            return name
        _, _, device = name.partition(",")
        return device.partition(":")[2] or dist.Backend.GLOO

    return get_backend


def _new_group(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(of_torch)
    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: str | None = None,
        *args: Any,
        **others: Any,
    ) -> Any:
        """See torch: a group of "gloo" is one of this world, and breaks with it."""
        if backend == dist.Backend.GLOO and BACKEND in of_world():
            backend = BACKEND
        return of_torch(ranks, timeout, backend, *args, **others)

    return new_group


def of_world() -> str:
    """Return torch's name of the default group's backend; "" where there is none."""
    if not dist.is_initialized():
        return ""
    return torch_seams.backend_names(torch_seams.default_group())


def _init_process_group(of_torch: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(of_torch)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not _Installed.ours and BACKEND in of_world():
            raise UsageError(
                "init_process_group() is called in a world, for which elastic-driver has made "
                f"torch's process group: {_REMOVE}"
            )
        of_torch(*args, **kwargs)

    return init_process_group


# ---- companions of a world -------------------------------------------------------------


class Companion(Protocol):
    """Something that works over the process group of one world; called on the training thread."""

    def start(self) -> None:
        """Start in the world that this process has just joined. Collective: all ranks call it."""

    def stop(self, *, broken: bool) -> None:
        """End, within seconds; a second call does nothing.

        `broken`: the world is of no use any more, so no peer is waited for.
        """


_companions: list[Companion] = []


def add_companion(companion: Companion) -> None:
    """Start this companion in every world that comes; a second call does nothing."""
    if companion not in _companions:
        _companions.append(companion)


def remove_companion(companion: Companion) -> None:
    """Start this companion in no world any more."""
    if companion in _companions:
        _companions.remove(companion)


def start_companions() -> None:
    """Start all companions in a new world."""
    for companion in _companions:
        companion.start()


def stop_companions(*, broken: bool = False) -> None:
    """Stop all companions; see `Companion.stop`."""
    for companion in _companions:
        companion.stop(broken=broken)
