"""Finds the messages that users see in the sources: errors, refusals, warnings and notes.

A message is what is said when

- an error of ours is made: `ElasticError` and every class derived from it, also in its own
  `__init__`, or by a function whose result is raised; a `ValueError` where words of the command
  line or lists of hosts are read, and what `matching` says that an option needs;
- a request is refused: `Problem`;
- a line is written: `say`, `note` and their like, a log's `warning` and `error`, `print` to stderr;
- the job or an agent ends for a reason: `end`, `_end`, `fail` and `finish`;
- a function of `TELLING` returns it;
- a pair of one of `TABLES` says what the words of another program mean.

Every part that differs from case to case is "…". Only the sentence that says what has happened
counts, up to the first semicolon: what follows is advice.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("elastic_driver", "launcher", "rendezvous")
# Their ValueErrors become usage errors.
READERS = ("options.py", "discovery.py", "given.py", "values.py", "output.py")
SAYING = {
    *("say", "_say", "note", "tell", "_on_broken", "print"),
    *("warning", "error", "exception"),
    *("_end", "end", "fail", "finish", "finish_with"),
}
# Functions that return a message, or yield some.
TELLING = {
    *("exceeded", "shortage", "outlook", "check_host", "judge", "explain", "_look", "_attend"),
    *("describe_login", "_describe_proof", "_describe_loss"),
    *(
        "ending",
        "describe_end",
        "unfollowed",
        "name_problem",
        "_refuse",
        "_not_found",
        "_describe_exit",
    ),
    *("_shadowed", "_unsafe", "refuse", "_sentence", "_silent", "_unfinished", "_why_lost"),
    "_why_it_ends",
    *("cost_of_drain", "cost_of_scale", "_who_may_join"),
    *("disagreement", "_joined_error", "_left_error", "_refusal", "_missing"),  # of Horovod's API
}
TABLES = {"_REFUSED", "_UNREACHABLE", "_SRUN_MEANINGS", "_MPIRUN_MEANINGS"}
_MOST_VARIANTS = 16
_FORMAT = re.compile(r"%[-+0-9.]*[a-z]")
_WORDS = re.compile(r"[A-Za-z]{2,}")


@dataclass(frozen=True)
class Message:
    """A message, and where it is made."""

    text: str
    place: str


def messages(root: Path) -> list[Message]:
    """Return all messages of the sources below `root`."""
    trees = {
        path: ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }
    errors = _errors(trees.values())
    found: dict[str, Message] = {}
    for path, tree in trees.items():
        constants = _assigned(tree.body)
        for meaning in _tabled(constants):
            place = f"{path.relative_to(root)}:{meaning.lineno}"
            for text in _heads(meaning, constants):
                found.setdefault(text, Message(text, place))
        for call, local in _calls(tree, {}):
            for argument in _said(call, path, errors):
                place = f"{path.relative_to(root)}:{call.lineno}"
                for text in _heads(argument, {**constants, **local}):
                    found.setdefault(text, Message(text, place))
    return list(found.values())


def _tabled(constants: Values) -> Iterator[ast.expr]:
    """Yield the second of each pair in a module's tables."""
    for name, values in constants.items():
        for table in values:
            if name in TABLES and isinstance(table, ast.Tuple):
                yield from (pair.elts[1] for pair in table.elts if isinstance(pair, ast.Tuple))


def _errors(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names of our errors, and of the functions whose result is raised."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    bases = {
        node.name: set(map(_name, node.bases)) for node in nodes if isinstance(node, ast.ClassDef)
    }
    raised = [n.exc.func for n in nodes if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)]
    found = {"ElasticError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found | {name for name in map(_name, raised) if name.lstrip("_")[:1].islower()}


Values = dict[str, list[ast.expr]]
Saying = ast.Call | ast.Return | ast.Yield


def _calls(node: ast.AST, local: Values, of: str = "") -> Iterator[tuple[Saying, Values]]:
    """Yield what may say something, with the values of the names that its function gives a value.

    `of` is the name of the class or function around it.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            if _name(child.func) == "__init__" and ast.unparse(child.func) == "super().__init__":
                child.func = ast.Name(of)
            yield child, local
        elif isinstance(child, ast.Return | ast.Yield) and of in TELLING:
            yield child, local
        inner, name = local, of
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = {**local, **_assigned(ast.walk(child))}
            name = of if child.name == "__init__" else child.name
        elif isinstance(child, ast.ClassDef):
            name = child.name
        yield from _calls(child, inner, name)


def _assigned(nodes: Iterable[ast.AST]) -> Values:
    found: Values = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                _pair(target, node.value, found)
        elif isinstance(node, ast.NamedExpr):
            _pair(node.target, node.value, found)
    return found


def _pair(target: ast.expr, value: ast.expr, found: Values) -> None:
    if isinstance(target, ast.Name):
        found.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=False):
            _pair(one, its, found)


def _said(node: Saying, path: Path, errors: set[str]) -> list[ast.expr]:
    """Return the expressions that are messages."""
    if not isinstance(node, ast.Call):
        parts = node.value.elts if isinstance(node.value, ast.Tuple | ast.List) else [node.value]
        return [part for part in parts if part is not None]
    name = _name(node.func)
    if name == "matching":
        return [ast.BinOp(node.args[2], ast.Add(), ast.Constant(", got …"))]
    if name == "Problem":
        return node.args[2:3]
    if name == "print":
        return node.args[:1] if "sys.stderr" in ast.unparse(node) else []
    if name in errors or name in SAYING or (name == "ValueError" and path.name in READERS):
        return node.args
    return []


def _heads(argument: ast.expr, names: Values) -> Iterator[str]:
    for text in _variants(argument, names):
        if (head := _head(text)) is not None:
            yield head


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _head(text: str) -> str | None:
    """Return the first sentence of a message; None if it has no words of its own."""
    text = re.sub(r"…+", "…", _FORMAT.sub("…", " ".join(text.split()))).replace("`", "")
    parts = text.split("; ")
    said = itertools.accumulate(parts, lambda left, right: f"{left}; {right}")
    return next((head for head in said if len(_WORDS.findall(head)) >= 2 and " " in head), None)


def _variants(node: ast.expr, names: Values, deep: int = 3) -> list[str]:
    """Return the texts that an expression may have."""
    found = ["…"]
    if isinstance(node, ast.Constant):
        found = [node.value] if isinstance(node.value, str) else ["…"]
    elif isinstance(node, ast.JoinedStr):
        found = _joined([_variants(part, names, deep) for part in node.values])
    elif isinstance(node, ast.FormattedValue):
        found = _variants(node.value, names, deep) if isinstance(node.value, ast.Name) else ["…"]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        found = _joined([_variants(node.left, names, deep), _variants(node.right, names, deep)])
    elif isinstance(node, ast.IfExp):
        found = _variants(node.body, names, deep) + _variants(node.orelse, names, deep)
    elif isinstance(node, ast.Name) and deep and node.id in names:
        found = [text for value in names[node.id] for text in _variants(value, names, deep - 1)]
    return found[:_MOST_VARIANTS]


def _joined(parts: list[list[str]]) -> list[str]:
    return ["".join(each) for each in itertools.islice(itertools.product(*parts), _MOST_VARIANTS)]
