"""Heartbeats beside one client that abuses the driver: their delay, and the driver's memory.

A whole driver runs in a process of its own. One process sends heartbeats as workers do (leases are
renewed in a batch), and another one abuses the driver through many connections, in one way after
the other, with the token of the job. Nothing that it does may delay a heartbeat much, or stay in
the driver's memory.

    python -m benchmarks.abuse [NAME …] [--seconds 10] [--connections 32] [--within MS]

With --within, the exit status is 1 if the 99th percentile of an abuse is longer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import psutil

from benchmarks.common import OURS, Figure, report
from benchmarks.meeting import driver_for, processes
from benchmarks.peers.clients import Place
from elastic_driver import contract
from rendezvous import wire
from rendezvous.auth import read_credentials, read_token_file
from rendezvous.client import RendezvousClient

BEAT_S = 0.01  # between two heartbeats
WARM = 50  # heartbeats before the abuse begins
KEYS, LARGE = 50_000, 16
PIECE = 1 << 20
_PATIENT, _MANY = ("connections", "half_sent"), 50  # these wait, and come in larger numbers
# Makes the next request of a connection, with its head.
Next = Callable[[int], bytes]


class Requests:
    """Requests with the job's token."""

    def __init__(self, token: str) -> None:
        self._token, self._ids = token, itertools.count()

    def raw(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return a request."""
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._token}\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def batch(self, *operations: wire.Operation) -> bytes:
        """Return a batch."""
        body = wire.encode(wire.KVBatch(operations, f"{os.getpid()}.{next(self._ids)}"))
        return self.raw("POST", wire.BATCH_PATH, body)


def abuses(requests: Requests) -> dict[str, Next]:
    """Return what each connection sends again and again, by name."""
    large = bytes(16 * 1024 * 1024)
    counts = [wire.Count("fill/")] * 4096
    gets = [wire.Get((f"large/{n % LARGE}",)) for n in range(1024)]
    many = tuple(f"never/{n}" for n in range(wire.MAX_KEYS))
    swap = [wire.CompareSet("large/0", b"wrong", b"")] * 100
    wrong = Requests("wrong")
    packed = gzip.compress(bytes(32 * 1024 * 1024))
    packed_head = (
        f"POST /healthz HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}"
    )
    return {
        "nothing": lambda _: b"",
        "counts": lambda _: requests.batch(*counts),
        "gets": lambda _: requests.batch(*gets),
        "appends": lambda n: requests.batch(*[wire.Append(f"longer/{n}", b"x" * 64)] * 2000),
        "compare_set": lambda _: requests.batch(*swap),
        "large_writes": lambda n: requests.raw("PUT", f"/v1/kv/big/{n}", large),
        "large_batches": lambda n: requests.batch(wire.Set(f"big/{n}", large)),
        "large_reads": lambda n: requests.batch(wire.Get((f"large/{n % LARGE}",))),
        "new_keys": lambda n: requests.batch(
            *(wire.Set(f"new/{n}/{time.time_ns()}/{k}") for k in range(4096))
        ),
        "many_waits": lambda _: requests.batch(wire.Get(many, 5.0)),
        "metrics": lambda _: requests.raw("GET", contract.METRICS_PATH),
        "status": lambda _: requests.raw("GET", contract.STATUS_PATH),
        "pipelined": lambda n: requests.batch(wire.Add(f"n/{n}", 1)) * 1000,
        "wrong_tokens": lambda _: wrong.batch(wire.Count()),
        "page": lambda _: b"GET /assets/app.js HTTP/1.1\r\nHost: x\r\n\r\n",
        "compressed": lambda _: packed_head.encode() + b"\r\n\r\n" + packed,
        "nonsense": lambda _: b"\0\r\n" * 1000 + b"\r\n\r\n",
        "half_sent": lambda _: requests.batch(*counts)[:-10],
        "connections": lambda _: b"",
    }


# ---- the two processes -------------------------------------------------------------------


def abuse(pipe: Connection, what: list[str], place: Place) -> None:
    """Abuse the driver through as many connections as asked for, until the pipe says stop."""
    name, connections, port = what[0], int(what[1]), int(urlsplit(place.url).port or 0)
    next_request = abuses(Requests(read_token_file(place.token_file)))[name]

    async def one(number: int) -> None:
        while name != "nothing":
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    while True:
                        writer.write(next_request(number))
                        await writer.drain()
                        await _take_answer(reader, name)
                finally:
                    writer.transport.abort()

    async def live() -> None:
        many = connections * (_MANY if name in _PATIENT else 1)
        tasks = [asyncio.create_task(one(number)) for number in range(many)]
        pipe.send("begun")
        await asyncio.to_thread(pipe.recv)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(live())


async def _take_answer(reader: asyncio.StreamReader, name: str) -> None:
    """Read what comes; the idle and the half-sent wait until they are cut off."""
    if name in _PATIENT:
        while await reader.read(PIECE):
            pass
        raise ConnectionResetError
    head = await reader.readuntil(b"\r\n\r\n")
    left = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    while left:
        piece = await reader.read(min(left, PIECE))
        if not piece:
            raise ConnectionResetError
        left -= len(piece)


def beat(pipe: Connection, what: list[str], place: Place) -> None:
    """Send heartbeats for so many seconds; report the seconds that each took."""
    took = []
    token, known_by = read_credentials(place.token_file)
    with RendezvousClient(place.url, token, 30.0, fingerprint=known_by) as client:
        worker = "h0.0.1"
        beats = (
            wire.Set(contract.worker_lease(worker), b"", 30.0),
            wire.Set(contract.worker_half_lease(worker), b"", 15.0),
            wire.Set(contract.worker_progress(worker), b"{}"),
        )
        for _ in range(WARM):
            client.batch(*beats)
        pipe.send("warm")
        pipe.recv()
        until = time.monotonic() + float(what[0])
        while time.monotonic() < until:
            began = time.perf_counter()
            client.batch(*beats)
            took.append(time.perf_counter() - began)
            time.sleep(BEAT_S)
    pipe.send(took)
    pipe.recv()


# ---- the figures -------------------------------------------------------------------------


def measure(name: str, seconds: float, connections: int) -> tuple[list[Figure], float]:
    """Return the figures of one abuse, and the 99th percentile of a heartbeat, in ms."""
    with driver_for(8) as (pid, place):
        driver = psutil.Process(pid)
        token, known_by = read_credentials(place.token_file)
        with RendezvousClient(place.url, token, fingerprint=known_by) as client:
            for start in range(0, KEYS, 1000):
                client.batch(*(wire.Set(f"fill/{start + n}") for n in range(1000)))
            for n in range(LARGE):
                client.set(f"large/{n}", bytes(512 * 1024 if name == "gets" else 4 * 1024 * 1024))
        before = driver.memory_info().rss / 2**20
        with processes(beat, [[str(seconds)]], place) as (heart,):
            heart.recv()
            with processes(abuse, [[name, str(connections)]], place) as (abuser,):
                abuser.recv()
                heart.send("go")
                most = before
                while not heart.poll(0.05):
                    most = max(most, driver.memory_info().rss / 2**20)
                took = sorted(heart.recv())
    worst = took[int(len(took) * 0.99)] * 1e3
    note = f"memory {before:.0f} MiB, then at most {most:.0f}; {len(took)} heartbeats"
    share = {"median": 0.5, "p99": 0.99, "worst": 1.0}
    picked = {s: took[min(len(took) - 1, int(len(took) * p))] * 1e3 for s, p in share.items()}
    figures = [
        Figure(OURS, f"heartbeat beside {name}, {label}", "ms", (value,), note)
        for label, value in picked.items()
    ]
    return figures, worst


def measured(names: list[str], seconds: float, connections: int) -> Iterator[tuple[str, float]]:
    """Measure and print every abuse; yield its name and its 99th percentile, in ms."""
    figures = []
    for name in names:
        found, worst = measure(name, seconds, connections)
        figures += found
        yield name, worst
    report("abuse", figures)


def main() -> int:
    """Measure and print the table; return 1 if a heartbeat took too long."""
    known = list(abuses(Requests("")))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--within", type=float, help="milliseconds for 99 of 100 heartbeats")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no abuse {', '.join(unknown)}; there are {', '.join(known)}")
    slow = []
    for name, worst in measured(options.names or known, options.seconds, options.connections):
        print(f"{name}: p99 {worst:.1f} ms", flush=True)
        if options.within is not None and worst > options.within:
            slow.append(name)
    if slow:
        print(f"too slow: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
