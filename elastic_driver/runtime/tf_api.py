"""HTTP routes for an orchestrator of TensorFlow, around the pure `policies.tf.cluster`.

| route | answer |
|---|---|
| `POST /v1/tf/cluster_spec` | `ClusterSpec`, when the next cluster has formed; 408 `timed_out` |
| `GET /v1/tf/waiting_nodes[?address=A]` | `WaitingNodes`; renews the lease of A |
| `POST /v1/tf/barrier` | `Passed`, when every member has come |
| `POST /v1/tf/synchronize` | `Synchronized`: every member's value |

Requests are typed in `policies.tf.messages`. What comes to nothing is answered 408 where time ran
out,
else 409 (422 for a request that can never be met). Everything runs on the server's loop. Times are
seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import count

import msgspec
from aiohttp import web

from elastic_driver import contract
from elastic_driver.policies.tf.cluster import TfCluster
from elastic_driver.policies.tf.messages import (
    Answer,
    BarrierRequest,
    ClusterSpecRequest,
    Passed,
    Refused,
    SynchronizeRequest,
)
from rendezvous.alarm import RENEWAL_S, Alarm
from rendezvous.web import JSON, Problem, json_answer, read_json

_STATUS = {"timed_out": 408, "bad_bounds": 422, "too_large": 413}
_MAX_ADDRESS = 300
_Begin = Callable[[int, float], list[Answer]]

_decode_join = msgspec.json.Decoder(ClusterSpecRequest).decode
_decode_barrier = msgspec.json.Decoder(BarrierRequest).decode
_decode_synchronize = msgspec.json.Decoder(SynchronizeRequest).decode
_encode = msgspec.json.Encoder().encode


class TfRoutes:
    """Handlers of the routes above. `lease`: seconds after which a silent member is lost."""

    def __init__(self, lease: float) -> None:
        self._cluster = TfCluster(lease)
        self._tickets = count(1)
        self._open: dict[int, asyncio.Future[bytes]] = {}
        self._alarm = Alarm(self._expire)

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        app.router.add_post(contract.TF_CLUSTER_SPEC_PATH, self.cluster_spec)
        app.router.add_get(contract.TF_WAITING_NODES_PATH, self.waiting_nodes, allow_head=False)
        app.router.add_post(contract.TF_BARRIER_PATH, self.barrier)
        app.router.add_post(contract.TF_SYNCHRONIZE_PATH, self.synchronize)
        app.on_shutdown.append(self._end)

    async def cluster_spec(self, request: web.Request) -> web.Response:
        """A node wants to be in the next cluster, and waits for it."""
        asked = await read_json(request, _decode_join)
        body = await self._ask(lambda ticket, now: self._cluster.join(ticket, asked, now))
        return web.Response(body=body, content_type=JSON)

    async def waiting_nodes(self, request: web.Request) -> web.Response:
        """Whether the cluster should form anew."""
        address = request.query.get("address")
        if address is not None and len(address) > _MAX_ADDRESS:
            raise Problem(422, "invalid", f"an address has at most {_MAX_ADDRESS} characters")
        found = self._cluster.look(address, asyncio.get_running_loop().time())
        self._alarm.set(self._cluster.deadline())
        return json_answer(found)

    async def barrier(self, request: web.Request) -> web.Response:
        """A member waits for all others."""
        asked = await read_json(request, _decode_barrier)
        tagged = msgspec.structs.replace(asked, tag=f"barrier {asked.tag}")
        body = await self._ask(lambda ticket, now: self._cluster.arrive(ticket, tagged, now))
        return json_answer(msgspec.json.decode(body, type=Passed))

    async def synchronize(self, request: web.Request) -> web.Response:
        """A member gives its value, and waits for those of all others."""
        asked = await read_json(request, _decode_synchronize)
        tagged = msgspec.structs.replace(asked, tag=f"synchronize {asked.tag}")
        body = await self._ask(lambda ticket, now: self._cluster.arrive(ticket, tagged, now))
        return web.Response(body=body, content_type=JSON)

    # ---- inside --------------------------------------------------------------------------

    async def _ask(self, begin: _Begin) -> bytes:
        """The encoded reply to a request; raises Problem where it came to nothing."""
        loop = asyncio.get_running_loop()
        ticket = next(self._tickets)
        future: asyncio.Future[bytes] = loop.create_future()
        self._open[ticket] = future
        try:
            self._deliver(begin(ticket, loop.time()))
            return await future
        finally:
            if self._open.pop(ticket, None) is not None:
                self._cluster.withdraw(ticket, loop.time())
                self._alarm.set(self._cluster.deadline())

    def _deliver(self, answers: Iterable[Answer]) -> None:
        encoded: dict[int, bytes] = {}  # an answer that many wait for is serialised once
        for ticket, _, reply in answers:
            future = self._open.pop(ticket, None)
            if future is None or future.done():
                continue
            if isinstance(reply, Refused):
                status = _STATUS.get(reply.code, 409)
                future.set_exception(Problem(status, reply.code, reply.message, reply.hint))
            else:
                if id(reply) not in encoded:
                    encoded[id(reply)] = _encode(reply)
                future.set_result(encoded[id(reply)])
        self._alarm.set(self._cluster.deadline())

    def _expire(self, now: float, stood_still: float) -> None:
        if stood_still:
            self._cluster.postpone(stood_still + RENEWAL_S)
        self._deliver(self._cluster.expire(now))

    async def _end(self, _app: web.Application) -> None:
        """Turn away those who wait: the server stops."""
        self._alarm.off()
        waiting, self._open = self._open, {}
        for future in waiting.values():
            if not future.done():
                problem = Problem(503, "stopping", "the driver is stopping", "ask its successor")
                future.set_exception(problem)
