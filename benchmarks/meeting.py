"""Members meet at a driver: time until all know their ranks and peers; and what idle ones cost.

A whole driver (mailbox, core, rendezvous, event log) runs in a process of its own; members are
real clients in a few more, each with a connection, saying READY and waiting for the world. The peer
is torch's TCPStore, where as many C++ clients set their record and read everybody's. Then 1,000
members rest, beating as idle workers do, while the driver's processor time and memory are taken.

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
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch.distributed as dist

from benchmarks.common import Figure, report
from benchmarks.peers.driver import SLOTS
from benchmarks.peers.members import connected
from rendezvous.auth import read_token_file

PROCESSES = 2  # that members are spread over; more than cores would only measure the machine
HEARTBEAT_S = 30.0
SETTLE_S, WATCH_S = 3.0, 20.0
CONTEXT = multiprocessing.get_context("fork")
MEET = "n members know ranks and peers"


@contextlib.contextmanager
def driver_for(members: int) -> Iterator[tuple[int, int, str]]:
    """A driver that expects so many workers: (pid, port, token)."""
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
    """The workers the driver expects."""
    return [f"h{i // SLOTS}.{i % SLOTS}.1" for i in range(members)]


# ---- our members, in processes of their own ----------------------------------------------


def host_members(pipe: Connection, mine: list[str], port: int, token: str, rests: bool) -> None:
    """Connect, say so, meet at the word, say when that was done; then rest until told to end."""

    async def live() -> None:
        members = await connected(mine, port, token)
        pipe.send("connected")
        await asyncio.to_thread(pipe.recv)
        sizes = await asyncio.gather(*(member.meet() for member in members))
        pipe.send((time.time(), min(sizes), time.process_time()))
        if rests:
            resting = [asyncio.create_task(m.rest(HEARTBEAT_S)) for m in members]
            await asyncio.to_thread(pipe.recv)
            for task in resting:
                task.cancel()
            await asyncio.gather(*resting, return_exceptions=True)

    asyncio.run(live())


@contextlib.contextmanager
def meeting(members: int, rests: bool) -> Iterator[tuple[float, int]]:
    """All members have met: (seconds from the word to the last one, the driver's pid)."""
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
        began = time.time()
        for pipe in pipes:
            pipe.send("go")
        answers = [pipe.recv() for pipe in pipes]
        assert {size for _, size, _ in answers} == {members}
        try:
            yield max(at for at, _, _ in answers) - began, pid
        finally:
            for pipe in pipes:
                with contextlib.suppress(OSError):
                    pipe.send("end")
            for process in processes:
                process.join(20)
                if process.is_alive():
                    process.kill()


# ---- the peer ----------------------------------------------------------------------------


def host_tcp_clients(pipe: Connection, ranks: list[int], size: int, port: int) -> None:
    """As many TCPStore clients, a thread each: set a record, read everybody's."""
    record = b"x" * 240  # as long as a member's entry in our World document
    keys = [f"member/{rank}" for rank in range(size)]
    pipe.recv()
    stores = [
        dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
        for _ in ranks
    ]
    gate = threading.Event()

    def meet(store: Any, rank: int) -> None:
        gate.wait()
        store.set(f"member/{rank}", record)
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


def meet_at_tcp_store(members: int) -> float:
    """Seconds for so many TCPStore clients to gather everybody's record."""
    count = min(PROCESSES, members)
    pipes, processes = [], []
    port_pipe, server_end = CONTEXT.Pipe()
    server = CONTEXT.Process(target=_serve_tcp_store, args=(server_end,), daemon=True)
    server.start()
    port = port_pipe.recv()
    for index in range(count):
        ours, theirs = CONTEXT.Pipe()
        arguments = (theirs, list(range(members))[index::count], members, port)
        processes.append(CONTEXT.Process(target=host_tcp_clients, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(ours)
    try:
        for pipe in pipes:  # one after the other: many connections at once take it minutes
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


def meetings(sizes: list[int], repeats: int, most_clients: int) -> list[Figure]:
    """Ours and TCPStore's in turn, for each size; TCPStore's up to so many clients."""
    figures = []
    for size in sizes:
        ours, theirs = [], []
        for _ in range(repeats):
            with meeting(size, rests=False) as (took, _pid):
                ours.append(took)
            if size <= most_clients:
                theirs.append(meet_at_tcp_store(size))
        figure = f"{MEET}, n = {size}"
        note = "" if theirs else "connecting so many clients took it minutes: --tcp-store-most N"
        figures += [
            Figure("TCPStore", figure, "s", tuple(theirs), note),
            Figure("elasticrun", figure, "s", tuple(ours)),
        ]
    return figures


def costs_of_many(sizes: list[int]) -> list[Figure]:
    """The driver's processor time for each member, for very many."""
    figures = []
    for size in sizes:
        with meeting(size, rests=False) as (took, pid):
            spent = sum(psutil.Process(pid).cpu_times()[:2])
        note = f"all met after {took:.1f} s, driver's whole processor time {spent:.1f} s"
        each = (took / size * 1e3,)
        figures.append(Figure("elasticrun", f"time per member, n = {size}", "ms", each, note))
    return figures


def cost_of_idling(members: int) -> list[Figure]:
    """Processor share and memory of a driver whose workers only beat."""
    with meeting(members, rests=True) as (_took, pid):
        driver = psutil.Process(pid)
        time.sleep(SETTLE_S)
        shares = []
        for _ in range(3):
            before = sum(driver.cpu_times()[:2])
            time.sleep(WATCH_S / 3)
            shares.append((sum(driver.cpu_times()[:2]) - before) / (WATCH_S / 3) * 100)
        memory = driver.memory_info().rss / 2**20
    what = f"{members} idle workers"
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
    parser.add_argument("--simulated", type=_numbers, default=[1000, 10000])
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tcp-store-most", type=int, default=64, help="clients of the peer")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    figures = meetings(options.members, options.repeats, options.tcp_store_most)
    if options.idle:
        figures += cost_of_idling(options.idle)
    report("meeting", figures + costs_of_many(options.simulated), baseline="TCPStore")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
