"""No module outside `worker.torch_seams` uses a private name of torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.job import ROOT

PACKAGES = ("elastic_driver", "rendezvous", "launcher")
SEAMS = ROOT / "elastic_driver" / "worker" / "torch_seams.py"
TREES = {
    path: ast.parse(path.read_text()) for name in PACKAGES for path in (ROOT / name).rglob("*.py")
}
# Private by their underscore alone: of the standard library, of msgspec, and of Horovod's API.
DOCUMENTED = {"_asdict", "_replace", "_current_frames", "_exit", "_getframe", "_saved_state"}
LIBRARY = {"_handle"}  # of ctypes
OWN = ("self", "cls")


def is_stored(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and is_own(node)


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in OWN


def defined(tree: ast.AST) -> Iterator[str]:
    """The names that a module gives to functions, classes, fields and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and is_stored(node):
            yield node.attr


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def mentioned(node: ast.AST) -> list[str]:
    """The private names of other objects that a node of a module mentions."""
    if isinstance(node, ast.Attribute) and not is_own(node):
        return [node.attr] if private(node.attr) else []
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        hidden = any(map(private, (node.module or "").split(".")))
        return [each.name for each in node.names if hidden or private(each.name)]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in BY_NAME:
        name = getattr(
            node.args[-1 if getattr(node.func, "id", "") == "attrgetter" else 1], "value", ""
        )
        return [name] if private(str(name)) else []
    return []


def foreign(tree: ast.AST, ours: frozenset[str]) -> list[str]:
    """The private names in a module that are not ours, each with its line."""
    return [
        f"{name}, line {getattr(node, 'lineno', 0)}"
        for node in ast.walk(tree)
        for name in mentioned(node)
        if name not in ours
    ]


BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "attrgetter")
SEEN_IN_SEAMS = {
    name
    for path, tree in TREES.items()
    if path == SEAMS
    for node in ast.walk(tree)
    for name in mentioned(node)
}
OURS = frozenset((DOCUMENTED | LIBRARY).union(*map(defined, TREES.values())) - SEEN_IN_SEAMS)


@pytest.mark.parametrize("path", TREES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_of_torch_are_used_in_one_room(path: Path) -> None:
    if path != SEAMS:
        assert foreign(TREES[path], OURS) == []


@pytest.mark.parametrize(
    "line",
    [
        "tensor._version",
        "torch._foreach_add_(a, b)",
        "dist._compute(a)",
        "getattr(scaler, '_growth_tracker', None)",
        "from torch.utils.data._utils import signal_handling",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "group._get_backend(device)._get_sequence_number_for_group()",
    ],
)
def test_such_a_name_would_be_found(line: str) -> None:
    assert foreign(ast.parse(line), OURS) != []
