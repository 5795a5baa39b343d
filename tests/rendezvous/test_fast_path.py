"""The short way for batches and events: it says what the general server says, only sooner."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest

from elastic_driver import token_roles
from elastic_driver.token_roles import agent_token, worker_token
from rendezvous import auth, connections, fast_path
from rendezvous.access import Access, RouteRights
from rendezvous.client import RendezvousClient
from rendezvous.limits import Limits
from rendezvous.server import RendezvousServer
from rendezvous.wire import Add, Get, KVBatch, Number, Set, Watch, decode_reply, encode
from tests.rendezvous.common import STORE, TOKEN, error_of, eventually, request, waiting

POST = "/v1/told"
BELOW = "/v1/later/"


@pytest.fixture
def told() -> list[bytes]:
    """What arrived at the other room's quick POST."""
    return []


class Later:
    """POSTs below a path, which wait for their answers."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, bytes, fast_path.Answer]] = []
        self.gone = 0

    def take(
        self, _caller: auth.Caller, path: str, body: bytes, answer: fast_path.Answer
    ) -> Callable[[], None]:
        self.waiting.append((path, body, answer))
        return self._leave

    def _leave(self) -> None:
        self.gone += 1

    def answer(self, server: RendezvousServer, status: int, body: bytes) -> None:
        """Answer the first POST that waits, on the server's loop."""
        _, _, answer = self.waiting.pop(0)
        assert server._loop is not None
        server._loop.call_soon_threadsafe(answer, status, body)


@pytest.fixture
def later() -> Later:
    return Later()


@pytest.fixture
def server(told: list[bytes], later: Later) -> Iterator[RendezvousServer]:
    def take(
        caller: auth.Caller, _path: str, body: bytes, answer: fast_path.Answer
    ) -> Callable[[], None] | None:
        assert caller == auth.DRIVER or caller.role is token_roles.WORKER
        if body == b"not here":
            return None
        told.append(body)
        answer(202, b'{"number":%d}' % len(told))
        return lambda: None

    route = RouteRights("POST", POST, frozenset({token_roles.WORKER}))
    access = Access(replace(STORE, routes=(*STORE.routes, route)))
    posts = {POST: take, BELOW: later.take}
    with RendezvousServer(token=TOKEN, access=access, posts=posts) as server:
        yield server


def head(path: str, length: int, token: str = TOKEN, more: str = "") -> bytes:
    """The head of a plain POST."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n{more}"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def batch(*operations: object, number: int = 0) -> bytes:
    """A whole batch request."""
    body = encode(KVBatch(operations, f"id{number}"))  # type: ignore[arg-type]
    return head("/v1/kv:batch", len(body)) + body


class Caller:
    """A socket that speaks HTTP by hand."""

    def __init__(self, server: RendezvousServer, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(20)
        self.socket.connect(("127.0.0.1", server.port))
        self._arrived = b""

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> tuple[int, bytes, bytes]:
        """The next answer: status, head, body."""
        while b"\r\n\r\n" not in self._arrived:
            self._more()
        top, self._arrived = self._arrived.split(b"\r\n\r\n", 1)
        length = int(top.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(self._arrived) < length:
            self._more()
        body, self._arrived = self._arrived[:length], self._arrived[length:]
        return int(top.split()[1]), top, body

    def _more(self) -> None:
        data = self.socket.recv(1 << 20)
        assert data, "the server closed the connection"
        self._arrived += data


def is_short(answer_head: bytes) -> bool:
    """aiohttp names itself in its answers."""
    return b"Server:" not in answer_head


def test_batches_are_answered_in_their_order_however_the_bytes_arrive(
    server: RendezvousServer,
) -> None:
    requests = b"".join(batch(Add("n", 1), number=n) for n in range(20))
    with Caller(server) as caller:
        for start in range(0, len(requests), 37):
            caller.send(requests[start : start + 37])
        caller.send(batch(Get(("go",), wait=20), number=20) + batch(Add("n", 1), number=21))
        for n in range(20):
            status, top, body = caller.answer()
            assert (status, is_short(top)) == (200, True)
            assert decode_reply(body).results == (Number(n + 1),)
        server.apply([Set("go", b"now")])
        assert b'"go"' in caller.answer()[2]
        assert decode_reply(caller.answer()[2]).results == (Number(21),)


def test_both_ways_know_each_others_requests(server: RendezvousServer) -> None:
    for number in range(2):
        same = batch(Add("n", 1), number=number)
        general = same.replace(b"Host: x", b"Host: x\r\nX-Other: y")
        answers = []
        for way in (same, general) if number else (general, same):
            with Caller(server) as caller:
                caller.send(way)
                answers.append(caller.answer())
        assert {is_short(top) for _, top, _ in answers} == {True, False}
        assert answers[0][2] == answers[1][2]
    assert server.apply([Add("n", 0)]) == (Number(2),)


def test_a_post_is_taken_once_however_often_it_is_sent(
    server: RendezvousServer, told: list[bytes]
) -> None:
    once = head(POST, 3, more="X-Request-Id: 7\r\n") + b"abc"
    answers = []
    for _ in range(2):
        with Caller(server) as caller:
            caller.send(once)
            answers.append(caller.answer())
    assert [(status, body) for status, _, body in answers] == [(202, b'{"number":1}')] * 2
    assert told == [b"abc"]
    with Caller(server) as caller:  # one without an id is another one each time
        caller.send((head(POST, 1) + b"x") * 2)
        assert [caller.answer()[2] for _ in range(2)] == [b'{"number":2}', b'{"number":3}']


def test_another_caller_with_the_same_id_gets_an_answer_of_its_own(
    server: RendezvousServer, told: list[bytes]
) -> None:
    """Else it would read the other's answer, and its own request would not be carried out."""
    tokens = [worker_token(agent_token(TOKEN, h), f"{h}.0.1") for h in ("a", "b")]
    by_id = "X-Request-Id: 7\r\n"
    for number, token in enumerate(tokens):
        with Caller(server) as caller:
            caller.send(head(POST, 1, token, by_id) + b"%d" % number)
            assert caller.answer()[2] == b'{"number":%d}' % (number + 1)
            body = encode(KVBatch((Set("u/x", b"%d" % number), Get(("u/x",))), "same"))
            caller.send(head("/v1/kv:batch", len(body), token) + body)
            found = decode_reply(caller.answer()[2]).results[1]
            assert found.entries["u/x"].value == b"%d" % number  # type: ignore[union-attr]
    assert told == [b"0", b"1"]


