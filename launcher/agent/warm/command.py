"""Decides whether a command can run in forks of a warm parent, and which modules it imports.

These are pure functions of a command line and the source files it names; `plan` calls them once
when the agent starts. Source is read and parsed here, never imported or run.
"""

import ast
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

_HARMLESS = "ObBqRsuP"  # the warm parent starts with these flags, and forks inherit them
_WITH_VALUE = "WX"
_ENDING = {"c": "code", "m": "module"}

_DYNAMIC = frozenset({"importlib", "runpy", "pkgutil", "code", "codeop"})
_COMPUTED = frozenset({"__import__", "exec", "eval"})
_MOST_FILES = 200
_MOST_BYTES = 1 << 20


class NotWarmable(Exception):
    """A new process has to execute the command, instead of a fork; the message says why."""


@dataclass(frozen=True)
class PythonCommand:
    """A Python command, taken apart as the interpreter does."""

    kind: str  # script | module | code
    target: str  # the script's path, the module's name, or the code


def parse(argv: Sequence[str], env: Mapping[str, str]) -> PythonCommand:
    """Take `argv` apart; raises `NotWarmable` unless this interpreter runs a program with it.

    Flags that only configure the interpreter are allowed. Flags that make it ignore PYTHONPATH or
    `site` are refused, because the warm parent needs both, and so are flags that print at imports.
    """
    if not argv:
        raise NotWarmable("the command is empty")
    _check_interpreter(argv[0], env)
    words = iter(argv[1:])
    for word in words:
        if not word.startswith("-"):
            return PythonCommand("script", word)
        if word == "-" or word.startswith("--"):
            raise NotWarmable(f"python's argument {word!r} needs a new interpreter")
        for position, letter in enumerate(word[1:], 2):  # `-uO`, `-Xdev` or `-mpkg`
            if letter in _HARMLESS:
                continue
            if letter not in _WITH_VALUE and letter not in _ENDING:
                raise NotWarmable(f"python's flag -{letter} needs a new interpreter")
            value = word[position:] or next(words, "")
            if letter in _ENDING and value:
                return PythonCommand(_ENDING[letter], value)
            if not value or value.startswith("importtime"):
                flag = f"-{letter} {value}".rstrip()
                raise NotWarmable(f"python's flag {flag} needs a new interpreter")
            break
    raise NotWarmable("python is to read its program from the standard input")


def _check_interpreter(name: str, env: Mapping[str, str]) -> None:
    """Raise `NotWarmable` unless `name` is the agent's interpreter: others have other modules."""
    found = shutil.which(name, path=env.get("PATH", os.defpath))
    ours = sys.executable
    if found is None:
        raise NotWarmable(f"the command {name!r} is not found")
    same_folder = os.path.dirname(os.path.abspath(found)) == os.path.dirname(os.path.abspath(ours))
    if not (same_folder and os.path.samefile(found, ours)):
        raise NotWarmable(
            f"{name} is not the Python that runs the agent ({ours}); "
            "give `script.py` or `-m module` alone to use that one"
        )


def first_path(command: PythonCommand, cwd: str) -> str | None:
    """Return the folder that Python puts first in `sys.path`; None for `-c`, which has no file."""
    if command.kind == "script":
        script = os.path.realpath(os.path.join(cwd, command.target))
        return script if os.path.isdir(script) else os.path.dirname(script)
    return cwd if command.kind == "module" else None


# ---- the program's imports ---------------------------------------------------------------


def imports(command: PythonCommand, cwd: str) -> frozenset[str] | None:
    """Return the top-level modules the program imports, itself or through files beside it.

    None if that is unknown: source that is not found or cannot be read, imports by computed name,
    or more than `_MOST_FILES` files.
    """
    path0 = first_path(command, cwd)
    start = None if path0 is None else _program_file(command, cwd)
    if start is None or path0 is None:
        return None
    found: set[str] = set()
    seen: set[str] = set()
    todo = [start]
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        names = _imports_of(file)
        if names is None or len(seen) > _MOST_FILES:
            return None
        for name in names - found:
            found.add(name)
            todo += local_files(path0, name)
    return frozenset(found)


def only_standard_library(names: frozenset[str] | None) -> bool:
    """Return whether a program with these imports surely uses nothing that is slow to import."""
    return names is not None and names <= sys.stdlib_module_names - _DYNAMIC


def _program_file(command: PythonCommand, cwd: str) -> str | None:
    if command.kind == "script":
        path = os.path.join(cwd, command.target)
        return os.path.join(path, "__main__.py") if os.path.isdir(path) else path
    base = os.path.join(cwd, *command.target.split("."))
    candidates = (f"{base}.py", os.path.join(base, "__main__.py"))
    return next(filter(os.path.isfile, candidates), None)


def local_files(path0: str, name: str) -> list[str]:
    """Return the source files of a module or package beside the program."""
    module = Path(path0, f"{name}.py")
    if module.is_file():
        return [str(module)]
    return [str(file) for file in islice(Path(path0, name).rglob("*.py"), _MOST_FILES + 1)]


def _imports_of(file: str) -> set[str] | None:
    try:
        if os.path.getsize(file) > _MOST_BYTES:
            return None
        with open(file, "rb") as source:
            nodes = list(ast.walk(ast.parse(source.read())))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in _COMPUTED:
            return None
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)  # those of `from . import c` are found as files
    return {name.partition(".")[0] for name in names}
