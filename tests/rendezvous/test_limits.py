"""The bounds of a server: who is over one is told so and may go on, and nobody else notices."""

from __future__ import annotations

import contextlib
import gzip
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_driver.token_roles import agent_token, node_token, worker_token
from rendezvous import connections
from rendezvous.auth import operator_token, reader_token
from rendezvous.client import RendezvousClient
from rendezvous.limits import Limits
from rendezvous.server import RendezvousServer
from rendezvous.wire import Add, Get, KVBatch, Number, Operation, Set, Watch, encode
from tests.rendezvous.common import ACCESS, TOKEN, error_of, eventually, request
from tests.rendezvous.test_fast_path import Caller, batch, head

WORKER = worker_token(agent_token(TOKEN, "a"), "a.0.1")
HEADERS = f"Host: x\r\nAuthorization: Bearer {TOKEN}\r\n"
_SERVE = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from rendezvous.server import RendezvousServer
with RendezvousServer(token=sys.argv[1]) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""


def serve(limits: Limits) -> RendezvousServer:
    """Return a server with these bounds, not yet started."""
    return RendezvousServer(token=TOKEN, access=ACCESS, limits=limits)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)


class Distant:
    """A server in a process of its own, which may have 200 descriptors."""

    def __init__(self, folder: Path) -> None:
        self.errors = folder / "stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, TOKEN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=Path(__file__).parents[2],
            )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        self.files = psutil.Process(self.process.pid).num_fds

    def connect(self, many: int) -> list[socket.socket]:
        return [socket.create_connection(("127.0.0.1", self.port), 30) for _ in range(many)]


@pytest.fixture
def distant(tmp_path: Path) -> Iterator[Distant]:
    server = Distant(tmp_path)
    try:
        yield server
    finally:
        with server.process:
            server.process.communicate(timeout=30)
    assert server.errors.read_text() == ""


# ---- connections -------------------------------------------------------------------------


def test_idle_connections_do_not_use_up_the_descriptors(distant: Distant) -> None:
    with RendezvousClient(distant.url, TOKEN) as early, contextlib.ExitStack() as stack:
        early.set("a", b"1")
        for idle in distant.connect(400):
            stack.enter_context(idle)
        with RendezvousClient(distant.url, TOKEN) as late:
            assert late.one(Add("n", 1), Number) == Number(1)
        assert early.one(Add("n", 1), Number) == Number(2)
        eventually(lambda: distant.files() <= 155, "a quarter is the driver's own")
        assert os.stat(distant.errors).st_size == 0


def test_connections_that_rest_make_room_and_those_that_wait_stay(distant: Distant) -> None:
    with contextlib.ExitStack() as stack:
        waits = stack.enter_context(distant.connect(1)[0])
        waits.sendall(batch(Watch({"go": 0}, wait=60)))
        for number, resting in enumerate(distant.connect(250)):
            stack.enter_context(resting)
            resting.sendall(batch(Add("n", 1), number=number))
            with contextlib.suppress(ConnectionError):
                resting.recv(4096)
        with RendezvousClient(distant.url, TOKEN) as late:
            late.set("go", b"")
        waits.settimeout(30)
        assert waits.recv(4096).startswith(b"HTTP/1.1 200 ")
        eventually(lambda: distant.files() <= 155, "a quarter is the driver's own")


def test_who_comes_when_all_descriptors_are_in_use_is_told_so(distant: Distant) -> None:
    with contextlib.ExitStack() as stack:
        told = b""
        for number, waits in enumerate(distant.connect(200)):
            stack.enter_context(waits)
            with contextlib.suppress(ConnectionError):
                waits.sendall(batch(Watch({"go": 0}, wait=60), number=number))
        until = time.monotonic() + 30
        while b"ulimit -n" not in told:
            assert time.monotonic() < until
            with contextlib.suppress(ConnectionError), distant.connect(1)[0] as late:
                late.settimeout(30)
                told = late.recv(4096)
        assert told.startswith(b"HTTP/1.1 503 ")


def test_a_connection_without_a_token_has_little_time() -> None:
    bounds = Limits(unproven_s=0.3)
    with (
        serve(bounds) as server,
        Caller(server) as proven,
    ):
        proven.send(batch(Add("n", 1)))
        assert proven.answer()[0] == 200
        with Caller(server) as silent, Caller(server) as slow, Caller(server) as wrong:
            slow.send(b"GET /healthz HTTP/1.1\r\nHost")
            wrong.send(head("/v1/kv:batch", 100, "wrong"))
            assert wrong.answer()[0] == 401
            for each in (silent, slow, wrong):
                assert each.socket.recv(10) == b""
        assert server.hits.snapshot()["unproven_time"] == 3
        proven.send(batch(Add("n", 1), number=1))
        assert proven.answer()[0] == 200


