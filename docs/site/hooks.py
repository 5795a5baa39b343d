"""Adds to the site (mkdocs.yml) what does not stand in docs/, and checks links to files beside it.

The added pages are README.md, SECURITY.md and CHANGELOG.md, the help of all commands, the public
names of Python, and the routes of HTTP. The last three are made from the code. A link to a file
of the repository that is no page becomes its name, for the site has only pages; a link to a file
that does not exist is a warning, which `mkdocs build --strict` turns into an error.
"""

from __future__ import annotations

import json
import logging
import os.path
import re
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import elastic_driver
from elastic_driver.features.joining.driver import JoinedNodes, NodeRules
from elastic_driver.features.page.routes import PAGE_FILES
from elastic_driver.runtime import api
from elastic_driver.runtime.api import ROUTES, DriverRoutes, job_access
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.output_routes import AgentsOutput, LogRoutes
from elastic_driver.runtime.worker_logs import WorkerLogs
from launcher.ctl_commands import catalog
from launcher.options import given as run_help
from rendezvous.auth import make_token
from rendezvous.server import RendezvousServer

ROOT = Path(__file__).resolve().parent.parent.parent
_BESIDE = ("README.md", "SECURITY.md", "CHANGELOG.md")
_SHIM = "assets/iframe-worker.js"
_CDN_SHIM = "https://unpkg.com/iframe-worker/shim"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_log = logging.getLogger("mkdocs.plugins.elastic_driver")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation: the decisions, and at its end the pages that it does not name."""
    nav: list[Any] = config.nav or []
    entries = [entry for section in nav for pages in section.values() for entry in pages]
    named = {page for e in entries for page in ([e] if isinstance(e, str) else e.values())}
    others = sorted(p.name for p in (ROOT / "docs").glob("*.md") if p.name not in named)
    decisions = sorted(f"adr/{p.name}" for p in (ROOT / "docs/adr").glob("*.md"))
    config.nav = [*nav, *([{"More": others}] if others else []), {"Decisions": decisions}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not stand in docs/."""
    pages = {_page_of(name): (ROOT / name).read_text() for name in _BESIDE}
    pages["reference/commands.md"] = commands_page()
    pages["reference/python.md"] = python_page()
    pages["reference/http.md"] = http_page()
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    shim = (ROOT / "docs/site/iframe-worker.js").read_text()
    files.append(File.generated(config, _SHIM, content=shim))
    return files


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Load the script that makes search work in local files from the site, not from a CDN."""
    return output.replace(_CDN_SHIM, os.path.relpath(_SHIM, os.path.dirname(page.url) or "."))


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same for the pages that are no page of ours (404.html)."""
    return output_content.replace(_CDN_SHIM, f"/{_SHIM}")


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Turn links to files of the repository into links of the site, or into names."""
    source = page.file.src_uri
    here = "" if source in map(_page_of, _BESIDE) else "docs/" + os.path.dirname(source)

    def translated(found: re.Match[str]) -> str:
        picture, text, target, anchor = found.groups()
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = os.path.normpath(os.path.join(here, target))
        inside = _page_of(path) if path in _BESIDE else path.removeprefix("docs/")
        if files.get_file_from_path(inside) is not None:
            link = os.path.relpath(inside, os.path.dirname(source) or ".")
            return f"{picture}[{text}]({link}{anchor or ''})"
        if not (ROOT / path).exists():
            _log.warning("%s links to %s, which does not exist", source, target)
        return text if "`" in text or text == path else f"{text} (`{path}`)"

    outside_blocks = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if number % 2 else _LINK.sub(translated, part)
        for number, part in enumerate(outside_blocks)
    )


def _page_of(name: str) -> str:
    return "index.md" if name == "README.md" else name


def commands_page() -> str:
    """Return the page with the help of all commands."""
    parts = ["# Commands", "## elasticrun", _block(run_help.render_help())]
    for command in catalog.elasticctl():
        parts += [f"## elasticctl {command.name}", command.text]
        rows = [
            (" ".join(filter(None, [", ".join(a.names), a.metavar])), a.help)
            for a in command.arguments
        ]
        if rows:
            parts.append(
                _table(("argument", "meaning"), ((f"`{name}`", text) for name, text in rows))
            )
        if command.follows:
            parts.append("Options of `elasticrun` may follow.")
    return "\n\n".join(parts) + "\n"


def python_page() -> str:
    """Return the page of the public names of Python."""
    head = (
        "# Python API\n\n`import elastic_driver as elastic` gives these names. Each is loaded on "
        "first use; the import itself loads no torch."
    )
    modules = elastic_driver._MODULES
    names = sorted(elastic_driver.__all__, key=str.lower)
    return "\n\n".join([head, *(f"::: elastic_driver.{modules[n]}.{n}" for n in names)]) + "\n"


def http_page() -> str:
    """Return the page of the driver's routes and their messages, from its OpenAPI document."""
    document = _document()
    parts = [
        "# HTTP API",
        "A driver answers these requests; `GET /v1/openapi.json` is the same for programs. Each "
        "needs `Authorization: Bearer TOKEN`, where no other rule is given. An error is "
        '`{"error": {"code", "message", "hint"}}`. More in [protocol](../protocol.md), and on '
        "tokens and their rights in [security](../security.md).",
    ]
    of_api = {p: m for p, m in document["paths"].items() if p not in PAGE_FILES}
    for path, methods in sorted(of_api.items()):
        for method, entry in methods.items():
            parts += _route(method.upper(), path, entry)
    parts += ["## Messages"]
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts += [f"### {name}", schema.get("description", "").partition("\n\n")[0]]
        fields = [
            (f"`{field}`", _kind(kind), _default(kind))
            for field, kind in schema.get("properties", {}).items()
        ]
        if fields:
            parts.append(_table(("field", "type", "default"), fields))
    return "\n\n".join(filter(None, parts)) + "\n"


