"""The driver's HTTP routes together: the rows of all modules, their rights, and their document.

Each module has its rows beside its handlers (`rendezvous.routes`); a folder of
`elastic_driver.features` may bring its own in `routes.py`. Their handlers get what its
`parts(serving)` returns; without that, the `OpenRequests` of the driver. So a new route is a row in
the module that owns it. Every decision about the job is made in the driver's thread.

`GET /v1/openapi.json` is made from the rows when it is first asked for. Its messages are the types
that the handlers decode and encode, so bounds and patterns in it are those of the code. The form is
OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.1.html), whose schemas are JSON Schema 2020-12.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from elastic_driver import token_roles
from elastic_driver.features import chapters
from elastic_driver.runtime import event_routes, machine_api, status_routes
from elastic_driver.runtime import output_routes as output
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.machine_api import DriverPort
from elastic_driver.runtime.metrics import JobTimes
from elastic_driver.token_roles import AGENTS, WATCHERS, RoundMembers, access_of
from rendezvous import wire
from rendezvous.access import Access
from rendezvous.routes import JSON, Post, Route, collect, mount, short_ways
from rendezvous.store_routes import store_rows

OPENAPI_PATH = "/v1/openapi.json"
_IN_PATH = re.compile(r"{(\w+)}")
_REFERENCE = "#/components/schemas/{name}"
Schema = dict[str, Any]


class OpenApi:
    """The handler of the route; `rows` are those of all routes that a server may have."""

    def __init__(self, rows: Sequence[Route]) -> None:
        self._rows = rows
        self._document = b""

    def add_to(self, app: web.Application) -> None:
        """Mount the route."""
        mount(app, _OPENAPI_ROUTES, self)

    async def get(self, request: web.Request) -> web.Response:
        """Answer with the document of all routes of this server."""
        if not self._document:
            own = {
                (each.method, each.resource and each.resource.canonical)
                for each in request.app.router.routes()
            }
            rows = [row for row in self._rows if (row.method, row.template) in own]
            self._document = wire.encode(openapi_document(rows))
        return web.Response(body=self._document, content_type=JSON)


_OPENAPI_ROUTES = (Route("GET", OPENAPI_PATH, WATCHERS | AGENTS, OpenApi.get, dict[str, Any]),)


def openapi_document(rows: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes."""
    types = [wire.ErrorBody, *(kind for row in rows for kind in _types_of(row))]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schema_of = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        entry = _entry(row, schema_of, components)
        entry["summary"] = row.summary
        paths.setdefault(row.template, {})[row.method.lower()] = entry
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


def _types_of(row: Route) -> list[Any]:
    wanted = (row.answer, row.body, row.query)
    return [kind for kind in wanted if kind is not None and not isinstance(kind, str)]


def _entry(row: Route, schema_of: Mapping[int, Schema], components: Schema) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _IN_PATH.findall(row.template)
    ]
    if row.query is not None:
        fields = components[row.query.__name__]["properties"]
        parameters += [
            {"name": name, "in": "query", "schema": schema}
            for name, schema in fields.items()
            if f"{{{name}}}" not in row.template
        ]
    answer: dict[str, Any] = {"description": "done"}
    if row.answer is not None:
        answer["content"] = _content(row.answer, schema_of)
        answer["content"] |= {media: {"schema": {"type": "string"}} for media in row.more}
    problem = {"description": "refused", "content": _content(wire.ErrorBody, schema_of)}
    entry = {"parameters": parameters, "responses": {str(row.status): answer} | {
        "default": problem}}  # fmt: skip
    if row.body is not None:
        content = _content(row.body, schema_of)
        entry["requestBody"] = {"content": content, "required": not row.optional}
    if row.roles is None:
        entry["security"] = []
    return entry


def _content(kind: Any, schema_of: Mapping[int, Schema]) -> dict[str, Any]:
    if isinstance(kind, str):
        return {kind: {"schema": {"type": "string"}}}
    return {JSON: {"schema": schema_of[id(kind)]}}


_STORE = token_roles.TRAINERS | token_roles.AGENTS
ROUTES: tuple[Route, ...] = (
    *store_rows(_STORE, _STORE, _STORE | token_roles.NODES | token_roles.JOBS),
    *collect((event_routes, status_routes, output)),
    *_OPENAPI_ROUTES,
    *collect(chapters("routes")),
)


def job_access(rounds: RoundMembers | None = None) -> Access:
    """Return what a server of a job or of a Brain checks; `rounds`: who may write which round.

    Without it, no worker is a member of any round.
    """
    return access_of(ROUTES, rounds)


class DriverRoutes:
    """What answers the routes."""

    def __init__(
        self,
        driver: DriverPort,
        log: EventLog,
        nodes: status_routes.Nodes | None = None,
        lines: output.AgentsOutput | None = None,
        *,
        logs: output.LogRoutes | None = None,
        times: JobTimes | None = None,
    ) -> None:
        self.rounds = RoundMembers()
        self.requests = machine_api.OpenRequests(driver.post, self.rounds)
        self.status = status_routes.StatusRoutes(
            driver, log, JobTimes() if times is None else times
        )
        self.events = event_routes.EventRoutes(driver, self.status.status)
        serving = status_routes.Serving(driver, log, self.status, nodes)
        self._parts: list[status_routes.RoutePart] = [self.events, self.status]
        self._parts += [part for part in (lines, logs) if part is not None]
        self._parts += [OpenApi(ROUTES), self.requests]
        for chapter in chapters("routes"):
            if hasattr(chapter, "parts"):
                self._parts += chapter.parts(serving)

    @property
    def posts(self) -> Mapping[str, Post]:
        """What answers POSTs the short way."""
        of_requests = short_ways(machine_api.rows(), self.requests)
        return {**short_ways(event_routes.ROUTES, self.events), **of_requests}

    def add_to(self, app: web.Application) -> None:
        """Mount the routes."""
        for part in self._parts:
            part.add_to(app)