def test_one_worker_has_a_bounded_number_of_connections() -> None:
    with contextlib.ExitStack() as stack:
        bounds = Limits(of_one_caller=3)
        server = stack.enter_context(serve(bounds))

        def call(token: str) -> tuple[Caller, int, bytes]:
            caller = stack.enter_context(Caller(server))
            body = encode(KVBatch((Get(("rounds/1/k",)),), "id"))
            caller.send(head("/v1/kv:batch", len(body), token) + body)
            status, _, answer = caller.answer()
            return caller, status, answer

        found = [call(WORKER) for _ in range(4)]
        assert [status for _, status, _ in found] == [200, 200, 200, 429]
        assert error_of(found[3][2])["code"] == "too_many_connections"
        other = worker_token(agent_token(TOKEN, "b"), "b.0.1")
        assert call(other)[1] == call(TOKEN)[1] == 200
        found[0][0].socket.close()
        eventually(lambda: call(WORKER)[1] == 200, "there is room again")


# ---- requests ----------------------------------------------------------------------------


def test_a_half_sent_head_or_body_is_cut_off_also_by_the_general_server() -> None:
    bounds = Limits(head_s=0.3, body_s=0.3)
    with (
        serve(bounds) as server,
        contextlib.ExitStack() as stack,
    ):
        calls = [stack.enter_context(Caller(server)) for _ in range(3)]
        for each in calls:
            each.send(f"GET /v1/kv/a/b HTTP/1.1\r\n{HEADERS}\r\n".encode())
            assert each.answer()[0] == 404
        calls[0].send(b"GET /v1/kv/a/b HTTP/1.1\r\nAuth")
        put = f"PUT /v1/kv/a/b HTTP/1.1\r\n{HEADERS}Content-Length: 9\r\n"
        calls[1].send(put.encode() + b"\r\nhalf")
        get = f"GET /v1/kv/a/b?wait=2 HTTP/1.1\r\n{HEADERS}\r\n"
        calls[2].send(get.encode())
        assert calls[0].socket.recv(10) == b""
        status, _, answer = calls[1].answer()
        assert (status, error_of(answer)["code"]) == (408, "timed_out")
        assert calls[2].answer()[0] == 408  # its wait ended; it was not cut off
        assert server.hits.snapshot()["request_time"] == 2


@pytest.mark.parametrize("path", ["/v1/kv:batch", "/healthz"])
@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_compressed_body_is_refused_and_never_unpacked(
    server: RendezvousServer, path: str, token: str | None
) -> None:
    bomb = gzip.compress(bytes(32 * 2**20))  # 32 KiB
    packed = {"Content-Encoding": "gzip"}
    began = time.process_time()
    answers = [request(server, "POST", path, bomb, token, **packed) for _ in range(5)]
    assert time.process_time() - began < 0.15, "to unpack five of them takes 0.3 s"
    assert {status for status, *_ in answers} <= {401, 405, 413, 415}
    if token and path == "/v1/kv:batch":
        assert [error_of(body)["code"] for *_, body in answers] == ["compressed"] * 5


def test_requests_that_arrive_slowly_have_a_bounded_size_together() -> None:
    bounds = Limits(arriving_bytes=1_000_000)
    with (
        serve(bounds) as server,
        contextlib.ExitStack() as stack,
    ):
        first, second, third = (stack.enter_context(Caller(server)) for _ in range(3))
        put = (f"PUT /v1/kv/a/b HTTP/1.1\r\n{HEADERS}Content-Length: 800000\r\n\r\n").encode()
        first.send(put + b"x")
        eventually(lambda: server_arriving(server) == 800_000, "the first one arrives")
        second.send(put + b"x")
        status, _, answer = second.answer()
        assert (status, error_of(answer)["code"]) == (503, "busy")
        third.send(head("/v1/kv:batch", 250_000) + b"x" * 210_000)
        status, _, answer = third.answer()
        assert (status, error_of(answer)["code"]) == (503, "busy")
        first.send(b"x" * 799_999)
        assert first.socket.recv(4096).startswith(b"HTTP/1.1 204 ")
        eventually(lambda: server_arriving(server) == 0, "nothing arrives")
        assert server.hits.snapshot()["arriving"] == 2


def server_arriving(server: RendezvousServer) -> int:
    assert server._connections is not None
    return server._connections._arriving.taken


