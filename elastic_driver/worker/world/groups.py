"""Builds, breaks and takes down the torch process group of one round.

Why a group is built in a thread of its own: see `attempts`.

Why there is a backend named `elastic_gloo`: torch's global state must only be touched by
the main thread. The thread makes the bare `ProcessGroupGloo`; the main thread then calls
`init_process_group(backend="elastic_gloo")`, whose creator, registered through torch's public
extension point, hands over the object that is ready. Collectives, DDP and `new_group()` behave
as with "gloo", because the object is gloo's own; `dist.get_backend()` tells the name. Where NCCL is
to carry CUDA tensors, torch makes that half itself (`cpu:elastic_gloo,cuda:nccl`); see `devices`.

Only `membership` uses this module. Times are seconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, Store

from elastic_driver.core.documents import Links, World
from elastic_driver.worker.timing.links import read_links
from elastic_driver.worker.world.attempts import Attempt, RoundOverError
from elastic_driver.worker.world.devices import DeviceHalf
from elastic_driver.worker.world.sockets import Connections

BACKEND = "elastic_gloo"
COLLECTIVE_TIMEOUT_S = (
    1800.0  # torch's own default; a hung peer is noticed by its lease long before
)
CONNECT_TIMEOUT_S = 120.0  # for the construction alone; an abandoned thread lives no longer
LINGER_S = 1.0  # for peers to have what this process has sent, before its device is cut off
_LOOK_S = 0.001
_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "::1"})


class Group:
    """The gloo group of one round, with the connections it stands on.

    `half` is what carries an accelerator's tensors beside it, where there is such a thing.
    """

    def __init__(self, backend: Any, connections: Connections) -> None:
        self.backend = backend
        self.connections = [connections]  # of it and of its subgroups
        self.half: DeviceHalf | None = None
        self.elected = True  # whether the vote, if there was one, was for such a half
        self.at_end: Callable[[], None] | None = None

    def vote(self, identity: str) -> bool:
        """Collective: whether everybody has a device (an `identity`), and each one of its own."""
        ballot = torch.zeros(self.backend.size(), dtype=torch.int64)
        ballot[self.backend.rank()] = zlib.crc32(identity.encode()) + 1 if identity else 0
        self.backend.allreduce([ballot]).wait()
        return 0 not in ballot and len(ballot.unique()) == len(ballot)

    def linger(self) -> None:
        """Wait until all peers are at this point too, for a moment only; whatever comes, go on."""
        until = time.monotonic() + LINGER_S
        with contextlib.suppress(RuntimeError):  # they have left already, or are gone
            barrier = self.backend.barrier()
            while not barrier.is_completed() and time.monotonic() < until:
                time.sleep(_LOOK_S)
            if not barrier.is_completed():
                self.stop_hearing()  # it must not hold up the end of the group

    def links(self) -> Links | None:
        """What has gone over its connections to other hosts; any thread."""
        return read_links(one for several in list(self.connections) for one in several.held())

    def stop_hearing(self) -> None:
        """Make every collective of this process that waits in this group raise; any thread."""
        for connections in list(self.connections):
            connections.stop_hearing()

    def hang_up(self) -> None:
        """Make every collective of a peer that waits for this process raise."""
        for connections in self.connections:
            connections.hang_up()

    def let_go(self) -> None:
        """Forget torch's object, which torch itself is to have the last reference to."""
        self.backend = None

    def end(self) -> None:
        """Free the rest; when every member has left the group."""
        for connections in self.connections:
            connections.close()
        if self.at_end is not None:
            self.at_end()

    def close_in_child(self) -> None:
        """In a forked child: let go of the connections."""
        for connections in self.connections:
            connections.close_in_child()


