"""Members meet at a driver: time until all know their ranks and peers, and the cost of idle ones.

A whole driver (mailbox, core, rendezvous, event log) runs in a process of its own; members are
real clients, each with a connection, in two more processes (one process each would measure the
machine). They report READY and wait for the world. One peer is torch's TCPStore, where as many C++
clients set their record and read everybody's; the other is torchrun's rendezvous. Then 1,000
members send heartbeats as idle and as training workers do, while the driver's processor time and
memory are measured.

TCPStore looks up the names of its clients as they connect, which takes minutes where no name server
answers. Connecting is not part of the figure; --peers-most bounds the time it takes.

    python -m benchmarks.meeting [--members 8,64,256,1024] [--simulated 1000,10000] [--idle 1000]
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

from benchmarks.common import Figure, report
from benchmarks.peers.driver import SLOTS
from benchmarks.peers.members import connected
from benchmarks.peers.torchrun_agents import host_agents
from rendezvous.auth import read_token_file

PROCESSES = 2  # that members are spread over; more than cores would only measure the machine
HEARTBEAT_S = 30.0
SETTLE_S, WATCH_S = 3.0, 20.0
CONTEXT = multiprocessing.get_context("fork")
MEET = "n members know ranks and peers"


@contextlib.contextmanager
def driver_for(members: int) -> Iterator[tuple[int, int, str]]:
    """Run a driver that expects so many workers; gives (pid, port, token)."""
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as folder:
        argv = [sys.executable, "-m", "benchmarks.peers.driver", str(members), folder]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            place = json.loads(process.stdout.readline())
            port = urlsplit(place["endpoint"]).port
            yield process.pid, int(port or 0), read_token_file(place["token_file"])
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


def host_members(pipe: Connection, mine: list[str], port: int, token: str, rests: bool) -> None:
    """Connect, meet when told to, report when that was done; then idle until told to end."""

    async def live() -> None:
        members = await connected(mine, port, token)
        pipe.send("connected")
        await asyncio.to_thread(pipe.recv)
        sizes = await asyncio.gather(*(member.meet() for member in members))
        pipe.send((time.time(), min(sizes)))
        if rests:
            trains = await asyncio.to_thread(pipe.recv)
            resting = [asyncio.create_task(m.rest(HEARTBEAT_S, trains)) for m in members]
            await asyncio.to_thread(pipe.recv)
            for task in resting:
                task.cancel()
            await asyncio.gather(*resting, return_exceptions=True)

    asyncio.run(live())


class Met(NamedTuple):
    """The result of one meeting of all members."""

    took: float  # seconds from the start signal to the last one
    spent: float  # seconds of the driver's processor meanwhile
    driver: psutil.Process
    pipes: list[Connection]  # to the processes that hold the members


@contextlib.contextmanager
def meeting(members: int, rests: bool) -> Iterator[Met]:
    """Have so many members meet; gives the result."""
    with driver_for(members) as (pid, port, token):
        pipes, processes = [], []
        everybody = names(members)
        count = min(PROCESSES, members)
        for index in range(count):
            ours, theirs = CONTEXT.Pipe()
            arguments = (theirs, everybody[index::count], port, token, rests)
            process = CONTEXT.Process(target=host_members, args=arguments, daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        driver = psutil.Process(pid)
        before, began = _processor_time(driver), time.time()
        for pipe in pipes:
            pipe.send("go")
        answers = [pipe.recv() for pipe in pipes]
        assert {size for _, size in answers} == {members}
        spent = _processor_time(driver) - before
        try:
            yield Met(max(at for at, _ in answers) - began, spent, driver, pipes)
        finally:
            for pipe in pipes:
                with contextlib.suppress(OSError):
                    pipe.send("end")
            for process in processes:
                process.join(20)
                if process.is_alive():
                    process.kill()


def _processor_time(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


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
        return max(pipe.recv() for pipe in pipes) - began
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


def meetings(sizes: list[int], repeats: int, peers_most: int, agents_most: int) -> list[Figure]:
    """Measure ours, TCPStore's and torchrun's in turn, for each size; theirs up to a limit."""
    figures = []
    for size in sizes:
        ours, theirs, agents = [], [], []
        for _ in range(repeats):
            with meeting(size, rests=False) as met:
                ours.append(met.took)
            if size <= peers_most:
                theirs.append(meet_at_tcp_store(size))
            if size <= agents_most:
                agents.append(meet_at_tcp_store(size, host_agents))
        figure = f"{MEET}, n = {size}"
        figures += [
            Figure("TCPStore", figure, "s", tuple(theirs), "" if theirs else "--peers-most N"),
            Figure("torchrun", figure, "s", tuple(agents), "" if agents else "--agents-most N"),
            Figure("elasticrun", figure, "s", tuple(ours)),
        ]
    return figures


def costs_of_many(sizes: list[int], repeats: int) -> list[Figure]:
    """Measure the driver's processor time for each member, for very many members."""
    figures = []
    for size in sizes:
        took, spent, memory = [], [], 0.0
        for _ in range(repeats):
            with meeting(size, rests=False) as met:
                took.append(met.took / size * 1e3)
                spent.append(met.spent / size * 1e3)
                memory = met.driver.memory_info().rss / 2**20
        of, note = f"per member, n = {size}", f"the driver then has {memory:.0f} MiB"
        figures += [
            Figure("elasticrun", f"time {of}", "ms", tuple(took), note),
            Figure("elasticrun", f"driver's processor {of}", "ms", tuple(spent)),
        ]
    return figures


def cost_of_resting(members: int, trains: bool) -> list[Figure]:
    """Measure processor share and memory of a driver whose workers only send heartbeats."""
    with meeting(members, rests=True) as met:
        for pipe in met.pipes:
            pipe.send(trains)
        time.sleep(SETTLE_S)
        shares = []
        for _ in range(3):
            before = _processor_time(met.driver)
            time.sleep(WATCH_S / 3)
            shares.append((_processor_time(met.driver) - before) / (WATCH_S / 3) * 100)
        memory = met.driver.memory_info().rss / 2**20
    what = f"{members} {'training' if trains else 'idle'} workers"
    return [
        Figure("elasticrun", f"driver, {what}: of a core", "%", tuple(shares)),
        Figure("elasticrun", f"driver, {what}: memory", "MiB", (memory,)),
    ]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=_numbers, default=[8, 64, 256, 1024])
    parser.add_argument("--simulated", type=_numbers, default=[1000, 4000, 10000])
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers-most", type=int, default=64, help="clients of TCPStore")
    parser.add_argument("--agents-most", type=int, default=64, help="agents of torchrun")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    figures = meetings(options.members, options.repeats, options.peers_most, options.agents_most)
    if options.idle:
        figures += cost_of_resting(options.idle, trains=False)
        figures += cost_of_resting(options.idle, trains=True)
    figures += costs_of_many(options.simulated, options.repeats)
    report("meeting", figures, baseline="TCPStore")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