def test_answers_that_nobody_takes_have_a_bounded_size_together() -> None:
    size = 6_000_000
    with contextlib.ExitStack() as stack:
        bounds = Limits(leaving_bytes=3 * size)
        server = stack.enter_context(serve(bounds))
        server.apply([Set(f"k/{n}", bytes(size)) for n in range(4)])

        def ask(number: int) -> Caller:
            caller = stack.enter_context(Caller(server, receive_buffer=4096))
            caller.send(batch(Get((f"k/{number}",)), number=number))
            return caller

        def taken() -> int:
            assert server._connections is not None
            return len(server._connections._leaving)

        stuck = [ask(0), ask(0), ask(1)]  # the first two get the same bytes
        eventually(lambda: taken() == 2, "two answers are on their way")
        status, _, answer = ask(2).answer()
        assert (status, error_of(answer)["code"]) == (503, "busy")
        assert request(server, "GET", "/v1/kv/k/3")[0] == 503
        for each in stuck:
            each.socket.close()
        eventually(lambda: taken() == 0, "nothing is kept for who has gone")
        found = ask(2)
        found.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        assert found.answer()[0] == 200
        assert request(server, "GET", "/v1/kv/k/3")[0] == 200


def test_one_client_neither_fills_what_arrives_nor_what_leaves() -> None:
    """Half-sent requests and answers that it does not take; others and people go on."""
    size = 3_000_000
    bounds = Limits(arriving_bytes=4_000_000, leaving_bytes=17 * size)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve(bounds))
        server.apply([Set(f"u/{n}", bytes(size)) for n in range(8)])
        others = (worker_token(agent_token(TOKEN, "a"), "a.0.2"), operator_token(TOKEN))

        def send(token: str, text: bytes) -> Caller:
            caller = stack.enter_context(Caller(server, receive_buffer=4096))
            caller.send(text)
            return caller

        def put(token: str) -> bytes:
            line = f"PUT /v1/kv/u/x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
            return f"{line}Content-Length: 400000\r\n\r\n".encode()

        half = [send(WORKER, put(WORKER) + b"x") for _ in range(2)]
        eventually(lambda: server_arriving(server) == 800_000, "two have their places")
        assert send(WORKER, put(WORKER)).answer()[0] == 503
        body = batch_of(Add("u/n", 1))
        assert send(WORKER, head("/v1/kv:batch", len(body), WORKER) + body).answer()[0] == 200
        for token in others:
            whole = send(token, put(token) + b"x" * 400_000)
            assert whole.socket.recv(12) == b"HTTP/1.1 204"
        answers = list[int]()
        for number in range(8):
            body = batch_of(Get((f"u/{number}",)))
            asked = send(WORKER, head("/v1/kv:batch", len(body), WORKER) + body)
            answers.append(int(asked.socket.recv(12)[9:]))
        assert set(answers) == {200, 503}
        assert answers.count(200) == 3, "4/3 of three are a quarter"
        for token in others:
            assert request(server, "GET", "/v1/kv/u/7", token=token)[0] == 200
        assert len(half) == 2


def batch_of(*operations: Operation) -> bytes:
    return encode(KVBatch(operations, "id"))


def test_a_reader_has_a_bounded_number_of_connections() -> None:
    with contextlib.ExitStack() as stack:
        bounds = Limits(of_one_caller=3)
        server = stack.enter_context(serve(bounds))

        def ask(token: str) -> int:
            caller = stack.enter_context(Caller(server))
            line = f"GET /v1/kv/a/b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"
            caller.send(line.encode())
            return caller.answer()[0]

        for token in (reader_token(TOKEN), operator_token(TOKEN), node_token(TOKEN, "n")):
            found = [ask(token) for _ in range(4)]
            assert found[3] == 429 or found[0] == 403, found
        assert [ask(operator_token(TOKEN)) for _ in range(1)] == [429]
        assert ask(TOKEN) == 404


_CONNECTS = """
import encodings.idna, os, socket, sys, time
os.setuid(65534)
held = []
for turn in range(5):
    time.sleep(float(sys.argv[2]))
    for number in range(19):
        address = f"127.{turn}.1.{number + 1}"
        held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), 30, (address, 0)))
print("done", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may be somebody else")
def test_a_user_who_connects_without_end_closes_his_own_connections_whatever_his_address() -> None:
    bounds = Limits(unproven=20, unproven_s=30.0)
    with (
        serve(bounds) as server,
        contextlib.ExitStack() as stack,
    ):
        made = [socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(3)]
        quiet = [stack.enter_context(each) for each in made]
        argv = [sys.executable, "-c", _CONNECTS, str(server.port), str(connections.YOUNG_S)]
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"done\n"
            for each in quiet:
                each.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                assert each.recv(100).startswith(b"HTTP/1.1 200 ")
            other.communicate()
        assert server.hits.snapshot()["unproven"] >= 40


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_bug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serve(Limits()) as server:
        with Caller(server) as caller:
            caller.send(
                f"PUT /v1/kv/a/b HTTP/1.1\r\n{HEADERS}Content-Length: 800\r\n\r\nx".encode()
            )
            eventually(lambda: server_arriving(server) == 800, "it arrives")
        eventually(lambda: server_arriving(server) == 0, "it is given up")
    assert caplog.text == ""
