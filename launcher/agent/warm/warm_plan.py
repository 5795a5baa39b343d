"""The plan of a job's warm parent: its command, its variables, the modules to import.

The agent makes the plan once, when it has read the job's specification, and `starter` carries it
out. First the job's command is taken apart: can it run in forks of a warm parent, and which modules
does it import? Source is read and parsed for that, never imported or run. Later the plan checks
each request: a worker can be forked only if it has the command, the folder and the variables (those
that imports may read) that its warm parent was started with.
"""

import ast
import hashlib
import json
import os
import pkgutil
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import elastic_driver.worker
from elastic_driver.contract import TORCHRUN_NAMES, VISIBLE_DEVICES
from elastic_driver.words.orders import JobSpec
from launcher.agent.environment import common_environment
from launcher.agent.processes import ProcessSpec

# ---- the command --------------------------------------------------------------------------


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


def parse_command(argv: Sequence[str], env: Mapping[str, str]) -> PythonCommand:
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


def imported_modules(command: PythonCommand, cwd: str) -> frozenset[str] | None:
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


# ---- the plan -----------------------------------------------------------------------------


DEFAULT_PRELOAD = ("torch",)

_THREADS = "OMP_NUM_THREADS"
_OWN_PACKAGES = ("elastic_driver", "rendezvous", "launcher")

# Variables in which workers may differ from their warm parent, because libraries read them when
# they are used. (OMP_NUM_THREADS is read at the import, so a worker sets torch's threads again.)
_LATE = frozenset((*TORCHRUN_NAMES, _THREADS, "TF_CONFIG", *VISIBLE_DEVICES))
_LATE_PREFIXES = ("ELASTIC_", "TORCHELASTIC_", "HOROVOD_", "GLOO_", "NCCL_")


@dataclass(frozen=True)
class WarmPlan:
    """One warm parent: it is started with `argv`, `env` and `cwd`, and imports `preload`."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    preload: tuple[str, ...]
    path0: str | None  # where the interpreter finds modules first
    spares: int
    rehearse: bool = True  # also take a tiny training step, if torch is among the modules

    def digest(self) -> str:
        """Return a hash of the plan; equal plans have equal hashes on all machines."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def check(self, spec: ProcessSpec, threads: int) -> None:
        """Raise `NotWarmable` with the reason if `spec` needs a new interpreter.

        `threads` is the size of torch's thread pool in the warm parent. A worker's may be smaller.
        """
        if spec.argv != self.argv:
            raise NotWarmable(f"the command {spec.argv[0]!r} is not the one that is kept warm")
        if spec.cwd != self.cwd or not os.path.isdir(spec.cwd):
            raise NotWarmable(f"the working directory {spec.cwd!r} is not the warm parent's")
        early = early_variables(spec.env)
        names = sorted(name for name in early.keys() | self.env.keys() if not _is_late(name))
        changed = [name for name in names if early.get(name) != self.env.get(name)]
        if changed:
            raise NotWarmable(f"{', '.join(changed)} differ from when the warm parent was started")
        wanted = spec.env.get(_THREADS)
        if wanted != self.env.get(_THREADS) and str(wanted) not in map(str, range(1, threads + 1)):
            raise NotWarmable(f"{_THREADS} differs from when the warm parent was started")


def early_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all workers of a job have in common, and that imports may read."""
    return {name: value for name, value in env.items() if not _is_late(name) or name == _THREADS}


def make_warm_plan(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    *,
    warm: int | None = None,
    preload: Sequence[str] = DEFAULT_PRELOAD,
    rehearse: bool = True,
) -> WarmPlan:
    """Return the warm parent for a job's command; raises `NotWarmable` if there should be none.

    Args:
        argv: the command of every worker, interpreter first.
        env: the variables of a worker, also those that differ between workers.
        cwd: the working directory of the workers.
        warm: spares to keep (`--warm`); 0: no warm workers; None: one spare, or none if `preload`
            is the default and the program surely imports nothing but the standard library.
        preload: modules to import (`--preload`).
        rehearse: also take a tiny training step.
    """
    if warm == 0:
        raise NotWarmable("warm workers are switched off (--warm 0)")
    command = parse_command(argv, env)
    used = imported_modules(command, cwd)
    if warm is None and tuple(preload) == DEFAULT_PRELOAD and only_standard_library(used):
        raise NotWarmable("the program imports nothing but the standard library")
    path0 = first_path(command, cwd)
    modules = list(preload)
    if used is not None and "elastic_driver" in used and not _has_own(path0):
        # `elastic_driver` imports these as its names are used; they import all the rest.
        package = elastic_driver.worker
        found = pkgutil.iter_modules(package.__path__)
        modules += [f"{package.__name__}.{module.name}" for module in found]
    early = early_variables(env)
    unique = tuple(dict.fromkeys(modules))
    spares = warm or 1
    return WarmPlan(tuple(argv), early, cwd, unique, path0, spares, rehearse=rehearse)


def warm_plan_for(spec: JobSpec, inherited: Mapping[str, str]) -> WarmPlan:
    """Return the warm parent of a job's workers; raises `NotWarmable` if there should be none.

    `inherited` is the environment of the agent.
    """
    env = common_environment(inherited, spec)
    return make_warm_plan(
        spec.command, env, spec.cwd, warm=spec.warm, preload=spec.preload, rehearse=spec.rehearse
    )


def _has_own(path0: str | None) -> bool:
    """Return whether there are modules with the names of our packages beside the script."""
    home = os.path.dirname(elastic_driver.__path__[0])
    return path0 not in (None, home) and any(
        local_files(str(path0), name) for name in _OWN_PACKAGES
    )


def _is_late(name: str) -> bool:
    return name in _LATE or name.startswith(_LATE_PREFIXES)
