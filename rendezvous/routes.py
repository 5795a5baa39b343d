"""The HTTP routes of the key-value store.

| route | answer |
|---|---|
| `GET /healthz` | 200 without a token, for load balancers and people |
| `PUT /v1/kv/{scope}/{key}[?lease=S]` | 204, raw bytes stored, `X-Revision` |
| `GET /v1/kv/{scope}/{key}[?wait=S][&after=REV]` | 200, raw bytes, `X-Revision`; or 404 |
| `DELETE /v1/kv/{scope}/{key}` | 204, or 404 where there was nothing |
| `POST /v1/kv:batch` | `wire.BatchReply` for `wire.KVBatch` |

A GET whose wait runs out is answered 408 `timed_out`: ask again. Keys below a sealed prefix
are answered 410 `sealed`. In the store, scope and key are one name, `scope/key`.
"""

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from rendezvous import wire
from rendezvous.repeats import Repeats
from rendezvous.service import StoreService
from rendezvous.web import JSON, Problem, read_json

_STATUS = {"sealed": 410, "too_large": 413, "not_a_number": 409}


class KVQuery(Struct, frozen=True):
    """The query of a single key's route; times are seconds."""

    wait: wire.Seconds = 0.0
    after: Annotated[int, Meta(ge=0)] = 0
    lease: Annotated[float, Meta(ge=0.0, le=wire.MAX_LEASE_S)] = 0.0  # 0: none


class KVRoutes:
    """Handlers of the routes above."""

    def __init__(
        self, service: StoreService, repeats: Repeats, encode_reply: wire.ReplyEncoder
    ) -> None:
        self._service, self._repeats, self._encode_reply = service, repeats, encode_reply

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
        if batch.reads_only:
            results = await self._service.carry_out(batch.operations)
        else:
            results = await self._repeats.results(batch.request_id, batch.operations)
        return web.Response(body=self._encode_reply(results), content_type=JSON)

    async def get(self, request: web.Request) -> web.Response:
        """Answer with a value as it was stored, at once or when it is newer than `after`."""
        key = _key(request)
        query = _query(request)
        found = await self._one(wire.Get((key,), query.wait, query.after))
        assert isinstance(found, wire.Entries)  # noqa: S101 - the answer to Get
        entry = found.entries.get(key)
        if found.timed_out:
            held = f"revision {entry.revision}" if entry else "nothing"
            raise Problem(
                408, "timed_out", f"key {key!r} holds {held} after {query.wait:g} s", "ask again"
            )
        if entry is None:
            raise Problem(404, "not_found", f"no key {key!r}", "?wait=S waits until it is written")
        return web.Response(
            body=entry.value,
            content_type="application/octet-stream",
            headers={wire.REVISION_HEADER: str(entry.revision)},
        )

    async def put(self, request: web.Request) -> web.Response:
        """Store the body as it is, with a lease if one is given."""
        key = _key(request)
        lease = _query(request).lease or None
        written = await self._one(wire.Set(key, await request.read(), lease))
        assert isinstance(written, wire.Written)  # noqa: S101 - the answer to Set
        return web.Response(status=204, headers={wire.REVISION_HEADER: str(written.revision)})

    async def delete(self, request: web.Request) -> web.Response:
        """Delete one key."""
        key = _key(request)
        if await self._one(wire.Delete(key)) == wire.Number(0):
            raise Problem(404, "not_found", f"no key {key!r}")
        return web.Response(status=204)

    async def _one(self, operation: wire.Operation) -> wire.Result:
        (result,) = await self._service.carry_out((operation,))
        if isinstance(result, wire.StoreRefusal):
            raise Problem(_STATUS.get(result.code, 409), result.code, result.message)
        return result


def _key(request: web.Request) -> str:
    key = f"{request.match_info['scope']}/{request.match_info['key']}"
    if len(key) > wire.MAX_KEY_CHARS:
        raise Problem(
            422, "invalid", f"the key has {len(key)} characters, over {wire.MAX_KEY_CHARS}"
        )
    return key


def _query(request: web.Request) -> KVQuery:
    try:
        return msgspec.convert(dict(request.query), KVQuery, strict=False)
    except msgspec.ValidationError as error:
        raise Problem(422, "invalid", f"the query has the wrong form: {error}") from error
