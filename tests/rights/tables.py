"""The tables of docs/security.md and docs/protocol.md about rights and routes, made from the rows.

    python -m tests.rights.tables

prints them.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Any, get_args

from elastic_driver.runtime.api import ROUTES
from elastic_driver.token_roles import ALL, KEYS, USERS
from rendezvous.access import Roles
from rendezvous.auth import Role
from rendezvous.routes import JSON, Route

ORDER = [Role.OPERATOR, Role.READER, *ALL]


def names(roles: Roles) -> str:
    return ", ".join(role.value for role in ORDER if role in roles) or "–"


def tables() -> str:
    """The tables of docs/security.md: keys, and routes by those who may use them; in Markdown."""
    return "\n".join(_rights()) + "\n"


def _rights() -> Iterator[str]:
    yield "| keys | hold | written by | read by |"
    yield "|---|---|---|---|"
    for row in (*KEYS, USERS):
        prefix = f"`{row.prefix}`" if row.prefix else "all others"
        yield f"| {prefix} | {row.holds} | {names(row.writers)} | {names(row.readers)} |"
    yield ""
    yield "| route | used by |"
    yield "|---|---|"
    by_roles: dict[Roles | None, list[str]] = {}
    for route in ROUTES:
        by_roles.setdefault(route.roles, []).append(f"`{route.method} {route.template}`")
    for roles, routes in by_roles.items():
        who = "everybody, without a token" if roles is None else names(roles)
        yield f"| {' '.join(routes)} | {who} |"


def routes_table() -> str:
    """The table of docs/protocol.md: what each route takes and answers, in Markdown."""
    return "\n".join(_routes()) + "\n"


def _routes() -> Iterator[str]:
    yield "| route | takes | answers | does |"
    yield "|---|---|---|---|"
    for row in ROUTES:
        route = f"`{row.method} {row.template}{_query(row)}`"
        takes = _message(row.body) + (" or nothing" if row.optional and _message(row.body) else "")
        good = " or ".join(filter(None, [_message(row.answer), *(f"`{m}`" for m in row.more)]))
        errors = "".join(f"; {error[:4]}`{error[4:]}`" for error in row.errors)
        does = row.summary.rstrip(".") + (f"; {row.note}" if row.note else "")
        yield f"| {route} | {takes} | {row.status} {good}".rstrip() + f"{errors} | {does} |"


def _query(row: Route) -> str:
    fields = row.query.__struct_fields__ if row.query else ()
    given = [f"{name}=…" for name in fields if f"{{{name}}}" not in row.template]
    return f"[?{'&'.join(given)}]" if given else ""


def _message(kind: Any) -> str:
    """A message as the table names it: its types, or its media type."""
    if kind is None or (isinstance(kind, type) and not getattr(kind, "__struct_fields__", True)):
        return ""
    if isinstance(kind, str):
        return f"`{kind}`"
    if isinstance(kind, UnionType):
        kinds = get_args(kind)
        return " or ".join(map(_message, kinds)) if len(kinds) <= 3 else "one of many events"
    if not isinstance(kind, type):
        return f"`{JSON}`"
    if kind.__name__.endswith("Body"):
        return ", ".join(f"`{field}`" for field in kind.__struct_fields__)
    return f"`{kind.__name__}`"


if __name__ == "__main__":
    print(tables(), end="\n")
    print(routes_table(), end="")
