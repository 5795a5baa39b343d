"""Builds, breaks and takes down the torch process group of one round.

Why a group is built in a thread of its own: while gloo connects, its constructor cannot be
interrupted, and a member that dies in that moment would hold everybody until the timeout. So
`GroupBuilder` builds in a thread that is abandoned when the round is closed meanwhile.

Why there is a backend named `elastic_gloo`: torch's global state must only be touched by
the main thread. The thread makes the bare `ProcessGroupGloo`; the main thread then calls
`init_process_group(backend="elastic_gloo")`, whose creator, registered through torch's public
extension point, hands over the object that is ready. Collectives, DDP and `new_group()` behave
as with "gloo", because the object is gloo's own; `dist.get_backend()` tells the name.

Only `world` uses this module. Times are seconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, Store

from elastic_driver.core.messages import Links, World
from elastic_driver.worker.links import read_links
from elastic_driver.worker.sockets import Connections

BACKEND = "elastic_gloo"
COLLECTIVE_TIMEOUT_S = (
    1800.0  # torch's own default; a hung peer is noticed by its lease long before
)
CONNECT_TIMEOUT_S = 120.0  # for the construction alone; an abandoned thread lives no longer
_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "::1"})


class RoundOverError(Exception):
    """The round a group was being built for is over; wait for the next one."""


class Group:
    """The gloo group of one round, with the connections it stands on."""

    def __init__(self, backend: Any, connections: Connections) -> None:
        self.backend = backend
        self.connections = [connections]  # of it and of its subgroups
        self.at_end: Callable[[], None] | None = None

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
    """Builds one group in a thread; the caller waits, and may be told that the round is over."""

    def __init__(self, store: Store, rank: int, size: int, device: Any, not_to: int | None) -> None:
        self._store, self._rank, self._size, self._device = store, rank, size, device
        self._connections = Connections(not_to)
        self._outcome: SimpleQueue[Group | Exception] = SimpleQueue()

    def build(self, name: str) -> Group:
        """The finished group.

        Raises `RoundOverError` once `abandon` was called or where the peers could not be reached.
        """
        self._connections.start()
        threading.Thread(target=self._construct, name=name, daemon=True).start()
        try:
            outcome = self._outcome.get(timeout=CONNECT_TIMEOUT_S + 1)
        except Empty:
            outcome = RoundOverError(f"no group within {CONNECT_TIMEOUT_S:.0f} s")
        if isinstance(outcome, Group):
            return outcome
        self._connections.finish()  # what was half built must not keep the others waiting
        self._connections.hang_up()
        self._connections.stop_hearing()
        self._connections.close()
        raise RoundOverError(str(outcome).splitlines()[0]) from outcome

    def abandon(self, reason: str) -> None:
        """Let `build` raise now; any thread may call it."""
        self._outcome.put(RoundOverError(reason))

    def _construct(self) -> None:
        try:
            backend = make_gloo(self._store, self._rank, self._size, self._device)
        except Exception as error:  # carried over to the thread that waits
            self._outcome.put(error)
            return
        self._connections.finish()
        self._outcome.put(Group(backend, self._connections))


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


def install(group: Group, store: Store, rank: int, size: int, subgroup: Creator) -> None:
    """Make `group` torch's default process group; `subgroup` makes those of `new_group()`."""
    _register()
    _Handover.ready, _Handover.subgroup = group.backend, subgroup
    excepthook = sys.excepthook
    try:
        dist.init_process_group(
            backend=BACKEND,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
    finally:
        _Handover.ready = None
        # Torch's puts `[rank0]:` before each line of a traceback, and in the next round another.
        sys.excepthook = excepthook


def uninstall() -> None:
    """Take down torch's process groups, healthy or broken; never waits for a peer."""
    _Handover.subgroup = None  # it holds the group
    if dist.is_initialized():
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
