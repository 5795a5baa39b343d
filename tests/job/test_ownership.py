"""Each part of the job owns its state: nobody else writes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.job.job import Job
from elastic_driver.settings import Settings

JOB = Path(__file__).parents[2] / "elastic_driver" / "job"
MODULES = sorted(path.relative_to(JOB).as_posix() for path in JOB.rglob("*.py"))
PARTS = {type(part).__name__ for part in vars(Job(Settings())).values()}
MUTATORS = {"append", "add", "clear", "pop", "discard", "update", "setdefault", "remove", "extend"}


def depth(node: ast.expr) -> int:
    """How many attributes lie between `self` and what is written; −1 where it is not of `self`."""
    steps = 0
    while isinstance(node, ast.Attribute | ast.Subscript):
        steps += isinstance(node, ast.Attribute)
        node = node.value
    return steps if isinstance(node, ast.Name) and node.id == "self" else -1


def written(tree: ast.AST) -> Iterator[ast.expr]:
    """Whatever a module assigns to, deletes, or changes by a method of a container."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                for target in targets:
                    yield from target.elts if isinstance(target, ast.Tuple) else [target]
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                yield target
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in MUTATORS:
                if depth(value) > 1:
                    yield value


def own_fields(tree: ast.Module) -> set[str]:
    """The fields of the records that a module defines; a part writes its own as `self.field`."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    classes = [node for node in classes if node.name not in PARTS]
    return {
        field.target.id
        for one in classes
        for field in one.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def foreign_writes(source: str) -> list[str]:
    """The lines in which a module writes what another one owns."""
    tree = ast.parse(source)
    own = own_fields(tree)
    found = []
    for target in written(tree):
        if not isinstance(target, ast.Attribute | ast.Subscript):
            continue
        holder = target if isinstance(target, ast.Attribute) else target.value
        mine = not isinstance(holder, ast.Attribute) or holder.attr in own or depth(holder) == 1
        if not mine:
            found.append(f"line {target.lineno}: {ast.unparse(target)}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_writes_only_its_own_state(module: str) -> None:
    assert foreign_writes((JOB / module).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "self.ending.end = None",
        "self.rounds.current.state = 1",
        "worker.leaving = ''",
        "self.outcome.losses.clear()",
        "self.workers.workers['a'] = None",
        "del self.fleet.agents['a']",
    ],
)
def test_a_foreign_write_is_found(line: str) -> None:
    assert foreign_writes(f"class Rule:\n    def advance(self, worker):\n        {line}\n") != []


def test_a_part_in_the_same_module_is_foreign_too() -> None:
    module = "class Stacks:\n    asked: int\nclass Hangs:\n    def f(self):\n        {}\n"
    assert foreign_writes(module.format("self.stacks.asked = 1")) != []
    assert foreign_writes(module.format("self.asked = 1")) == []
