"""Finds the objects that a script trains with, and which of them its states keep; tells a mistake.

At a commit the script's own frames are on the stack: that of the training function, and those that
it has called. Their variables, and the globals of their modules, hold what the script works with:
directly, as an attribute of an object, or inside of a list or dictionary. The search is bounded in
depth and in the number of objects, and holds on to nothing.

A mistake is told by one line, once in a process, on the rank that is to say it (`tell`).

Optimizers that train what no state keeps, and those of a state that never step, are found without a
search (`OptimizerWatch`): torch's hooks see the steps of all optimizers (`state_sync.steps`). It is
looked at in the first commits of a process, on one rank. Whether an optimizer that is outside of
the states matters is seen by what it remembers, and by the backward passes: one that trains only
what no pass of the states' parameters comes by, such as a probe on detached features, is the
script's own business.
"""

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader

from elastic_driver.worker import current
from elastic_driver.worker.current import say
from elastic_driver.worker.state_sync.contents import contents
from elastic_driver.worker.state_sync.part import trained_by
from elastic_driver.worker.state_sync.tree import Tree
from elastic_driver.worker.torch_seams import number_of_pass

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
            trained = trained_by(thing)
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


# ---- optimizers ----------------------------------------------------------------------------

LAST = 20  # the commit at which optimizers that have not stepped are named
KNOWN_AFTER = 5  # intervals in which an optimizer steps, until it counts as one that stays
LEAST_PASSES = 10  # intervals with a backward pass, of an optimizer that should have stepped
_PIECE = 1024  # numbers of a parameter that are compared

Names = Callable[[Any], str | None]  # the script's name for an object


