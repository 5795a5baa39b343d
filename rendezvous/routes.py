"""The HTTP routes of the key-value store.

| route | answer |
|---|---|
| `GET /healthz` | 200 without a token, for load balancers and people |
| `PUT /v1/kv/{scope}/{key}[?lease=S]` | 204, raw bytes stored, `X-Revision` |
| `GET /v1/kv/{scope}/{key}[?wait=S][&after=REV]` | 200, raw bytes, `X-Revision`; or 404 |
| `DELETE /v1/kv/{scope}/{key}` | 204, or 404 if there was nothing |
| `POST /v1/kv:batch` | `wire.BatchReply` for `wire.KVBatch` |

A GET whose wait runs out is answered 408 `timed_out`: ask again. Keys below a sealed prefix
are answered 410 `sealed`. In the store, scope and key are one name, `scope/key`.
"""

from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from rendezvous import wire
from rendezvous.service import StoreService
from rendezvous.web import JSON, Problem, read_json

R = TypeVar("R")


class KVQuery(Struct, frozen=True):
    """The key and the query of a single key's route; times are seconds."""

    key: wire.Key
    wait: wire.Seconds = 0.0
    after: Annotated[int, Meta(ge=0)] = 0
    lease: Annotated[float, Meta(ge=0.0, le=wire.MAX_LEASE_S)] = 0.0  # 0: none


class KVRoutes:
    """Handlers of the routes above."""

    def __init__(self, service: StoreService) -> None:
        self._service = service

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        app.router.add_get(wire.HEALTH_PATH, self.health)
        app.router.add_post(wire.BATCH_PATH, self.batch)
        key = wire.KV_PREFIX + "/{scope}/{key:.+}"
        app.router.add_get(key, self.get, allow_head=False)
        app.router.add_put(key, self.put)
        app.router.add_delete(key, self.delete)

    async def health(self, _request: web.Request) -> web.Response:
        """Answer that the server is up."""
        return web.Response(body=b'{"status":"ok"}', content_type=JSON)

    async def batch(self, request: web.Request) -> web.Response:
        """Carry out many operations; a repeat of the same request changes nothing."""
        batch = await read_json(request, wire.decode_batch)
        results = await self._service.carry_out(batch.operations, batch.write_id)
        return web.Response(body=wire.encode_reply(results), content_type=JSON)

    async def get(self, request: web.Request) -> web.Response:
        """Answer with a value as it was stored, at once or when it is newer than `after`."""
        query = _read(request, request.query)
        key = query.key
        found = await self._one(wire.Get((key,), query.wait, query.after), wire.Entries)
        entry = found.entries.get(key)
        if found.timed_out:
            held = f"revision {entry.revision}" if entry else "nothing"
            message = f"key {key!r} holds {held} after {query.wait:g} s"
            raise Problem(408, "timed_out", message, "ask again")
        if entry is None:
            raise Problem(404, "not_found", f"no key {key!r}", "?wait=S waits until it is written")
        headers = {wire.REVISION_HEADER: str(entry.revision)}
        return web.Response(
            body=entry.value, content_type="application/octet-stream", headers=headers
        )

    async def put(self, request: web.Request) -> web.Response:
        """Store the body as it is, with a lease if one is given."""
        query = _read(request, request.query)
        put = wire.Set(query.key, await request.read(), query.lease or None)
        written = await self._one(put, wire.Written)
        return web.Response(status=204, headers={wire.REVISION_HEADER: str(written.revision)})

    async def delete(self, request: web.Request) -> web.Response:
        """Delete one key."""
        key = _read(request, {}).key
        if (await self._one(wire.Delete(key), wire.Number)).number == 0:
            raise Problem(404, "not_found", f"no key {key!r}")
        return web.Response(status=204)

    async def _one(self, operation: wire.Operation, kind: type[R]) -> R:
        (result,) = await self._service.carry_out((operation,))
        return wire.expect(result, kind)


def _read(request: web.Request, query: Mapping[str, str]) -> KVQuery:
    key = f"{request.match_info['scope']}/{request.match_info['key']}"
    try:
        return msgspec.convert({**query, "key": key}, KVQuery, strict=False)
    except msgspec.ValidationError as error:
        raise Problem(422, "invalid", f"the query has the wrong form: {error}") from error
