"""Rows of routes: what follows from them, and how they come to their part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
from aiohttp import web

from rendezvous import auth
from rendezvous.access import Access
from rendezvous.auth import DRIVER, Caller, Role
from rendezvous.routes import Answer, Route, collect, mount, read_json, short_ways
from rendezvous.server import RendezvousServer
from rendezvous.store_routes import PLAIN_STORE
from tests.rendezvous.common import TOKEN, request

READERS = frozenset({Role.READER})


class Counter:
    """A part with two handlers."""

    def __init__(self) -> None:
        self.count = 0
        self.short = 0

    async def show(self, _request: web.Request) -> web.Response:
        """Answer with the count.

        This line is not in the summary.
        """
        return web.Response(body=b"%d" % self.count)

    async def add(self, request: web.Request) -> web.Response:
        """Add to the count."""
        self.count += await read_json(request, int)
        return web.Response(body=request.match_info["name"].encode())

    def take(
        self, _caller: Caller, path: str, body: bytes, answer: Answer
    ) -> Callable[[], object] | None:
        if not body.isdigit():
            return None
        self.short += int(body)
        answer(200, path.encode())
        return lambda: None


ROUTES = (
    Route("GET", "/counter", READERS, Counter.show),
    Route("GET", "/open", None, Counter.show, sentence="Anyone may look."),
    Route("POST", "/counter/{name:[a-z]+}:add", READERS, Counter.add, short=Counter.take),
)


def test_a_row_is_all_that_a_route_needs() -> None:
    part, reader = Counter(), auth.reader_token(TOKEN)
    access = Access(replace(PLAIN_STORE, routes=(*PLAIN_STORE.routes, *ROUTES)))
    with RendezvousServer(
        token=TOKEN,
        access=access,
        routes=lambda app: mount(app, ROUTES, part),
        posts=short_ways(ROUTES, part),
    ) as server:
        assert request(server, "POST", "/counter/mine:add", b"2", reader)[2] == b"/counter/mine:add"
        odd = {"X-Odd": "1"}  # aiohttp answers
        assert request(server, "POST", "/counter/mine:add", b"3", reader, **odd)[2] == b"mine"
        assert (part.short, part.count) == (2, 3)
        assert request(server, "GET", "/counter", None, reader)[2] == b"3"
        assert request(server, "GET", "/open", None, None)[2] == b"3"
        operator = auth.operator_token(TOKEN)
        assert request(server, "GET", "/counter", None, operator)[0] == 403
        for headers in ({}, odd):
            status, _, body = request(
                server, "POST", "/counter/mine:add", b"1", operator, **headers
            )
            assert status == 403
            assert b"may not POST /counter/{name}:add" in body
        assert request(server, "HEAD", "/counter", None, reader)[0] == 405
        assert request(server, "HEAD", "/healthz", None, None)[0] == 200


@pytest.mark.parametrize(
    ("number", "summary", "template"),
    [
        (0, "Answer with the count.", "/counter"),
        (1, "Anyone may look.", "/open"),
        (2, "Add to the count.", "/counter/{name}:add"),
    ],
)
def test_a_row_says_what_its_route_does(number: int, summary: str, template: str) -> None:
    assert ROUTES[number].summary == summary
    assert ROUTES[number].template == template


def test_rows_of_modules_are_collected_in_their_order() -> None:
    first, second = ModuleType("first"), ModuleType("second")
    first.ROUTES, second.ROUTES = ROUTES[:1], ROUTES[1:]  # type: ignore[attr-defined]
    assert collect((second, first)) == (*ROUTES[1:], ROUTES[0])


def test_everybody_may_use_an_open_route_and_the_driver_any() -> None:
    access = Access(replace(PLAIN_STORE, routes=ROUTES))
    assert access.open == {"/open"}
    assert access.may_call(Caller(Role.OPERATOR), "GET", "/open")
    assert not access.may_call(Caller(Role.OPERATOR), "GET", "/counter")
    assert access.may_call(DRIVER, "GET", "/counter")
