"""The tables of docs/security.md about rights, made from those of the code.

    python -m tests.rights.tables

prints them.
"""

from __future__ import annotations

from collections.abc import Iterator

from elastic_driver.rights import KEYS, OPEN, ROUTES, USERS
from rendezvous.access import Roles
from rendezvous.auth import Role

ORDER = [role for role in Role if role is not Role.DRIVER]


def names(roles: Roles) -> str:
    return ", ".join(role.value for role in ORDER if role in roles) or "–"


def tables() -> str:
    """Both tables, in Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "| keys | hold | written by | read by |"
    yield "|---|---|---|---|"
    for row in (*KEYS, USERS):
        prefix = f"`{row.prefix}`" if row.prefix else "all others"
        yield f"| {prefix} | {row.holds} | {names(row.writers)} | {names(row.readers)} |"
    yield ""
    yield "| route | used by |"
    yield "|---|---|"
    for path in sorted(OPEN):
        yield f"| `{path}` | everybody, without a token |"
    by_roles: dict[Roles, list[str]] = {}
    for right in ROUTES:
        by_roles.setdefault(right.roles, []).append(f"`{right.method} {right.path}`")
    for roles, routes in by_roles.items():
        yield f"| {' '.join(routes)} | {names(roles)} |"


if __name__ == "__main__":
    print(tables(), end="")
