"""Bad links for the nodes of a cluster: narrow ones, and such that lose or delay what is sent.

A token bucket filter (tc) makes a link narrow, iptables lets it lose packets. The kernels of small
virtual machines often have no netem, so delay is made here: a process carries frames between two
taps, each frame so much later, in order (`python -m tests.support.shaping NEAR FAR SECONDS`).
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

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


@contextlib.contextmanager
def losing(node: Node, percent: float) -> Iterator[None]:
    """Of the packets to and from the node, this part is lost."""
    netns, _, _ = node.cable()
    chance = ("-m", "statistic", "--mode", "random", "--probability", f"{percent / 100:.6f}")
    rules = [("INPUT", "-i", "eth0", *chance), ("OUTPUT", "-o", "eth0", *chance)]
    filters = ["ip", "netns", "exec", netns, "iptables", "-w"]
    for rule in rules:
        subprocess.run([*filters, "-A", *rule, "-j", "DROP"], check=True)
    try:
        yield
    finally:
        for rule in rules:
            subprocess.run([*filters, "-D", *rule, "-j", "DROP"], check=True)


@contextlib.contextmanager
def late(node: Node, seconds: float) -> Iterator[None]:
    """What is sent to and from the node arrives so much later.

    The switch, a tap, the process, another tap, a bridge with nobody else on it, the node's port.
    """
    _, switch, port = node.cable()
    near, far, bridge = f"{port}n", f"{port}f", f"{port}b"

    def link(*words: str) -> None:
        subprocess.run(["ip", "-n", switch, "link", *words], check=True)

    def up() -> bool:
        show = ["ip", "-n", switch, "link", "show", far]
        return subprocess.run(show, capture_output=True, check=False).returncode == 0

    argv = [sys.executable, "-m", "tests.support.shaping", near, far, f"{seconds:g}"]
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


def carry(near: int, far: int, seconds: float) -> None:
    """Pass on what comes from either tap to the other, for ever."""
    other = {near: far, far: near}
    waiting: list[tuple[float, int, int, bytes]] = []  # when due, number, to whom, frame
    number = 0
    while True:
        timeout = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        for tap in select.select([near, far], [], [], timeout)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame = os.read(tap, _FRAME)
                    number += 1
                    due = time.monotonic() + seconds
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
    carry(_tap(sys.argv[1]), _tap(sys.argv[2]), float(sys.argv[3]))
