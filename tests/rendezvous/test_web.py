from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from http.client import HTTPConnection

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rendezvous import auth
from rendezvous.routes import Problem
from rendezvous.server import RendezvousServer
from rendezvous.wire import (
    MAX_BODY_BYTES,
    BatchReply,
    Compared,
    DeletePrefix,
    Entries,
    Entry,
    Get,
    KVBatch,
    Number,
    Result,
    Set,
    StoreRefusal,
    Written,
    decode_reply,
    encode,
    encode_reply,
)
from tests.rendezvous.common import TOKEN, error_of, eventually, request, waiting


def test_health_needs_no_token(server: RendezvousServer) -> None:
    assert request(server, "GET", "/healthz", token=None)[::2] == (200, b'{"status":"ok"}')


@pytest.mark.parametrize("token", [None, "wrong", TOKEN + "x", ""])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/kv/a/b"),
        ("PUT", "/v1/kv/a/b"),
        ("POST", "/v1/kv:batch"),
        ("GET", "/no/such/route"),
        ("DELETE", "/healthz/"),
    ],
)
def test_no_token_no_word(
    server: RendezvousServer, method: str, path: str, token: str | None
) -> None:
    status, headers, body = request(server, method, path, token=token)
    assert status == 401
    assert error_of(body)["code"] == "unauthorized"
    assert headers["WWW-Authenticate"] == "Bearer"


def test_each_request_of_a_connection_is_known_by_its_own_token(server: RendezvousServer) -> None:
    reader = auth.reader_token(TOKEN)
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)

    def put(token: bytes) -> int:
        connection.request("PUT", "/v1/kv/a/b", b"x", {"Authorization": b"Bearer " + token})
        response = connection.getresponse()
        response.read()
        return response.status

    with contextlib.closing(connection):
        known, looks, strange = TOKEN.encode(), reader.encode(), b"t\xe9\xffken"
        said = [put(token) for token in (known, known, looks, looks, strange, known, strange)]
    assert said == [204, 204, 403, 403, 401, 204, 401]


def test_raw_bytes_come_back_as_they_were(server: RendezvousServer) -> None:
    value = bytes(range(256)) * 1000
    status, headers, body = request(server, "PUT", "/v1/kv/scope/some/deep/key", value)
    assert (status, headers["X-Revision"], body) == (204, "1", b"")
    status, headers, body = request(server, "GET", "/v1/kv/scope/some/deep/key")
    assert (status, headers["X-Revision"], body) == (200, "1", value)
    assert server.apply([Get(("scope/some/deep/key",))])[0] == Entries(
        {"scope/some/deep/key": Entry(value, 1)}
    )


def test_a_missing_key_is_404_until_it_is_written(server: RendezvousServer) -> None:
    status, _, body = request(server, "GET", "/v1/kv/a/b")
    assert (status, error_of(body)["code"]) == (404, "not_found")
    assert request(server, "DELETE", "/v1/kv/a/b")[0] == 404
    request(server, "PUT", "/v1/kv/a/b", b"")
    assert request(server, "DELETE", "/v1/kv/a/b")[0] == 204
    assert request(server, "GET", "/v1/kv/a/b")[0] == 404


def test_a_get_that_waits_is_answered_by_the_write(server: RendezvousServer) -> None:
    answers: list[tuple[int, bytes]] = []
    thread = threading.Thread(
        target=lambda: answers.append(request(server, "GET", "/v1/kv/a/b?wait=20")[::2])  # type: ignore[arg-type]
    )
    thread.start()
    eventually(lambda: waiting(server) == 1, "the client waits")
    request(server, "PUT", "/v1/kv/a/b", b"here")
    thread.join(10)
    assert answers == [(200, b"here")]


@pytest.mark.parametrize("query", ["wait=0.05", "wait=0.05&after=1", "after=1"])
def test_a_wait_that_runs_out_is_408(server: RendezvousServer, query: str) -> None:
    if "after" in query:
        request(server, "PUT", "/v1/kv/a/b", b"old")
    status, _, body = request(server, "GET", f"/v1/kv/a/b?{query}")
    assert (status, error_of(body)["code"]) == (408, "timed_out")


