"""The HTTP routes of the key-value store.

In the store, scope and key are one name, `scope/key`. A GET whose wait runs out is answered 408
`timed_out`: ask again. Keys below a sealed prefix are answered 410 `sealed`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from rendezvous import wire
from rendezvous.access import NOBODY, KeyRights, Roles, Table
from rendezvous.auth import Role
from rendezvous.fairness import owner_of
from rendezvous.routes import (
    ACCESS,
    BINARY,
    JSON,
    Problem,
    Route,
    caller_of,
    forbidden,
    mount,
    read_json,
)
from rendezvous.service import StoreService

T = TypeVar("T")


class KVQuery(Struct, frozen=True):
    """The key and the query of a single key's route; times are seconds."""

    key: wire.Key
    wait: wire.Seconds = 0.0
    after: Annotated[int, Meta(ge=0)] = 0
    lease: Annotated[float, Meta(ge=0.0, le=wire.MAX_LEASE_S)] = 0.0  # 0: none


class Healthy(Struct, frozen=True):
    """The answer of a server that is up."""

    status: str


class KVRoutes:
    """The handlers."""

    def __init__(self, service: StoreService) -> None:
        self._service = service

    async def health(self, _request: web.Request) -> web.Response:
        """Answer that the server is up."""
        return web.Response(body=b'{"status":"ok"}', content_type=JSON)

    async def batch(self, request: web.Request) -> web.Response:
        """Carry out many operations; a repeat of the same request changes nothing."""
        batch = await read_json(request, wire.decode_batch)
        _check(request, batch.operations)
        caller = caller_of(request)
        write_id, owner = caller.own_id(batch.write_id), owner_of(caller)
        results = await self._service.carry_out(batch.operations, write_id, owner=owner)
        return web.Response(body=wire.encode_reply(results), content_type=JSON)

    async def get(self, request: web.Request) -> web.Response:
        """Answer with a value as it was stored, at once or when it is newer than `after`."""
        query = _read(request, request.query)
        key = query.key
        asked = wire.Get((key,), query.wait, query.after)
        found = await self._one(request, asked, wire.Entries)
        entry = found.entries.get(key)
        if found.timed_out:
            held = f"revision {entry.revision}" if entry else "nothing"
            message = f"key {key!r} holds {held} after {query.wait:g} s"
            raise Problem(408, "timed_out", message, "ask again")
        if entry is None:
            raise Problem(404, "not_found", f"no key {key!r}", "?wait=S waits until it is written")
        headers = {wire.REVISION_HEADER: str(entry.revision)}
        binary = "application/octet-stream"
        return web.Response(body=entry.value, content_type=binary, headers=headers)

    async def put(self, request: web.Request) -> web.Response:
        """Store the body as it is, with a lease if one is given."""
        query = _read(request, request.query)
        put = wire.Set(query.key, await request.read(), query.lease or None)
        written = await self._one(request, put, wire.Written)
        return web.Response(status=204, headers={wire.REVISION_HEADER: str(written.revision)})

    async def delete(self, request: web.Request) -> web.Response:
        """Delete one key."""
        key = _read(request, {}).key
        if (await self._one(request, wire.Delete(key), wire.Number)).number == 0:
            raise Problem(404, "not_found", f"no key {key!r}")
        return web.Response(status=204)

    async def _one(self, request: web.Request, operation: wire.Operation, kind: type[T]) -> T:
        _check(request, (operation,))
        owner = owner_of(caller_of(request))
        (result,) = await self._service.carry_out((operation,), owner=owner)
        return wire.expect(result, kind)


def _check(request: web.Request, operations: Sequence[wire.Operation]) -> None:
    """Raise Problem if the caller may not carry out one of these."""
    sentence = request.app[ACCESS].refused(caller_of(request), operations)
    if sentence is not None:
        raise forbidden(sentence)


def _read(request: web.Request, query: Mapping[str, str]) -> KVQuery:
    key = f"{request.match_info['scope']}/{request.match_info['key']}"
    try:
        return msgspec.convert({**query, "key": key}, KVQuery, strict=False)
    except msgspec.ValidationError as error:
        raise Problem(422, "invalid", f"the query has the wrong form: {error}") from error


_KEY = wire.KV_PREFIX + "/{scope}/{key:.+}"


def store_rows(users: Roles, readers: Roles, of_batches: Roles) -> tuple[Route, ...]:
    """Return the rows of the store.

    `users` may write single keys, these and `readers` may read them, and `of_batches` may send
    batches; the rights to the keys themselves are a table of their own (`access`).
    """
    return (
        Route("GET", wire.HEALTH_PATH, None, KVRoutes.health, Healthy),
        Route("POST", wire.BATCH_PATH, of_batches, KVRoutes.batch, wire.BatchReply, wire.KVBatch),
        Route(
            "GET",
            _KEY,
            readers,
            KVRoutes.get,
            BINARY,
            query=KVQuery,
            errors=("404 not_found", "408 timed_out"),
            note="with `X-Revision`",
        ),
        Route(
            "PUT",
            _KEY,
            users,
            KVRoutes.put,
            body=BINARY,
            query=KVQuery,
            note="the answer has `X-Revision`",
        ),
        Route("DELETE", _KEY, users, KVRoutes.delete, errors=("404 not_found",)),
    )


def plain_store(*roles: Role) -> Table:
    """Return a table by which every token may use the store, and readers only look.

    All other routes are the driver's. `roles`: see `Table`.
    """
    writers = frozenset({Role.OPERATOR, *roles})
    everybody = writers | {Role.READER}
    return Table(
        routes=store_rows(writers, everybody, everybody),
        keys=(),
        others=KeyRights("", writers, everybody, "all keys"),
        roles=roles,
    )


PLAIN_STORE = plain_store()


def mount_store(app: web.Application, service: StoreService) -> None:
    """Mount the routes."""
    part = KVRoutes(service)
    mount(app, store_rows(NOBODY, NOBODY, NOBODY), part)  # who may use them is not asked here
    app.router.add_head(wire.HEALTH_PATH, part.health)  # load balancers may send it
