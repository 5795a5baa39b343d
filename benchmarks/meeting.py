"""Members meet at a driver: time until all know their ranks and peers, and the cost of idle ones.

A whole driver (mailbox, core, rendezvous, event log) runs in a process of its own; members are
clients, a thread or more each, in two more processes (one process each would measure the machine).
Ours are the connections of real workers, with their heartbeats, which report READY and wait for the
world, in turns over TLS and, with --insecure, over plain HTTP. One peer is torch's TCPStore, where
as many of its C++ clients set their record and read everybody's; the other is torchrun's
rendezvous. All of them are connected before the clock starts.
Then 1,000 workers and the agents of their 125 hosts send heartbeats, while the workers are idle and
while they train, and the driver's processor time and memory are measured. Last, very many simulated
members meet, and the driver's cost for each is compared between their numbers.

TCPStore looks up the names of its clients as they connect, which takes minutes where no name server
answers. Connecting is not part of the figure; --peers-most bounds the time it takes.

    python -m benchmarks.meeting [--members 8,64,256,1024] [--simulated 1000,10000]
        [--idle 1000] [--turns 5]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil
import torch.distributed as dist

from benchmarks.common import OURS, Figure, gather, report
from benchmarks.peers.clients import Place, host_workers
from benchmarks.peers.clients import host_agents as host_agent_clients
from benchmarks.peers.driver import SLOTS
from benchmarks.peers.members import connected
from benchmarks.peers.torchrun_agents import host_agents
from benchmarks.systems import cpu_of
from rendezvous.auth import read_token_file

PROCESSES = 2  # that members are spread over; more than cores would only measure the machine
HEARTBEAT_S = 30.0
SETTLE_S, WATCH_S = 3.0, 20.0
CONTEXT = multiprocessing.get_context("fork")
IN_PLAIN = "ours, --insecure"
MEET = "n members know ranks and peers"


@contextlib.contextmanager
def driver_for(members: int, *, insecure: bool = False) -> Iterator[tuple[int, Place]]:
    """Run a driver that expects so many workers; gives its process's number and its place."""
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as folder:
        argv = [sys.executable, "-m", "benchmarks.peers.driver", str(members), folder]
        argv += ["--insecure"] if insecure else []
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            found = json.loads(process.stdout.readline())
            yield process.pid, Place(found["endpoint"], found["token_file"], HEARTBEAT_S)
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)
            process.stdout.close()


def names(members: int) -> list[str]:
    """Return the workers that the driver expects."""
    return [f"h{i // SLOTS}.{i % SLOTS}.1" for i in range(members)]


# ---- our members, in processes of their own ----------------------------------------------


def host_simulated(pipe: Connection, mine: list[str], place: Place) -> None:
    """Connect simulated members, meet when told to, and report when that was done."""

    async def live() -> None:
        port = int(urlsplit(place.url).port or 0)
        members = await connected(mine, port, read_token_file(place.token_file))
        pipe.send("connected")
        await asyncio.to_thread(pipe.recv)
        sizes = await asyncio.gather(*(member.meet() for member in members))
        pipe.send((time.time(), min(sizes)))
        await asyncio.to_thread(pipe.recv)

    asyncio.run(live())


class Met(NamedTuple):
    """The result of one meeting of all members."""

    took: float  # seconds from the start signal to the last one
    spent: float  # seconds of the driver's processor meanwhile
    driver: psutil.Process
    pipes: list[Connection]  # to the processes that hold the members
    place: Place


@contextlib.contextmanager
def processes(
    host: Callable[..., None], shares: list[list[str]], place: Place
) -> Iterator[list[Connection]]:
    """Run `host(pipe, share, place)` in a process for each share, and end them all; gives pipes."""
    pipes, started = [], []
    try:
        for share in shares:
            ours, theirs = CONTEXT.Pipe()
            started.append(CONTEXT.Process(target=host, args=(theirs, share, place), daemon=True))
            started[-1].start()
            pipes.append(ours)
        yield pipes
    finally:
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send("end")
                pipe.send("end")
        for process in started:
            process.join(20)
            if process.is_alive():
                process.kill()


@contextlib.contextmanager
def meeting(
    members: int, host: Callable[..., None] = host_workers, *, insecure: bool = False
) -> Iterator[Met]:
    """Have so many members meet, in processes that run `host`; gives the result."""
    everybody, count = names(members), min(PROCESSES, members)
    shares = [everybody[index::count] for index in range(count)]
    with (
        driver_for(members, insecure=insecure) as (pid, place),
        processes(host, shares, place) as pipes,
    ):
        for pipe in pipes:
            pipe.recv()
        driver = psutil.Process(pid)
        before, began = cpu_of(driver), time.time()
        for pipe in pipes:
            pipe.send("go")
        answers = [pipe.recv() for pipe in pipes]
        assert {size for _, size in answers} == {members}
        spent = cpu_of(driver) - before
        yield Met(max(at for at, _ in answers) - began, spent, driver, pipes, place)


# ---- the peers ---------------------------------------------------------------------------