@pytest.mark.parametrize(
    "query", ["wait=x", "wait=-1", "wait=61", "wait=nan", "wait=inf", "after=1.5", "after=-1"]
)
def test_a_query_out_of_bounds_is_422(server: RendezvousServer, query: str) -> None:
    status, _, body = request(server, "GET", f"/v1/kv/a/b?{query}")
    assert (status, error_of(body)["code"]) == (422, "invalid")


def test_a_put_may_hold_a_lease(server: RendezvousServer) -> None:
    request(server, "PUT", "/v1/kv/a/b?lease=0.05", b"")
    eventually(lambda: request(server, "GET", "/v1/kv/a/b")[0] == 404, "the lease expires")


def test_what_is_sealed_is_gone(server: RendezvousServer) -> None:
    server.apply([DeletePrefix("a/", seal=True)])
    for method, path in (("PUT", "/v1/kv/a/b"), ("GET", "/v1/kv/a/b?wait=5")):
        status, _, body = request(server, method, path, b"" if method == "PUT" else None)
        assert (status, error_of(body)["code"]) == (410, "sealed")


def test_a_batch_is_answered_in_order(server: RendezvousServer) -> None:
    batch = KVBatch((Set("a", b"\xff"), Get(("a",)), Set("b", b"")), "id1")
    status, _, body = request(server, "POST", "/v1/kv:batch", encode(batch))
    assert status == 200
    assert decode_reply(body).results == (
        Written(1),
        Entries({"a": Entry(b"\xff", 1)}),
        Written(2),
    )


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "malformed"),
        (b"{", 400, "malformed"),
        (b'{"request_id":"\xff"}', 400, "malformed"),
        (b"[]", 422, "invalid"),
        (b'{"operations":[],"request_id":"x"}', 422, "invalid"),
        (b'{"operations":[{"type":"eval"}],"request_id":"x"}', 422, "invalid"),
        (b'{"operations":[{"type":"set","key":""}],"request_id":"x"}', 422, "invalid"),
        (b'{"operations":[{"type":"set","key":"a","value":"%"}],"request_id":"x"}', 422, "invalid"),
        (b'{"operations":[{"type":"count","more":1}],"request_id":"x"}', 422, "invalid"),
        (
            b'{"operations":[{"type":"get","keys":["a"],"wait":61}],"request_id":"x"}',
            422,
            "invalid",
        ),
        (b'{"operations":[{"type":"count"}],"request_id":""}', 422, "invalid"),
        (b"[" * 100_000, 422, "invalid"),
    ],
)
def test_a_body_that_is_no_batch_is_refused(
    server: RendezvousServer, body: bytes, status: int, code: str
) -> None:
    found, _, answer = request(server, "POST", "/v1/kv:batch", body)
    assert (found, error_of(answer)["code"]) == (status, code)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    ).map(lambda value: json.dumps(value).encode())
)
def test_no_body_makes_the_server_stumble(server: RendezvousServer, body: bytes) -> None:
    status, _, answer = request(server, "POST", "/v1/kv:batch", body)
    assert status in {400, 422}
    assert error_of(answer)["code"] in {"malformed", "invalid"}


def test_a_body_beyond_the_limit_is_413(server: RendezvousServer) -> None:
    status, _, body = request(server, "PUT", "/v1/kv/a/b", b"x" * (MAX_BODY_BYTES + 1))
    assert (status, error_of(body)["code"]) == (413, "too_large")