class GroupBuilder:
    """Builds one group in a thread; the caller waits, and may be told that the round is over.

    `device`: gloo's own, of the network. With a `ballot` the members vote at once: `Group.vote`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: Any,
        *,
        not_to: int | None,
        ballot: str | None = None,
    ) -> None:
        self._store, self._rank, self._size, self._device = store, rank, size, device
        self._ballot = ballot
        self._connections = Connections(not_to)
        self._attempt: Attempt[Group] = Attempt()

    def build(self, name: str) -> Group:
        """The finished group.

        Raises `RoundOverError` once `abandon` was called or where the peers could not be reached.
        """
        self._connections.start()
        try:
            return self._attempt.make(self._construct, name, CONNECT_TIMEOUT_S + 1)
        except Exception as error:
            self._connections.finish()  # what was half built must not keep the others waiting
            self._connections.hang_up()
            self._connections.stop_hearing()
            self._connections.close()
            raise RoundOverError(str(error).partition("\n")[0]) from error

    def abandon(self, reason: str) -> None:
        """Let `build` raise now; any thread may call it."""
        self._attempt.abandon(reason)

    def _construct(self) -> Group:
        backend = make_gloo(self._store, self._rank, self._size, self._device)
        self._connections.finish()
        group = Group(backend, self._connections)
        if self._ballot is not None:
            group.elected = group.vote(self._ballot)
        return group


def make_gloo(store: Store, rank: int, size: int, device: Any) -> ProcessGroupGloo:
    """A gloo group over `store`; blocks until every peer is connected."""
    options = ProcessGroupGloo._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    backend = ProcessGroupGloo(store, rank, size, options)
    backend._set_default_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    return backend


def gloo_device(world: World, endpoint: str | None) -> Any:
    """The network device gloo is to use: GLOO_SOCKET_IFNAME, else loopback in a local world,
    else the interface that reaches the rendezvous, else gloo's own choice.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if named:
        return ProcessGroupGloo.create_device(interface=named.split(",")[0])
    if is_local(world):
        return ProcessGroupGloo.create_device(hostname="127.0.0.1")
    address = _address_towards(endpoint)
    if address is not None and not address.startswith("127."):
        return ProcessGroupGloo.create_device(hostname=address)
    return ProcessGroupGloo.create_default_device()


def is_local(world: World) -> bool:
    """Whether all members are on one host, so that their traffic need not leave it."""
    hosts = {member.place.host for member in world.members}
    return len(hosts) == 1 or all(h in _LOOPBACK_NAMES or h.startswith("127.") for h in hosts)


def _address_towards(endpoint: str | None) -> str | None:
    """This host's address on the way to the rendezvous; sends nothing, resolves no name."""
    parts = urlsplit(endpoint or "")
    if not parts.hostname or not parts.port:
        return None
    family = socket.AF_INET6 if ":" in parts.hostname else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port))
        return str(probe.getsockname()[0])
    return None


# ---- torch's global state; the main thread only ------------------------------------------

Creator = Callable[[Store, int, int, timedelta], Any]


class _Handover:
    """What the registered backend gives to torch next."""

    ready: Any = None  # the default group, while it is being installed
    subgroup: Creator | None = None  # makes the groups of `new_group()`


def install(
    group: Group,
    store: Store,
    rank: int,
    size: int,
    subgroup: Creator,
    *,
    beside: str | None = None,
) -> None:
    """Make `group` torch's default process group; `subgroup` makes those of `new_group()`.

    `beside`: the backends that torch is to make itself, for other devices ("cuda:nccl").
    """
    _register()
    _Handover.ready, _Handover.subgroup = group.backend, subgroup
    excepthook = sys.excepthook
    try:
        dist.init_process_group(
            backend=BACKEND if beside is None else f"cpu:{BACKEND},{beside}",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
    finally:
        _Handover.ready = None
        # Torch's puts `[rank0]:` before each line of a traceback, and in the next round another.
        sys.excepthook = excepthook


def uninstall(half: DeviceHalf | None = None) -> None:
    """Take down torch's process groups, healthy or broken; never waits for a peer.

    `half`: what was beside the group, cut off already.
    """
    _Handover.subgroup = None  # it holds the group
    if not dist.is_initialized():
        return
    if half is not None:
        half.forget()
    else:
        dist.destroy_process_group()


def _register() -> None:
    if BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    if _Handover.ready is not None:
        return _Handover.ready
    if _Handover.subgroup is None:
        raise RuntimeError(f"the {BACKEND} backend is made by elastic.init(), not by hand")
    return _Handover.subgroup(store, rank, size, timeout)