def host_tcp_clients(pipe: Connection, ranks: list[int], size: int, port: int) -> None:
    """Run TCPStore clients, a thread each: each sets its record and reads everybody's."""
    keys = [f"member/{rank}" for rank in range(size)]
    pipe.recv()
    stores = [
        dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
        for _ in ranks
    ]
    gate = threading.Event()

    def meet(store: Any, rank: int) -> None:
        gate.wait()
        store.set(f"member/{rank}", json.dumps([f"h{rank // SLOTS}", rank % SLOTS, 1, -1, True]))
        store.wait(keys, timedelta(seconds=300))
        assert len(store.multi_get(keys)) == size

    threads = [threading.Thread(target=meet, args=pair) for pair in zip(stores, ranks, strict=True)]
    for thread in threads:
        thread.start()
    pipe.send("connected")
    pipe.recv()
    gate.set()
    for thread in threads:
        thread.join()
    pipe.send(time.time())


def meet_at_tcp_store(
    members: int, host: Callable[[Connection, list[int], int, int], None] = host_tcp_clients
) -> float:
    """Return the seconds in which so many TCPStore clients gather all records, or `host` meets."""
    count = min(PROCESSES, members)
    pipes, processes = [], []
    port_pipe, server_end = CONTEXT.Pipe()
    server = CONTEXT.Process(target=_serve_tcp_store, args=(server_end,), daemon=True)
    server.start()
    port = port_pipe.recv()
    for index in range(count):
        ours, theirs = CONTEXT.Pipe()
        arguments = (theirs, list(range(members))[index::count], members, port)
        processes.append(CONTEXT.Process(target=host, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(ours)
    try:
        for pipe in pipes:  # one after the other: many connections at once take minutes
            pipe.send("connect")
            pipe.recv()
        began = time.time()
        for pipe in pipes:
            pipe.send("go")
        return float(max(pipe.recv() for pipe in pipes) - began)
    finally:
        for process in [*processes, server]:
            process.terminate()
            process.join(10)


def _serve_tcp_store(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    with contextlib.suppress(EOFError):
        pipe.recv()


# ---- the figures -------------------------------------------------------------------------


def meetings(sizes: list[int], turns: int, peers_most: int, agents_most: int) -> list[Figure]:
    """Measure ours, TCPStore's and torchrun's in turns, for each size; theirs up to a limit."""
    samples = []
    for size in sizes:
        for turn in range(turns):
            with meeting(size) as met:
                samples.append((OURS, f"{MEET}, n = {size}", turn, met.took))
            with meeting(size, insecure=True) as met:
                samples.append((IN_PLAIN, f"{MEET}, n = {size}", turn, met.took))
            for name, most, host in (
                ("TCPStore", peers_most, host_tcp_clients),
                ("torchrun", agents_most, host_agents),
            ):
                if size <= most:
                    took = meet_at_tcp_store(size, host)
                    samples.append((name, f"{MEET}, n = {size}", turn, took))
    return gather(samples)


def costs_of_many(sizes: list[int], turns: int) -> list[Figure]:
    """Measure the driver's cost for each of very many simulated members, in turns.

    The last figures are the ratios to the cost for each of the fewest, within each turn.
    """
    found: dict[str, dict[int, list[float]]] = {"time": {}, "driver's processor": {}}
    memory: dict[int, float] = {}
    for _ in range(turns):
        for size in sizes:
            with meeting(size, host_simulated, insecure=True) as met:
                for what, seconds in (("time", met.took), ("driver's processor", met.spent)):
                    found[what].setdefault(size, []).append(seconds / size * 1e3)
                memory[size] = met.driver.memory_info().rss / 2**20
    figures = []
    for what, of_size in found.items():
        for size, costs in of_size.items():
            note = f"the driver then has {memory[size]:.0f} MiB"
            name = f"{what} per simulated member, n = {size}"
            figures.append(Figure(OURS, name, "ms", tuple(costs), note))
        for size in sizes[1:]:
            pairs = zip(of_size[size], of_size[sizes[0]], strict=True)
            ratios = [more / fewer for more, fewer in pairs if fewer]  # 0: under the clock's tick
            name = f"{what} per simulated member, {size} : {sizes[0]}"
            figures += [Figure(OURS, name, "x", tuple(ratios))] if ratios else []
    return figures


def cost_of_resting(members: int, trains: bool) -> list[Figure]:
    """Measure processor share and memory of a driver with workers and agents that live."""
    hosts = [f"h{i}" for i in range(-(-members // SLOTS))]
    with meeting(members) as met, processes(host_agent_clients, [hosts], met.place):
        for pipe in met.pipes:
            pipe.send(trains)
        time.sleep(SETTLE_S)
        shares = []
        for _ in range(3):
            before = cpu_of(met.driver)
            time.sleep(WATCH_S / 3)
            shares.append((cpu_of(met.driver) - before) / (WATCH_S / 3) * 100)
        memory = met.driver.memory_info().rss / 2**20
    what = f"{members} {'training' if trains else 'idle'} workers, {len(hosts)} agents"
    return [
        Figure(OURS, f"driver, {what}: of a core", "%", tuple(shares)),
        Figure(OURS, f"driver, {what}: memory", "MiB", (memory,)),
    ]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=_numbers, default=[8, 64, 256, 1024])
    parser.add_argument("--simulated", type=_numbers, default=[1000, 4000, 10000])
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--peers-most", type=int, default=64, help="clients of TCPStore")
    parser.add_argument("--agents-most", type=int, default=64, help="agents of torchrun")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    figures = meetings(options.members, options.turns, options.peers_most, options.agents_most)
    if options.idle:
        figures += cost_of_resting(options.idle, trains=False)
        figures += cost_of_resting(options.idle, trains=True)
    figures += costs_of_many(options.simulated, options.turns)
    report("meeting", figures)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
