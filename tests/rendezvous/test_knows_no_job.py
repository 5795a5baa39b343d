"""`rendezvous` is a library of its own: its code has no path, no key and no word of a job."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rendezvous
from elastic_driver import contract, token_roles
from elastic_driver.runtime.api import ROUTES
from rendezvous import wire

FILES = sorted(Path(rendezvous.__file__).parent.glob("*.py"))
STORE = {wire.BATCH_PATH, wire.HEALTH_PATH, f"{wire.KV_PREFIX}/{{scope}}/{{key}}"}
PATHS = {row.template for row in ROUTES}
PATHS |= {value for name, value in vars(contract).items() if name.endswith("_PATH")}
PATHS -= STORE | {"/"}
SCOPES = {
    *contract.PASSING_SCOPES,
    *(row.prefix.partition("/")[0] + "/" for row in token_roles.KEYS),
}
WORDS = {"rank", "ranks", "shard", "shards", "round", "rounds", "plan", "plans"}


def strings(tree: ast.AST) -> Iterator[str]:
    """All strings of a module but its docstrings."""
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def names(tree: ast.AST) -> Iterator[str]:
    """All names of a module: of variables, attributes, arguments, functions and classes."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str) and name not in dir(builtins):
                yield name


def words(name: str) -> set[str]:
    """The words of a name, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_code_has_no_path_no_key_and_no_word_of_a_job(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = [text for text in strings(tree) for path in PATHS if path in text]
    found += [text for text in strings(tree) if text.startswith(tuple(SCOPES))]
    found += [name for name in names(tree) if words(name) & WORDS]
    assert found == []


def test_what_is_looked_for_is_not_nothing() -> None:
    assert {"/login", "/metrics", contract.SCALE_PATH} <= PATHS
    assert {"job/", "rounds/", "agents/", "jobs/"} <= SCOPES
    tree = ast.parse('def next_rank(): "doc"; return "job/spec"')
    assert list(strings(tree)) == ["job/spec"]
    assert [name for name in names(tree) if words(name) & WORDS] == ["next_rank"]