def _route(method: str, path: str, entry: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {method} {path}"
    yield entry["summary"]
    rows = []
    for parameter in entry["parameters"]:
        rows.append((f"`{parameter['name']}` ({parameter['in']})", _kind(parameter["schema"])))
    if "requestBody" in entry:
        rows.append(("body", _contents(entry["requestBody"]["content"])))
    for status, answer in entry["responses"].items():
        if status != "default":
            rows.append((f"answer {status}", _contents(answer.get("content", {})) or "no content"))
    rows.append(("token", "none" if entry.get("security") == [] else _roles(method, path)))
    yield _table(("part", "type"), rows)


def _roles(method: str, path: str) -> str:
    """Return the roles whose tokens a route takes."""
    found = [row.roles for row in ROUTES if (row.method, row.template) == (method, path)]
    return ", ".join(["driver", *sorted(role.value for roles in found for role in roles or ())])


def _contents(content: Mapping[str, Any]) -> str:
    kinds = []
    for media, value in content.items():
        kinds.append(_kind(value["schema"]) if media == "application/json" else f"`{media}`")
    return ", ".join(kinds)


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return " or ".join(_kind(one) for one in schema[choice])
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value!r}`" for value in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("type", "any"))
    if kind == "array":
        kind = f"list of {_kind(schema.get('items') or {})}" if schema.get("items") else "list"
    elif kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        kind = f"object of {_kind(schema['additionalProperties'])}"
    limits = [
        f"{word} {schema[key]}"
        for key, word in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
            ("maxLength", "length at most"),
            ("maxItems", "items at most"),
        )
        if key in schema
    ]
    return ", ".join([kind, *limits])


def _default(schema: Mapping[str, Any]) -> str:
    return f"`{schema['default']!r}`" if "default" in schema else ""


def _document() -> dict[str, Any]:
    """Return the OpenAPI document of a driver with all routes."""
    token = make_token()
    log = EventLog(None, clock=lambda: 0.0, on_broken=lambda _: None)
    nodes = JoinedNodes(NodeRules("run", "1", 30.0, 1))
    logs = LogRoutes(WorkerLogs(Path("nowhere"), 0, lambda _: None))
    driver: Any = SimpleNamespace(post=None, history=None)  # no other request is answered
    routes = DriverRoutes(driver, log, nodes, AgentsOutput(lambda _: None), logs=logs)
    with RendezvousServer(token=token, access=job_access(), routes=routes.add_to) as server:
        headers = {"Authorization": f"Bearer {token}"}
        client = HTTPConnection("127.0.0.1", server.port, timeout=30)
        client.request("GET", api.OPENAPI_PATH, headers=headers)
        document: dict[str, Any] = json.load(client.getresponse())
        client.close()
    log.close()
    return document


def _table(heads: tuple[str, ...], rows: Any) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines
    )


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"
