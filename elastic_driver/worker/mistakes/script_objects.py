"""Finds the objects that a script trains with, and which of them its states keep; tells a mistake.

At a commit the script's own frames are on the stack: that of the training function, and those that
it has called. Their variables, and the globals of their modules, hold what the script works with:
directly, as an attribute of an object, or inside of a list or dictionary. The search is bounded in
depth and in the number of objects, and holds on to nothing.

A mistake is told by one line, once in a process, on the rank that is to say it (`tell`).
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader

from elastic_driver.worker import current
from elastic_driver.worker.worker_log import say

DEPTH = 3  # from a variable: an attribute of an attribute's item
MOST_OBJECTS = 2000  # that one search looks at
MOST_ITEMS = 256  # of a container
MOST_FRAMES = 32
_KEPT_DEPTH, _MOST_KEPT = 6, 20_000  # of the search in what the states keep
_OURS = "elastic_driver"
_LIBRARIES = frozenset((_OURS, "torch", "numpy", "builtins", "horovod", "argparse", "logging"))
_NOTHING = (ModuleType, type, BuiltinFunctionType, str, bytes, int, float)
_USELESS = (*_NOTHING, FunctionType, MethodType)
_CALLS_LOCALS = frozenset(("locals", "vars", "eval", "exec", "dir"))
_SIMPLE = frozenset((int, float, bool, str, bytes, type(None)))
_OUR_LOOP = "elastic_driver.worker.run"


class Variable(NamedTuple):
    """A thing of the script, and the name by which it can be found.

    `before`: it was there before the training function was called.
    """

    name: str
    thing: Any
    before: bool


# ---- what a script can see ------------------------------------------------------------------


def variables(frame: FrameType | None) -> Iterator[Variable]:
    """Yield the variables of the script's frames from this one on, globals first."""
    frames = list(_frames(frame))
    for namespace in {id(f.f_globals): f.f_globals for f in frames}.values():
        for name, value in list(namespace.items()):
            if not name.startswith("__"):
                yield Variable(name, value, before=True)
    for number, each in enumerate(frames):
        code = each.f_code
        if not code.co_flags & inspect.CO_OPTIMIZED or _CALLS_LOCALS.intersection(code.co_names):
            continue  # of a module; or its script works with this very dictionary
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = {*arguments, *code.co_freevars} if number == len(frames) - 1 else set()
        namespace = each.f_locals
        found = list(namespace.items())
        if sys.version_info < (3, 13):  # else the frame would hold the values until it ends
            namespace.clear()
        found.sort(key=lambda pair: pair[0] not in given)
        for name, value in found:
            yield Variable(name, value, before=name in given)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the script, innermost first, up to the training function's."""
    for _ in range(MOST_FRAMES):
        if frame is None or frame.f_globals.get("__name__") == _OUR_LOOP:
            return
        if in_script(frame):
            yield frame
        frame = frame.f_back


def in_script(frame: FrameType) -> bool:
    """Return whether a frame is one of the script, or of a library that it uses."""
    return _package(frame.f_globals.get("__name__", "")) not in (_OURS, "torch")


def _package(module: Any) -> str:
    return str(module).partition(".")[0]


def search(start: Iterable[Variable], look: Callable[[Variable], bool]) -> None:
    """Call `look` for each object that can be found; it returns whether to look inside."""
    seen: set[int] = set()
    pending = [(variable, DEPTH) for variable in start]
    pending.reverse()
    while pending and len(seen) < MOST_OBJECTS:
        variable, depth = pending.pop()
        thing = variable.thing
        if thing is None or isinstance(thing, _NOTHING) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, FunctionType | MethodType):
            pending += [(each, depth) for each in _bound(variable)]
        elif look(variable) and depth:
            inside = [
                (Variable(f"{variable.name}{place}", child, variable.before), depth - 1)
                for place, child in children(thing)
            ]
            pending += reversed(inside)


def _bound(variable: Variable) -> list[Variable]:
    """Return what a function of the script brings along: its object, or its closure."""
    function, before = variable.thing, variable.before
    if isinstance(function, MethodType):
        return [Variable(f"{variable.name}.__self__", function.__self__, before)]
    found: list[Variable] = []
    if _package(function.__module__) in _LIBRARIES:
        return found
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            found.append(Variable(name, cell.cell_contents, before))
    return found