def test_a_post_below_a_path_is_answered_when_its_answer_comes(
    server: RendezvousServer, later: Later
) -> None:
    with Caller(server) as caller:
        for status in (200, 409):
            path = f"{BELOW}d:{status}"
            caller.send(head(path, 3) + b"abc" + batch(Add("n", 1), number=status))
            eventually(lambda: len(later.waiting) == 1, "it waits")
            assert later.waiting[0][:2] == (path, b"abc")
            later.answer(server, status, b"{}")
            found, top, body = caller.answer()
            assert (found, body, is_short(top)) == (status, b"{}", True)
            assert caller.answer()[0] == 200  # the batch behind it
        caller.send(head(f"{BELOW}d/further", 0))
        assert caller.answer()[0] == 404


def test_a_repeat_of_a_post_that_waits_gets_the_same_answer(
    server: RendezvousServer, later: Later
) -> None:
    once = head(f"{BELOW}d", 3, more="X-Request-Id: 7\r\n") + b"abc"
    with Caller(server) as first, Caller(server) as second:
        first.send(once)
        eventually(lambda: len(later.waiting) == 1, "it waits")
        first.socket.close()
        second.send(once)
        second.send(batch(Add("n", 1)))
        later.answer(server, 200, b'{"n":1}')
        status, top, body = second.answer()
        assert (status, body, is_short(top)) == (200, b'{"n":1}', False)
    with Caller(server) as third:
        third.send(once)
        assert third.answer()[2] == b'{"n":1}'
    assert (later.waiting, later.gone) == ([], 0)


def test_a_post_without_an_id_is_given_up_when_its_client_goes_away(
    server: RendezvousServer, later: Later
) -> None:
    with Caller(server) as caller:
        caller.send(head(f"{BELOW}d", 0))
        eventually(lambda: len(later.waiting) == 1, "it waits")
    eventually(lambda: later.gone == 1, "it is given up")
    later.answer(server, 200, b"{}")  # too late, and no harm
    with Caller(server) as caller:
        caller.send(batch(Add("n", 1)))
        assert caller.answer()[0] == 200


def test_a_failed_post_is_carried_out_again_when_it_is_repeated(
    server: RendezvousServer, later: Later
) -> None:
    once = head(f"{BELOW}d", 0, more="X-Request-Id: 7\r\n")
    with Caller(server) as caller:
        for status in (503, 200):
            caller.send(once)
            eventually(lambda: len(later.waiting) == 1, "it waits")
            later.answer(server, status, b"{}")
            assert caller.answer()[0] == status


