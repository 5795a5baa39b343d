"""The document of all routes is complete, and its types are those of the code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from elastic_driver import features
from elastic_driver.features.joining.driver import JoinedNodes, NodeRules
from elastic_driver.runtime.api import OPENAPI_PATH, ROUTES, DriverRoutes, job_access
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.output_routes import AgentsOutput, LogRoutes
from elastic_driver.runtime.worker_logs import WorkerLogs
from rendezvous.routes import collect
from rendezvous.server import RendezvousServer
from tests.rendezvous.common import TOKEN, request
from tests.runtime.test_api import NotingDriver


class Routes:
    """A server with every route that a driver may have."""

    def __init__(self) -> None:
        self.log = EventLog(None, clock=lambda: 1.0, on_broken=lambda _: None)
        nodes = JoinedNodes(NodeRules("run", "1", 30.0, 1))
        output = AgentsOutput(lambda _: None)
        logs = LogRoutes(WorkerLogs(Path("nowhere"), 0, lambda _: None))
        routes = DriverRoutes(NotingDriver(), self.log, nodes, output, logs=logs)
        self.router: web.UrlDispatcher | None = None

        def add(app: web.Application) -> None:
            self.router = app.router
            routes.add_to(app)

        self.server = RendezvousServer(token=TOKEN, access=job_access(), routes=add)

    def served(self) -> set[tuple[str, str]]:
        """The routes of the router."""
        assert self.router is not None
        return {
            (route.method, route.resource.canonical)
            for route in self.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }

    def document(self) -> dict[str, Any]:
        status, _, body = request(self.server, "GET", OPENAPI_PATH)
        assert status == 200
        found: dict[str, Any] = json.loads(body)
        return found


@pytest.fixture
def routes() -> Iterator[Routes]:
    subject = Routes()
    with subject.server:
        yield subject
        subject.log.close()


def test_the_document_has_every_route_of_the_server_and_no_other(routes: Routes) -> None:
    document = routes.document()
    described = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    assert described == routes.served()
    assert all(
        entry["summary"] and (entry.get("requestBody") or method != "post")
        for methods in document["paths"].values()
        for method, entry in methods.items()
    )


def test_every_route_of_the_server_has_a_row_and_the_other_way_round(routes: Routes) -> None:
    rows = [(row.method, row.template) for row in ROUTES]
    assert len(set(rows)) == len(rows)
    assert set(rows) == routes.served()


def test_bounds_of_the_code_are_in_the_document(routes: Routes) -> None:
    document = routes.document()
    schemas = document["components"]["schemas"]
    assert schemas["KVBatch"]["properties"]["operations"]["maxItems"] == 4096
    scale = document["paths"]["/v1/scale"]["post"]
    reference = scale["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    body = schemas[reference.rpartition("/")[2]]
    count = {"type": "integer", "minimum": 1, "maximum": 10**6}
    assert body["properties"] == {"num_proc": {"anyOf": [count, {"type": "null"}]}}
    drain = document["paths"]["/v1/hosts/{host}:drain"]["post"]
    assert [p["name"] for p in drain["parameters"]] == ["host"]
    reference = drain["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert set(schemas[reference.rpartition("/")[2]]["properties"]) == {"reason", "deadline"}
    assert document["paths"]["/healthz"]["get"]["security"] == []


def test_every_reference_of_the_document_leads_somewhere(routes: Routes) -> None:
    document = routes.document()

    def references(part: object) -> Iterator[str]:
        if isinstance(part, dict):
            for key, value in part.items():
                if key == "$ref":
                    yield value
                yield from references(value)
        elif isinstance(part, list):
            for each in part:
                yield from references(each)

    for reference in references(document):
        name = reference.removeprefix("#/components/schemas/")
        assert name in document["components"]["schemas"], reference


def test_the_document_needs_a_token_like_every_route(routes: Routes) -> None:
    assert request(routes.server, "GET", OPENAPI_PATH, token=None)[0] == 401


def test_the_folder_of_a_feature_brings_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "one" / "routes_of_a_test.py").write_text("ROUTES = (1, 2)\n")
    monkeypatch.setattr(features, "__path__", [*features.__path__, str(tmp_path)])
    assert collect(features.chapters("routes_of_a_test")) == (1, 2)
    assert features.chapters("no_such_chapter") == ()