def children(thing: Any) -> list[tuple[str, Any]]:
    """Return what is inside of a container or an object of the script, with its place.

    Numbers and strings are left out.
    """
    if isinstance(thing, dict | Mapping):
        try:
            items = list(islice(thing.items(), MOST_ITEMS))
        except RuntimeError:  # another thread has changed it
            return []
        return [(_at(key), value) for key, value in items if type(value) not in _SIMPLE]
    if isinstance(thing, list | tuple | set | frozenset):
        found = enumerate(islice(thing, MOST_ITEMS))
        return [(f"[{number}]", value) for number, value in found if type(value) not in _SIMPLE]
    if isinstance(thing, DataLoader):
        return [(f".{name}", getattr(thing, name, None)) for name in ("sampler", "batch_sampler")]
    if _package(type(thing).__module__) in _LIBRARIES and not isinstance(thing, BatchSampler):
        return []
    attributes = getattr(thing, "__dict__", None)
    if not isinstance(attributes, dict):
        return []
    pairs = islice(attributes.items(), MOST_ITEMS)
    return [(f".{name}", value) for name, value in pairs if type(value) not in _SIMPLE]


def _at(key: Any) -> str:
    return f"[{key!r}]" if type(key) in _SIMPLE else "[…]"


# ---- what the states keep -------------------------------------------------------------------


class Kept:
    """The identities of all objects that states keep, and the memory of their tensors."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.ids: set[int] = set()
        self.memory: set[int] = set()
        self.plain_keys: list[set[str]] = []  # of plain dictionaries: a `state_dict()` by hand
        self.parameters: list[Tensor] = []  # of modules, and all that optimizers train
        self.plain: list[Tensor] = []  # in lists, dictionaries and attributes
        pending = [(value, _KEPT_DEPTH) for value in values]
        while pending and len(self.ids) < _MOST_KEPT:
            thing, depth = pending.pop()
            if thing is None or isinstance(thing, _USELESS) or id(thing) in self.ids:
                continue
            self.ids.add(id(thing))
            pending += [(child, depth - 1) for child in self._inside(thing) if depth]

    def _inside(self, thing: Any) -> list[Any]:
        if isinstance(thing, Tensor):
            self._add(thing)
            self.plain.append(thing)
            return []
        if isinstance(thing, nn.Module):
            self.ids.update(map(id, thing.modules()))
            self.parameters += thing.parameters()
            for tensor in (*thing.parameters(), *thing.buffers()):
                self._add(tensor)
            return []
        if isinstance(thing, Optimizer):
            trained = [p for group in thing.param_groups for p in group["params"]]
            for tensor in trained:
                self._add(tensor)
            self.parameters += trained
        elif isinstance(thing, dict):
            self.plain_keys.append({key for key in islice(thing, MOST_ITEMS) if type(key) is str})
        if isinstance(thing, Mapping | list | tuple | set | frozenset):
            return [child for _, child in children(thing)]
        attributes = getattr(thing, "__dict__", None)  # of a scheduler, too: it may hold others
        return list(attributes.values()) if isinstance(attributes, dict) else []

    def _add(self, tensor: Tensor) -> None:
        self.ids.add(id(tensor))
        if pointer := pointer_of(tensor):
            self.memory.add(pointer)

    def has(self, thing: Any) -> bool:
        """Return whether a state keeps this very object."""
        return id(thing) in self.ids

    def has_tensor(self, tensor: Tensor) -> bool:
        """Return whether a state keeps this tensor, or another one in the same memory."""
        return id(tensor) in self.ids or pointer_of(tensor) in self.memory

    def keeps_dictionary_with(self, *keys: str) -> bool:
        """Return whether a state has a plain dictionary with these keys: kept by hand."""
        return any(known.issuperset(keys) for known in self.plain_keys)


def pointer_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 where it has none."""
    try:
        return int(tensor.data_ptr())
    except (RuntimeError, NotImplementedError, ValueError):  # lazy, sparse, or of no memory
        return 0


# ---- telling ---------------------------------------------------------------------------

PAGE = "docs/common-mistakes.md"
MOST = 4  # lines of one kind: of a script that leaves everything out, the first few are enough


class _Told:
    """The mutable field of this module."""

    keys: set[tuple[str, str]] = set()  # noqa: RUF012 - of this process


def tell(kind: str, text: str, about: str = "") -> bool:
    """Write a line about a mistake, unless it was written before; return whether it was written.

    Args:
        kind: of the mistake: its section on the page.
        text: what happened, to whom, and what to try.
        about: what the line is about, if there may be several of this kind.
    """
    key = kind, about
    if key in _Told.keys or sum(k == kind for k, _ in _Told.keys) >= MOST:
        return False
    _Told.keys.add(key)
    say(f"{text} ({PAGE}#{kind})")
    return True


def is_speaker() -> bool:
    """Return whether this rank tells the mistakes that all ranks make: rank 0 of a world does."""
    return current.is_initialized() and current.rank() == 0


def forget_told() -> None:
    """Let everything be told again; for tests."""
    _Told.keys.clear()