@pytest.mark.parametrize("token", ["wrong", "", TOKEN + "x"])
def test_nothing_is_done_without_the_token(
    server: RendezvousServer, told: list[bytes], token: str
) -> None:
    body = encode(KVBatch((Set("k", b"v"),), "id"))
    for path in ("/v1/kv:batch", POST):
        with Caller(server) as caller:
            caller.send(head(path, len(body), token) + body)
            status, _, answer = caller.answer()
        assert (status, error_of(answer)["code"]) == (401, "unauthorized")
    assert told == []
    assert request(server, "GET", "/v1/kv/k/k")[0] == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/kv:batch", b'{"operations":[],"request_id":"a"}', 422, "invalid"),
        ("/v1/kv:batch", b"{", 400, "malformed"),
        ("/v1/kv:batch", b"[" * 100_000, 422, "invalid"),
        (POST, b"not here", 404, "not_found"),
    ],
)
def test_what_is_wrong_is_refused_as_ever(
    server: RendezvousServer, path: str, body: bytes, status: int, code: str
) -> None:
    with Caller(server) as caller:
        caller.send(head(path, len(body)) + body)
        found, top, answer = caller.answer()
        assert (found, error_of(answer)["code"], is_short(top)) == (status, code, False)
        caller.send(batch(Add("n", 1)))  # the connection goes on, the general way
        assert caller.answer()[0] == 200


def test_a_client_that_goes_away_leaves_no_waiter(server: RendezvousServer) -> None:
    with Caller(server) as reads, Caller(server) as writes:
        reads.send(batch(Watch({"k": 0}, wait=60)))
        writes.send(batch(Set("a"), Watch({"k": 0}, wait=60), Add("n", 1), number=1))
        eventually(lambda: waiting(server) == 2, "both wait")
    eventually(lambda: waiting(server) == 0, "nobody waits")
    server.apply([Set("k")])
    with Caller(server) as again:  # a repeat goes on where the first was given up
        again.send(batch(Set("a"), Watch({"k": 0}, wait=60), Add("n", 1), number=1))
        assert decode_reply(again.answer()[2]).results[2] == Number(1)


def test_who_waits_when_the_server_stops_is_told_to_ask_its_successor() -> None:
    with RendezvousServer(token=TOKEN) as server, Caller(server) as caller:
        caller.send(batch(Watch({"k": 0}, wait=60)))
        eventually(lambda: waiting(server) == 1, "it waits")
        server.stop()
        status, _, body = caller.answer()
        assert (status, error_of(body)["code"]) == (503, "stopping")
        assert caller.socket.recv(10) == b""


def test_clients_that_do_not_read_hold_up_nobody_and_little_memory(
    server: RendezvousServer,
) -> None:
    size, many = 4 << 20, 12
    server.apply([Set("k", bytes(size))])
    ours = psutil.Process()
    stuck = [Caller(server, receive_buffer=4096) for _ in range(many)]
    try:
        stuck[0].send(batch(Get(("k",)), number=0))
        stuck[0].socket.recv(1, socket.MSG_PEEK)  # the shared answer is encoded and on its way
        before = ours.memory_info().rss
        for number, caller in enumerate(stuck[1:], 1):
            caller.send(batch(Get(("k",)), number=number) * 3)
        with RendezvousClient(server.url, TOKEN) as client:
            for number in range(50):
                assert client.one(Add("n", 1), Number) == Number(number + 1)
        assert ours.memory_info().rss - before < size
        stuck[0].socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        body = stuck[0].answer()[2]  # one that reads at last gets all of it
        assert len(json.loads(body)["results"][0]["entries"]["k"]["value"]) > size
    finally:
        for caller in stuck:
            caller.socket.close()


def test_who_takes_nothing_or_never_ends_its_request_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds = Limits(head_s=0.3, body_s=0.3, stuck_s=0.3)
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)
    with RendezvousServer(token=TOKEN, limits=bounds) as server:
        server.apply([Set("k", bytes(8 << 20))])
        stuck, half, idle = Caller(server, receive_buffer=4096), Caller(server), Caller(server)
        with stuck, half, idle, Caller(server) as waits:
            stuck.send(batch(Get(("k",))))
            half.send(batch(Add("n", 1))[:-5])
            waits.send(batch(Watch({"go": 0}, wait=60), number=1))
            with pytest.raises((AssertionError, ConnectionError)):
                half.answer()
            with pytest.raises((AssertionError, ConnectionError)):
                stuck.answer()
            server.apply([Set("go")])
            assert waits.answer()[0] == 200
            idle.send(batch(Add("n", 1), number=2))
            assert decode_reply(idle.answer()[2]).results == (Number(1),)