class PassWatch:
    """Notices backward passes that reach the parameters of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        usable = [p for p in trained_by(optimizer) if p.requires_grad and p.is_leaf]
        self._parameters = {id(p): p for p in (*usable[:1], *usable[-1:])}.values()
        self._hooks = [p.register_post_accumulate_grad_hook(self._passed) for p in self._parameters]
        self._first = self._contents()
        self.intervals = 0  # with at least one pass
        self.passes: set[int] = set()  # numbers of the passes of this interval

    def _passed(self, _parameter: Tensor) -> None:
        self.passes.add(number_of_pass())

    def next_interval(self) -> None:
        """Begin another interval, at a commit."""
        self.intervals += bool(self.passes)
        self.passes = set()

    def has_trained(self) -> bool:
        """Return whether the parameters have changed since the watch began."""
        return self._contents() != self._first

    def _contents(self) -> list[int]:
        whole = [p.detach() for p in self._parameters if pointer_of(p) and p.is_contiguous()]
        return contents([each.reshape(-1)[:_PIECE] for each in whole])

    def end(self) -> None:
        """Notice nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class OptimizerWatch:
    """The optimizers of a process in its first commits.

    `trees`: returns those of all states; `names` finds a name of the script's for an optimizer.
    """

    def __init__(self, trees: Callable[[], Sequence[Tree]], names: Names) -> None:
        self._trees, self._names = trees, names
        self._intervals: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._passes: weakref.WeakKeyDictionary[Optimizer, PassWatch] = weakref.WeakKeyDictionary()
        self._trained: set[int] = set()  # identities of all parameters that optimizers have stepped

    def trains(self, tensor: Tensor) -> bool:
        """Return whether an optimizer that has stepped trains this tensor."""
        return id(tensor) in self._trained

    def look(self, commit: int, stepped: Iterable[Optimizer], values: Iterable[Any]) -> None:
        """Look, at the commit of this number in this process, before anything is kept.

        `stepped`: the optimizers that have stepped since the last commit; `values`: all attributes
        of the states.
        """
        own = {id(o): o for tree in self._trees() for o in tree.optimizers()}
        for optimizer in stepped:
            count = self._intervals[optimizer] = self._intervals.get(optimizer, 0) + 1
            self._trained.update(map(id, trained_by(optimizer)))
            if count == KNOWN_AFTER and id(optimizer) not in own:
                self._judge_stranger(optimizer, Kept(values))
        self._judge_coupled(own)
        if commit == 2:
            idle = [o for o in own.values() if o not in self._intervals]
            self._watch(idle)
        for watch in self._passes.values():
            watch.next_interval()
        if commit >= LAST:
            self._judge_idle(own)
            self.end()

    def end(self) -> None:
        """Watch no backward passes any more."""
        for watch in self._passes.values():
            watch.end()
        self._passes.clear()

    def _watch(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            if optimizer not in self._passes:
                self._passes[optimizer] = PassWatch(optimizer)

    # ---- optimizers outside of the states ----------------------------------------------------

    def _judge_stranger(self, optimizer: Optimizer, kept: Kept) -> None:
        """Judge an optimizer that steps from commit to commit and is a part of no state."""
        if kept.has(optimizer) or kept.has(optimizer.state):
            return  # it is inside of an object that the state keeps, or shares what it remembers
        known = [p for p in trained_by(optimizer) if kept.has_tensor(p)]
        own = [o for tree in self._trees() for o in tree.optimizers()]
        if known:
            by_hand = kept.keeps_dictionary_with("state", "param_groups")
            if not by_hand and _remembers(optimizer):
                self._tell_forgotten(optimizer, own)
        elif not kept.parameters:
            return  # a state of counters: the model is left out on purpose
        elif not any(o in self._intervals for o in own):
            self._tell_other_model(optimizer)
        else:
            self._watch([optimizer, *(o for o in own if o in self._intervals)])

    def _tell_forgotten(self, optimizer: Optimizer, own: Sequence[Optimizer]) -> None:
        mine = set(map(id, trained_by(optimizer)))
        twin = next((o for o in own if mine & set(map(id, trained_by(o)))), None)
        instead = "make it before train(), and give it to the state: TorchState(…, optimizer=…)"
        if twin is not None and twin not in self._intervals:
            instead = f"step the state's own, {self._path(twin)!r}, which never steps"
        tell(
            "made-anew",
            f"{self._name(optimizer)} trains the state's model, but is not in the state, so what "
            f"it remembers of its steps is lost when the workers change; {instead}",
            "optimizer",
        )

    def _tell_other_model(self, optimizer: Optimizer) -> None:
        tell(
            "made-anew",
            f"{self._name(optimizer)} trains a model that is not in the state, and no optimizer of "
            "the state steps: what is trained is lost when the workers change; make model and "
            "optimizer before train(), on every rank, and train state.model with state.optimizer",
            "model",
        )

    def _judge_coupled(self, own: dict[int, Optimizer]) -> None:
        """Tell of an optimizer outside whose parameters share a backward pass with the state's."""
        inside: set[int] = set()
        for optimizer, watch in self._passes.items():
            if id(optimizer) in own:
                inside |= watch.passes
        for optimizer, watch in list(self._passes.items()):
            if id(optimizer) not in own and (inside & watch.passes) - {-1}:
                tell(
                    "made-anew",
                    f"{self._name(optimizer)} is not in the state, and neither are the parameters "
                    "that it trains together with the state's: they are lost when the workers "
                    "change; give both to the state, which takes several models and optimizers: "
                    "TorchState(…, model2=…, optimizer2=…)",
                    "part",
                )

    # ---- optimizers that never step ----------------------------------------------------------

    def _judge_idle(self, own: dict[int, Optimizer]) -> None:
        for optimizer, watch in self._passes.items():
            if id(optimizer) not in own or optimizer in self._intervals:
                continue
            parameters = trained_by(optimizer)
            by_others = any(id(p) in self._trained for p in parameters)
            if watch.intervals < LEAST_PASSES or by_others or watch.has_trained():
                continue
            tell(
                "never-stepped",
                f"the optimizer {self._path(optimizer)!r} of the state has taken no step in "
                f"{LAST} commits, though its parameters get gradients; call its step() before "
                "commit()",
                self._path(optimizer),
            )

    def _path(self, optimizer: Optimizer) -> str:
        """Return the name of an optimizer in its state."""
        for tree in self._trees():
            for path, part in tree.parts.items():
                if part.thing is optimizer:
                    return path
        return type(optimizer).__name__

    def _name(self, optimizer: Optimizer) -> str:
        """Return how to call an optimizer that is in no state."""
        kind = type(optimizer).__name__
        name = self._names(optimizer)
        return f"the optimizer {name!r} ({kind})" if name else f"an optimizer ({kind})"


def _remembers(optimizer: Optimizer) -> bool:
    """Return whether an optimizer keeps tensors from step to step."""
    return any(
        isinstance(value, Tensor) and value.numel() > 1
        for values in optimizer.state.values()
        if isinstance(values, dict)
        for value in values.values()
    )