def test_a_value_beyond_the_limit_is_413(server: RendezvousServer) -> None:
    status, _, body = request(server, "PUT", "/v1/kv/a/b", b"x" * (MAX_BODY_BYTES // 2 + 1))
    assert (status, error_of(body)["code"]) == (413, "too_large")


def test_unknown_routes_and_methods_have_the_same_shape_of_error(
    server: RendezvousServer,
) -> None:
    status, _, body = request(server, "GET", "/no/such/route")
    assert (status, error_of(body)["code"]) == (404, "not_found")
    status, headers, body = request(server, "PATCH", "/v1/kv/a/b")
    assert (status, error_of(body)["code"]) == (405, "method_not_allowed")
    assert headers["Allow"] == "DELETE,GET,PUT"


def test_a_key_that_is_too_long_is_422(server: RendezvousServer) -> None:
    assert request(server, "PUT", "/v1/kv/a/" + "k" * 511, b"")[0] == 422
    assert request(server, "PUT", "/v1/kv/a/" + "k" * 510, b"")[0] == 204


def test_errors_of_other_rooms_have_the_same_shape(caplog: pytest.LogCaptureFixture) -> None:
    async def refuse(_request: web.Request) -> web.Response:
        raise Problem(409, "taken", "somebody was faster", "try another")

    async def stumble(_request: web.Request) -> web.Response:
        raise ZeroDivisionError("secret")

    def routes(app: web.Application) -> None:
        app.router.add_get("/refuse", refuse)
        app.router.add_post("/stumble", stumble)

    with RendezvousServer(token=TOKEN, routes=routes) as server:
        status, _, body = request(server, "GET", "/refuse")
        assert status == 409
        assert error_of(body) == {
            "code": "taken",
            "message": "somebody was faster",
            "hint": "try another",
        }
        status, _, body = request(server, "POST", "/stumble")
        assert (status, error_of(body)["code"]) == (500, "internal")
        assert b"secret" not in body
        assert "POST /stumble failed" in caplog.text


def test_a_client_that_goes_away_leaves_no_waiter(server: RendezvousServer) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    head = f"Host: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    connection.sendall(f"GET /v1/kv/a/b?wait=60 HTTP/1.1\r\n{head}".encode())
    eventually(lambda: waiting(server) == 1, "the client waits")
    connection.close()
    eventually(lambda: waiting(server) == 0, "the waiter is gone")


@given(
    st.lists(
        st.one_of(
            st.builds(
                Entries,
                st.dictionaries(st.text(), st.builds(Entry, st.binary(), st.integers(0, 9))),
            ),
            st.builds(Number, st.integers(-5, 5)),
            st.builds(Written, st.integers(0, 5)),
            st.builds(Compared, st.booleans(), st.none() | st.binary()),
            st.builds(StoreRefusal, st.text(), st.text()),
        ),
        max_size=20,
    ).map(tuple)
)
def test_the_reply_encoder_writes_what_plain_encoding_writes(results: tuple[Result, ...]) -> None:
    for _ in range(2):
        assert encode_reply(results) == encode(BatchReply(results))


def test_a_repeated_post_reaches_its_handler_once() -> None:
    calls: list[bytes] = []
    release = threading.Event()

    async def handler(received: web.Request) -> web.Response:
        calls.append(await received.read())
        while not release.is_set():
            await asyncio.sleep(0.005)
        return web.Response(text=f"answer {len(calls)}", status=202)

    def routes(app: web.Application) -> None:
        app.router.add_post("/v1/events", handler)

    with RendezvousServer(token=TOKEN, routes=routes) as server:
        answers: list[tuple[int, bytes]] = []

        def post() -> None:
            status, _, body = request(server, "POST", "/v1/events", b"{}", **{"X-Request-Id": "1"})
            answers.append((status, body))

        threads = [threading.Thread(target=post) for _ in range(2)]
        for thread in threads:
            thread.start()
        eventually(lambda: bool(calls), "the handler is called")
        release.set()
        for thread in threads:
            thread.join(10)
        post()
        assert answers == [(202, b"answer 1")] * 3
        request(server, "POST", "/v1/events", b"{}", **{"X-Request-Id": "2"})
        request(server, "POST", "/v1/events", b"{}")
        assert len(calls) == 3


def test_a_post_that_met_a_bug_of_the_server_is_tried_again() -> None:
    calls: list[int] = []

    async def handler(_request: web.Request) -> web.Response:
        calls.append(1)
        return web.Response(status=503 if len(calls) == 1 else 200)

    def routes(app: web.Application) -> None:
        app.router.add_post("/v1/events", handler)

    with RendezvousServer(token=TOKEN, routes=routes) as server:
        statuses = [
            request(server, "POST", "/v1/events", b"{}", **{"X-Request-Id": "1"})[0]
            for _ in range(3)
        ]
    assert statuses == [503, 200, 200]
    assert len(calls) == 2
