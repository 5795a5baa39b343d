"""`GET /v1/openapi.json`: an OpenAPI document of all routes, made from the router and the messages.

The routes are those of the server's router. Their bodies, queries and answers are the types that
the handlers decode and encode, so bounds and patterns in the document are those of the code.
`OPERATIONS` says which types belong to which route; a test compares it with the router. The form is
OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.1.html), whose schemas are JSON Schema 2020-12.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from elastic_driver import contract, rights
from elastic_driver.job import status
from elastic_driver.policies import shard_messages as shards
from elastic_driver.policies import tf_messages as tf
from elastic_driver.policies.nodecheck.messages import TaskEnded
from elastic_driver.runtime import machine_api, page_routes
from elastic_driver.runtime.worker_logs import LogPage, LogQuery
from elastic_driver.words import joining as join
from elastic_driver.words import orders as documents
from elastic_driver.words import progress as measured
from elastic_driver.words import wire_events as ev
from elastic_driver.words.orders import Count
from elastic_driver.words.progress import LogsTaken, OutputLines, WorkerLines
from rendezvous import wire
from rendezvous.web import JSON, KVQuery

OPENAPI_PATH = "/v1/openapi.json"
_BINARY, _TEXT, _STREAM = "application/octet-stream", "text/plain", "text/event-stream"
_IN_PATH = re.compile(r"{(\w+)}")
_FILE = "*/*"
_REFERENCE = "#/components/schemas/{name}"
_METHODS = ("GET", "PUT", "POST", "DELETE")
Schema = dict[str, Any]


class Accepted(msgspec.Struct, frozen=True):
    """The answer to a request that the driver carries out later."""

    accepted: bool


class Healthy(msgspec.Struct, frozen=True):
    """The answer of a server that is up."""

    status: str


class LoggedEvents(msgspec.Struct, frozen=True):
    """Lines of the event log, and the number of the last one."""

    events: tuple[dict[str, Any], ...]
    last: int


class Since(msgspec.Struct, frozen=True):
    """The number of the last event that the reader knows."""

    since: Count = 0


class HistorySince(msgspec.Struct, frozen=True):
    """The time after which a reader wants the history, in unix seconds."""

    since: measured.Amount = 0.0


class Operation(NamedTuple):
    """The types of one route's query, body and answer; a media type where there is no JSON."""

    answer: Any = None  # None: no content
    body: Any = None
    query: type[msgspec.Struct] | None = None
    code: int = 200
    optional: bool = False  # the body may be empty
    more: tuple[str, ...] = ()  # other media types of the answer


_KEY = wire.KV_PREFIX + "/{scope}/{key}"
_NO_CONTENT = Operation(code=204)
# By the type of the request, for the routes of `machine_api`.
_ANSWERS: dict[type[msgspec.Struct], Any] = {
    shards.NextRequest: shards.NextAnswer,
    shards.DoneRequest: shards.DoneAnswer,
    shards.ResumeRequest: shards.Resumed,
    shards.AgreeRequest: shards.Agreed,
    shards.ReadStatus: shards.ShardStatus,
    shards.ReadCheckpoint: shards.ShardCheckpoint,
    tf.ClusterSpecRequest: tf.ClusterSpec,
    tf.LookRequest: tf.WaitingNodes,
    tf.BarrierRequest: tf.Passed,
    tf.SynchronizeRequest: tf.Synchronized,
}
# By method and path; those of `machine_api` and of users' requests are added below.
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", wire.HEALTH_PATH): Operation(Healthy),
    ("POST", wire.BATCH_PATH): Operation(wire.BatchReply, wire.KVBatch),
    ("GET", _KEY): Operation(_BINARY, query=KVQuery),
    ("PUT", _KEY): Operation(body=_BINARY, query=KVQuery, code=204),
    ("DELETE", _KEY): _NO_CONTENT,
    ("GET", contract.EVENTS_PATH): Operation(LoggedEvents, query=Since, more=(_STREAM,)),
    ("POST", contract.EVENTS_PATH): Operation(Accepted, ev.WireEvent | TaskEnded, code=202),
    ("GET", contract.STATUS_PATH): Operation(status.JobStatus),
    ("GET", contract.HISTORY_PATH): Operation(measured.History, query=HistorySince),
    ("GET", contract.METRICS_PATH): Operation(_TEXT),
    ("GET", contract.LIVE_PATH): Operation(_STREAM),
    ("GET", contract.LOGIN_PATH): Operation(page_routes.LoginState),
    ("POST", contract.LOGIN_PATH): Operation(page_routes.LoginState, page_routes.Login),
    ("POST", contract.LOGOUT_PATH): Operation(body=page_routes.Nothing, code=204, optional=True),
    ("POST", contract.LOGIN_CODES_PATH): Operation(
        documents.LoginCode, page_routes.Nothing, optional=True
    ),
    **{(("GET", path)): Operation(_FILE) for path in ("/", *rights.PAGE_FILES)},
    ("GET", OPENAPI_PATH): Operation(dict[str, Any]),
    ("POST", contract.OUTPUT_PATH): Operation(Accepted, OutputLines, code=202),
    ("POST", contract.LOGS_PATH): Operation(LogsTaken, WorkerLines, code=202),
    ("GET", contract.LOGS_PATH): Operation(LogPage, query=LogQuery),
    ("POST", join.HELLO_PATH): Operation(join.HelloAnswer, join.Hello),
    ("POST", join.PROOF_PATH): Operation(join.Joined, join.NodeProof),
    ("POST", join.NODES_PATH): Operation(join.Joined, join.NodeReport),
}


