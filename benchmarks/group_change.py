"""Time to leave a process group and build the next, with 2 … 16 local ranks, and 1,000 times.

Each rank tears down the group it is in and builds another over the rendezvous, as `worker.world`
does at a change of the world, up to its first all-reduce. The peer is torch's own way in the same
processes, in turns: `destroy_process_group` and `init_process_group` over a TCPStore. Both use the
loopback interface and gloo's newer way to exchange addresses. Afterwards two ranks
change groups 1,000 times in one process, and the memory, threads and descriptors left are counted.

    python -m benchmarks.group_change [--ranks 2,4,8,16] [--turns 4] [--changes 8] [--many 1000]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import psutil
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from benchmarks.common import OURS, Figure, gather, report
from elastic_driver import contract
from elastic_driver.worker.heartbeat.training_progress import TrainingProgress
from elastic_driver.worker.world import groups
from elastic_driver.worker.world.groups import RoundGroup
from elastic_driver.worker.world.member import RoundNotices
from rendezvous.auth import make_token
from rendezvous.client import RendezvousClient
from rendezvous.server import RendezvousServer
from rendezvous.torch_store import HTTPStore

TORCH = "torch, TCPStore"
CONTEXT = multiprocessing.get_context("fork")
TIMEOUT = timedelta(seconds=120)
INTERFACE = "lo"  # of both ways
SETTINGS = {"GLOO_SOCKET_IFNAME": INTERFACE, "GLOO_ENABLE_STORE_V2_API": "1"}
WARM_UP = 5  # changes before the first count: some things are made at first use
Place: TypeAlias = tuple[int, str, int]  # port of our rendezvous, its token, TCPStore's port


class Ours:
    """Groups over our rendezvous, one after the other."""

    def __init__(self, place: Place, rank: int, size: int) -> None:
        port, token, _ = place
        self._client = RendezvousClient(f"http://127.0.0.1:{port}", token)
        self._port, self._rank, self._size = port, rank, size
        self._group: RoundGroup | None = None
        self._parting: list[RoundGroup] = []

    def enter(self, number: int) -> None:
        store = HTTPStore(self._client, contract.round_prefix(number))
        device = ProcessGroupGloo.create_device(interface=INTERFACE)

        run = partial(
            RoundNotices(TrainingProgress()).run_attempt, number, groups.CONNECT_TIMEOUT_S
        )
        self._group = groups.build(
            run, store, self._rank, self._size, device=device, port=self._port, vote=None
        )
        self._group.install(groups.make_gloo)
        for group in self._parting:
            group.end()
        self._parting.clear()

    def leave(self) -> None:
        group, self._group = self._group, None
        assert group is not None
        group.take_down()
        self._parting.append(group)

    def close(self) -> None:
        for group in self._parting:
            group.end()
        self._client.close()


class Torchs:
    """Torch's own groups over a TCPStore."""

    def __init__(self, place: Place, rank: int, size: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", place[2], is_master=False, timeout=TIMEOUT)
        self._rank, self._size = rank, size

    def enter(self, number: int) -> None:
        store = dist.PrefixStore(f"round{number}", self._store)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._size)

    def leave(self) -> None:
        dist.destroy_process_group()

    def close(self) -> None:
        """Do nothing: torch has closed its group."""


def change_often(
    make: Callable[[Place, int, int], Ours | Torchs],
    place: Place,
    rank: int,
    size: int,
    rounds: range,
) -> list[float]:
    """Return the seconds of each change, from before leaving to after the first all-reduce."""
    ways = make(place, rank, size)
    took = []
    one = torch.ones(1)
    ways.enter(rounds[0])
    dist.all_reduce(one)
    for number in rounds[1:]:
        started = time.perf_counter()
        ways.leave()
        ways.enter(number)
        dist.all_reduce(one)
        took.append(time.perf_counter() - started)
    ways.leave()
    ways.close()
    return took


# ---- processes ---------------------------------------------------------------------------


def compare(pipe: Connection, rank: int, size: int, changes: int, turns: int) -> None:
    """Make torch's changes and ours in turns, as one rank; each turn is one sample of a figure."""
    torch.set_num_threads(1)
    os.environ.update(SETTINGS)
    place = pipe.recv()
    samples = []
    for turn in range(turns):
        rounds = range(1 + turn * 1000, 1 + turn * 1000 + changes)
        for name, make in ((TORCH, Torchs), (OURS, Ours)):
            took = change_often(make, place, rank, size, rounds)
            samples += [(name, turn, seconds) for seconds in took]
    pipe.send(samples)
    pipe.recv()  # the others may still need our sockets


def usage() -> dict[str, float]:
    """Return MiB resident, threads and open descriptors of this process."""
    gc.collect()
    me = psutil.Process()
    return {
        "memory": me.memory_info().rss / 2**20,
        "threads": me.num_threads(),
        "descriptors": me.num_fds(),
    }


def change_very_often(pipe: Connection, rank: int, size: int, changes: int) -> None:
    """Make many changes as one rank; report memory, threads and descriptors around them."""
    torch.set_num_threads(1)
    os.environ.update(SETTINGS)
    place = pipe.recv()
    change_often(Ours, place, rank, size, range(1, WARM_UP + 1))
    before = usage()
    change_often(Ours, place, rank, size, range(10, 10 + changes))
    pipe.send((before, usage(), threading.active_count()))
    pipe.recv()


def in_ranks(work: Callable[..., None], size: int, *numbers: int) -> list[Any]:
    """Run `work` in so many forked processes; return what each sent back."""
    pipes, processes = [], []
    for rank in range(size):  # before any thread is started here
        ours, theirs = CONTEXT.Pipe()
        processes.append(CONTEXT.Process(target=work, args=(theirs, rank, size, *numbers)))
        processes[-1].start()
        pipes.append(ours)
    token = make_token()
    try:
        with RendezvousServer("127.0.0.1", 0, token=token) as server:
            torchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for pipe in pipes:
                pipe.send((server.port, token, torchs.port))
            found = [pipe.recv() if pipe.poll(300) else None for pipe in pipes]
            for pipe in pipes:
                with contextlib.suppress(OSError):
                    pipe.send("end")
            for process in processes:
                process.join(20)
            return found
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join(5)


def alone(work: Callable[..., None], size: int, *numbers: int) -> list[Any]:
    """Call `in_ranks` in its own process: each measurement then forks a parent without threads."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=lambda: theirs.send(in_ranks(work, size, *numbers)))
    process.start()
    found = ours.recv()
    process.join(30)
    return list(found)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = [2, 4, 8, 16]
    parser.add_argument("--ranks", type=lambda t: [int(w) for w in t.split(",")], default=sizes)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--changes", type=int, default=8, help="of each way in a turn")
    parser.add_argument("--many", type=int, default=1000)
    options = parser.parse_args()
    samples = []
    for size in options.ranks:
        figure = f"leave, build, all-reduce: {size} ranks"
        found = alone(compare, size, options.changes, options.turns)[0]
        samples += [(name, figure, turn, seconds) for name, turn, seconds in found]
    figures = gather(samples)
    if options.many:
        before, after, _ = alone(change_very_often, 2, options.many)[0]
        for what, unit in (("memory", "MiB"), ("threads", ""), ("descriptors", "")):
            name = f"{what} left by {options.many} changes"
            note = f"{before[what]:.0f} before, {after[what]:.0f} after"
            figures.append(Figure(OURS, name, unit, (after[what] - before[what],), note))
    report("group_change", figures)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
