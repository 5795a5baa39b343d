"""How long this process's data was under way to each peer, as the kernel has counted it.

In an exchange all ranks wait for the slowest link, so its duration names nobody. But Linux counts
for each TCP connection how long it had data that was not acknowledged (`tcpi_busy_time`), and how
much of that the receiver was to blame for because it did not read (`tcpi_rwnd_limited`). What is
left is the network's own time, measured without a message of ours. Read by the heartbeat thread,
a few microseconds a connection; connections within a host, and transports other than TCP, are not
seen.

Layout: `struct tcp_info` in linux/tcp.h, which only ever grows at its end. Times are seconds.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable

from elastic_driver.core.documents import MAX_LINKS, Links, LinkUse

_BYTES_ACKED, _BUSY_AND_LIMITED, _SIZE = 120, 168, 184
_MICROSECOND = 1e-6


def read_links(connections: Iterable[socket.socket]) -> Links | None:
    """The totals so far by the peer's address; None where nothing is known.

    Where there are more than a message holds, those that have carried most.
    """
    own = ""
    totals: dict[str, tuple[float, int]] = {}
    for connection in connections:
        try:
            address, peer = connection.getsockname()[0], connection.getpeername()[0]
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
        except OSError:  # closed meanwhile
            continue
        if address == peer or len(info) < _SIZE:  # of one host, or an old kernel
            continue
        own = address
        (acked,) = struct.unpack_from("=Q", info, _BYTES_ACKED)
        busy, limited = struct.unpack_from("=QQ", info, _BUSY_AND_LIMITED)
        seconds, carried = totals.get(peer, (0.0, 0))
        under_way = max(busy - limited, 0) * _MICROSECOND
        totals[peer] = seconds + under_way, carried + acked
    if not totals:
        return None
    uses = [
        LinkUse(peer, round(seconds, 6), carried) for peer, (seconds, carried) in totals.items()
    ]
    uses.sort(key=lambda use: -use.carried)
    return Links(own, tuple(uses[:MAX_LINKS]))