def _template(path: str) -> str:
    """Return a path of the router without the patterns of its names."""
    return re.sub(r"{(\w+):[^}]*}", r"{\1}", path)


def _of_machines() -> Iterator[tuple[tuple[str, str], Operation]]:
    for method, path, kind in machine_api.ROUTES:
        answer = _ANSWERS.get(kind)
        code = 200 if answer is not None else 204
        of_query = method == "GET"
        operation = Operation(
            answer, None if of_query else kind, kind if of_query else None, code=code
        )
        yield (method, _template(path)), operation


OPERATIONS.update(_of_machines())


class OpenApi:
    """Handler of the route.

    Args:
        requests: the type of the body for each POST of a user, by path; its fields that stand in
            the path are not in the body.
    """

    def __init__(self, requests: Mapping[str, type[msgspec.Struct]]) -> None:
        self._operations = OPERATIONS | {
            ("POST", path): Operation(Accepted, _without_path(kind, path), code=202, optional=True)
            for path, kind in requests.items()
        }
        self._document = b""

    def add_to(self, app: web.Application) -> None:
        """Mount the route."""
        app.router.add_get(OPENAPI_PATH, self.get, allow_head=False)

    async def get(self, request: web.Request) -> web.Response:
        """Answer with the document of all routes of this server."""
        if not self._document:
            self._document = wire.encode(document(request.app.router, self._operations))
        return web.Response(body=self._document, content_type=JSON)


def routes_of(router: web.UrlDispatcher) -> dict[tuple[str, str], web.AbstractRoute]:
    """Return the routes by method and path, as `OPERATIONS` names them."""
    found = {}
    for route in router.routes():
        if route.resource is not None and route.method in _METHODS:
            found[route.method, route.resource.canonical] = route
    return found


def document(
    router: web.UrlDispatcher, operations: Mapping[tuple[str, str], Operation]
) -> dict[str, Any]:
    """Return the OpenAPI document; a route without types in `operations` is listed all the same."""
    routes = routes_of(router)
    described = {name: operations.get(name, Operation(dict[str, Any])) for name in routes}
    types = [wire.ErrorBody, *(t for o in described.values() for t in _types_of(o))]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schema_of = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in described.items():
        entry = _entry(path, operation, schema_of, components)
        entry["summary"] = _summary(routes[method, path], operation)
        paths.setdefault(path, {})[method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": "elastic-driver", "version": "1"},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _types_of(operation: Operation) -> list[Any]:
    wanted = (operation.answer, operation.body, operation.query)
    return [kind for kind in wanted if kind is not None and not isinstance(kind, str)]


def _entry(
    path: str, operation: Operation, schema_of: Mapping[int, Schema], components: Schema
) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _IN_PATH.findall(path)
    ]
    if operation.query is not None:
        fields = components[operation.query.__name__]["properties"]
        parameters += [
            {"name": name, "in": "query", "schema": schema}
            for name, schema in fields.items()
            if f"{{{name}}}" not in path
        ]
    answer: dict[str, Any] = {"description": "done"}
    if operation.answer is not None:
        answer["content"] = _content(operation.answer, schema_of)
        answer["content"] |= {media: {"schema": {"type": "string"}} for media in operation.more}
    problem = {"description": "refused", "content": _content(wire.ErrorBody, schema_of)}
    entry = {"parameters": parameters, "responses": {str(operation.code): answer} | {
        "default": problem}}  # fmt: skip
    if operation.body is not None:
        content = _content(operation.body, schema_of)
        entry["requestBody"] = {"content": content, "required": not operation.optional}
    if path in rights.OPEN:
        entry["security"] = []
    return entry


def _content(kind: Any, schema_of: Mapping[int, Schema]) -> dict[str, Any]:
    if isinstance(kind, str):
        return {kind: {"schema": {"type": "string"}}}
    return {JSON: {"schema": schema_of[id(kind)]}}


def _summary(route: web.AbstractRoute, operation: Operation) -> str:
    """Return the first line of what the code says about a route."""
    body = operation.body if isinstance(operation.body, type) else operation.query
    told = inspect.getdoc(route.handler) or (body and inspect.getdoc(body)) or ""
    return told.partition("\n")[0]


def _without_path(kind: type[msgspec.Struct], path: str) -> type[msgspec.Struct]:
    """Return the type of the body of a request: its fields that are not in the path."""
    names = _IN_PATH.findall(path)
    fields: list[tuple[str, Any, Any]] = [
        (field.name, field.type, msgspec.NODEFAULT if field.required else field.default)
        for field in msgspec.structs.fields(kind)
        if field.name not in names
    ]
    body = msgspec.defstruct(
        f"{kind.__name__}Body", fields, frozen=True, forbid_unknown_fields=True
    )
    body.__doc__ = kind.__doc__
    return body
