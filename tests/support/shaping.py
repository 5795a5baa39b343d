"""Bad links for the nodes of a cluster: narrow ones, and such that lose or delay what is sent.

A token bucket filter (tc) makes a link narrow. The kernels of small virtual machines often have no
netem, so loss and delay are made here: a process carries frames between two taps, each so much
later, or not at all (`python -m tests.support.shaping NEAR FAR SECONDS LOST JITTER`).
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

from tests.support.cluster import Node
from tests.support.job import eventually

_TUNSETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000
_FRAME = 65536


@contextlib.contextmanager
def narrow(node: Node, rate: str) -> Iterator[None]:
    """No more than `rate` (as tc has it: `50mbit`) gets through, either way."""
    node.slow_link(rate)
    try:
        yield
    finally:
        node.fast_link()


def losing(node: Node, percent: float) -> AbstractContextManager[None]:
    """Of the packets to and from the node, this part is lost: on the wire, so that nobody is told.

    (A filter in the node's own kernel would tell its TCP, which then sends again at once.)
    """
    return _wire(node, 0.0, percent / 100)


def late(node: Node, seconds: float) -> AbstractContextManager[None]:
    """What is sent to and from the node arrives so much later."""
    return _wire(node, seconds, 0.0)


def rough(node: Node, seconds: float, percent: float) -> AbstractContextManager[None]:
    """Packets to and from the node take up to so much longer, each its own time, or are lost."""
    return _wire(node, seconds, percent / 100, jitter=True)


@contextlib.contextmanager
def _wire(node: Node, seconds: float, lost: float, *, jitter: bool = False) -> Iterator[None]:
    """The switch, a tap, the process, another tap, a bridge with nobody else on it, the port."""
    _, switch, port = node.cable()
    near, far, bridge = f"{port}n", f"{port}f", f"{port}b"

    def link(*words: str) -> None:
        subprocess.run(["ip", "-n", switch, "link", *words], check=True)

    def up() -> bool:
        show = ["ip", "-n", switch, "link", "show", far]
        return subprocess.run(show, capture_output=True, check=False).returncode == 0

    argv = [sys.executable, "-m", "tests.support.shaping", near, far]
    argv += [f"{seconds:g}", f"{lost:g}", str(int(jitter))]
    wire = subprocess.Popen(["nsenter", f"--net=/run/netns/{switch}", *argv])
    try:
        eventually(up, within=10, what="the wire is laid")
        link("add", bridge, "type", "bridge", "forward_delay", "0")
        link("set", far, "master", bridge, "up")
        link("set", bridge, "up")
        link("set", near, "master", "br0", "up")
        link("set", port, "master", bridge)
        yield
    finally:
        wire.kill()
        wire.wait()  # its taps go when it is gone
        link("set", port, "master", "br0")
        link("del", bridge)


def carry(near: int, far: int, seconds: float, lost: float, jitter: float) -> None:
    """Pass on what comes from either tap to the other, so much later and some of it never.

    With `jitter` (1), each frame is later by its own part of that time.
    """
    other = {near: far, far: near}
    waiting: list[tuple[float, int, int, bytes]] = []  # when due, number, to whom, frame
    number = 0
    while True:
        timeout = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        for tap in select.select([near, far], [], [], timeout)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame = os.read(tap, _FRAME)
                    if random.random() < lost:
                        continue
                    number += 1
                    due = time.monotonic() + seconds * (random.random() if jitter else 1.0)
                    heapq.heappush(waiting, (due, number, other[tap], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # the link is down: lost, as on a wire
                os.write(to, frame)


def _tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", name.encode(), _TAP | _NO_HEADER))
    return tap


if __name__ == "__main__":
    carry(_tap(sys.argv[1]), _tap(sys.argv[2]), *map(float, sys.argv[3:]))
