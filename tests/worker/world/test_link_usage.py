"""What the kernel knows of connections to other addresses."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from elastic_driver.worker.world.gloo import link_usage
from tests.support.job import eventually


@contextlib.contextmanager
def connected(from_address: str, to_address: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server((to_address, 0)) as server:
        port = server.getsockname()[1]
        near = socket.create_connection((to_address, port), 5, source_address=(from_address, 0))
        far, _ = server.accept()
        with near, far:
            yield near, far


def test_bytes_and_time_under_way_are_told_by_the_peers_address() -> None:
    with (
        connected("127.0.0.1", "127.0.0.2") as (one, far_one),
        connected("127.0.0.1", "127.0.0.2") as (two, far_two),
        connected("127.0.0.1", "127.0.0.3") as (other, _),
    ):
        for near, far in ((one, far_one), (two, far_two)):
            near.sendall(b"x" * 5000)
            assert len(far.recv(5000, socket.MSG_WAITALL)) == 5000
        ours = (other, two, one)

        def all_arrived() -> bool:
            links = link_usage(list(ours))
            return links is not None and links.uses[0].carried >= 10_000

        eventually(all_arrived, within=5.0, what="all is acknowledged")
        links = link_usage(list(ours))
        assert links is not None
        assert links.address == "127.0.0.1"
        busy, idle = links.uses
        assert (busy.peer, idle.peer) == ("127.0.0.2", "127.0.0.3")
        assert 10_000 <= busy.carried < 10_010
        assert idle.carried < 10
        assert 0 <= busy.seconds < 5, "counted in the kernel's ticks of some milliseconds"


def test_waiting_for_a_receiver_that_does_not_read_is_not_the_networks_time() -> None:
    with connected("127.0.0.1", "127.0.0.2") as (near, far):
        near.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                near.send(b"x" * 65536)

        def limited() -> bool:
            return near.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 184)[176:184] > bytes(8)

        eventually(limited, within=10.0, what="the receiver's window is shut")
        links = link_usage([near])
        assert links is not None
        before = links.uses[0].seconds
        far.settimeout(5)
        assert far.recv(1)
        after = link_usage([near])
        assert after is not None
        assert after.uses[0].seconds - before < 1.0


def test_connections_within_a_host_and_closed_ones_are_not_told() -> None:
    with connected("127.0.0.1", "127.0.0.1") as (near, _):
        assert link_usage([near]) is None
        near.close()
        assert link_usage([near]) is None
    assert link_usage([]) is None
