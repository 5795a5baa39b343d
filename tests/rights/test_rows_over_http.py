"""A real server answers each role as the rows say: every route and every row of keys, both ways."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import msgspec
import pytest
from aiohttp import web

from elastic_driver import token_roles
from elastic_driver.runtime.api import ROUTES, job_access
from elastic_driver.token_roles import (
    KEYS,
    USERS,
    RoundMembers,
    agent_token,
    job_token,
    node_token,
    worker_token,
)
from rendezvous import auth, wire
from rendezvous.access import KeyRights, RouteRights
from rendezvous.auth import Role
from rendezvous.server import RendezvousServer
from rendezvous.wire import Get, Operation, Set
from tests.rendezvous.common import TOKEN, error_of, request

# A token of each role, and the name that stands for it in `{own}`.
TOKENS = {
    Role.DRIVER: (TOKEN, "any"),
    Role.OPERATOR: (auth.operator_token(TOKEN), "any"),
    Role.READER: (auth.reader_token(TOKEN), "any"),
    token_roles.AGENT: (agent_token(TOKEN, "a"), "a.1"),
    token_roles.WORKER: (
        worker_token(agent_token(TOKEN, "a"), "a.0.1"),
        "a.0.1",
    ),
    token_roles.NODE: (node_token(TOKEN, "n"), "n"),
    token_roles.JOB: (job_token(TOKEN, "night"), "night"),
}
JOINED, NOT_JOINED, STRANGER = "7", "8", "stranger.1"
STORE = (wire.BATCH_PATH, wire.KV_PREFIX, wire.HEALTH_PATH)
LIMITED = [row for row in ROUTES if row.roles is not None]
OPEN = [row for row in ROUTES if row.roles is None]
COUNT = b'{"operations":[{"type":"count"}],"request_id":"x"}'
NOT_PLAIN = {"X-Odd": "1"}  # a header with which aiohttp answers


def add_stubs(app: web.Application) -> None:
    """Mount a handler for each route of a row that is not the store's."""

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=b"{}")

    for row in ROUTES:
        if not row.path.startswith(STORE):
            app.router.add_route(row.method, row.path, answer)
    app.router.add_get("/v1/of_no_row", answer)


@pytest.fixture(scope="module")
def server() -> Iterator[RendezvousServer]:
    rounds = RoundMembers()
    rounds.admit(int(JOINED), ["a.0.1"])
    rounds.admit(int(NOT_JOINED), ["b.0.1"])
    with RendezvousServer(token=TOKEN, access=job_access(rounds), routes=add_stubs) as server:
        yield server


def is_refused(status: int, body: bytes) -> bool:
    """Whether an answer says that a token may not do this; it is no other error."""
    if status != 403:
        assert status < 500
        return False
    assert error_of(body)["code"] == "forbidden"
    return True


# ---- routes ------------------------------------------------------------------------------


@pytest.mark.parametrize("row", LIMITED, ids=lambda row: f"{row.method} {row.template}")
def test_a_route_is_open_to_the_roles_of_its_row(
    server: RendezvousServer, row: RouteRights
) -> None:
    path = row.template.replace("{scope}/{key}", "mine/key").replace("{host}", "h")
    path = path.replace("{dataset}", "d")
    for role, (token, _own) in TOKENS.items():
        body = COUNT if row.path == wire.BATCH_PATH else b"{}"
        for headers in ({}, NOT_PLAIN):
            status, _, answer = request(server, row.method, path, body, token, **headers)
            may = role is Role.DRIVER or role in (row.roles or ())
            said = f"a token of role {role.value} may not {row.method} {row.template}"
            # Whoever may use a route of the store may still be refused the key.
            refused = is_refused(status, answer) and error_of(answer)["message"] == said
            assert refused is not may, (role, headers)
            assert may or status == 403


def test_a_route_of_no_row_is_the_drivers_and_an_open_one_is_everybodys(
    server: RendezvousServer,
) -> None:
    for role, (token, _own) in TOKENS.items():
        status, _, body = request(server, "GET", "/v1/of_no_row", None, token)
        assert is_refused(status, body) is (role is not Role.DRIVER)
    for row in OPEN:
        body = None if row.method == "GET" else b"{}"
        assert request(server, row.method, row.path, body, None)[0] == 200


# ---- keys --------------------------------------------------------------------------------


def row_of(key_rights: KeyRights, *, is_own: bool) -> KeyRights:
    """The row that counts for a key of this row; for one of somebody else, the next that fits."""
    if "{joined}" in key_rights.prefix and not is_own:
        return next(row for row in KEYS if row.prefix == "rounds/")
    return key_rights


def is_answered(server: RendezvousServer, token: str, operation: Operation) -> list[bool]:
    """Whether a batch and the same one over aiohttp are carried out."""
    answered = []
    for headers in ({}, NOT_PLAIN):
        body = msgspec.json.encode(wire.KVBatch((operation,), uuid.uuid4().hex))
        status, _, answer = request(server, "POST", wire.BATCH_PATH, body, token, **headers)
        answered.append(not is_refused(status, answer))
    return answered


@pytest.mark.parametrize("row", [*KEYS, USERS], ids=lambda row: row.prefix or "users")
@pytest.mark.parametrize("is_own", [True, False], ids=["own", "others"])
def test_keys_of_a_row_are_written_and_read_by_its_roles(
    server: RendezvousServer, row: KeyRights, is_own: bool
) -> None:
    counts = row_of(row, is_own=is_own)
    is_bound = "{own}" in row.prefix
    for role, (token, own) in TOKENS.items():
        name = own if is_own else STRANGER
        prefix = row.prefix.replace("{own}", name)
        prefix = prefix.replace("{joined}", JOINED if is_own else NOT_JOINED) or "mine/"
        key = f"{prefix}x"
        is_joined = role is token_roles.WORKER or "{joined}" not in counts.prefix
        may_write = role in counts.writers and is_joined and (is_own or not is_bound)
        may_read = role in counts.readers and (is_own or not is_bound)
        if role is Role.DRIVER:
            may_write, may_read = bool(row.writers), True
        # A lease without a value: nothing else is written by every role that writes.
        assert is_answered(server, token, Set(key, lease=1.0)) == [may_write] * 2, role
        assert is_answered(server, token, Get((key,))) == [may_read] * 2, role
