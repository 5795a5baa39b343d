"""What a state needs of an object that can load its own state: the base of all parts.

A part knows what belongs to its object *now*: `look()` walks it and says whether its structure has
changed. `tensors()` are its leaves that live in memory of their own; whether they are copied at a
commit is decided in `leaves`. Everything else is small and is copied by `take()`: flags, settings
of parameter groups, extra state, a scheduler's `state_dict()`. `roll_back()` puts back structure
and values, in the script's own objects. For sending, a part becomes a document of plain data and a
list of tensors (`message`).

**A glance.** At each commit the parts of a state have to be looked at: a module may have got
another parameter, an optimizer another group. Nearly always nothing of that has happened. So a
commit spares it as long as the objects are still made of the same things: a `Structure` names the
containers in which it would show, and a `Glance` compares all that is in them by identity, for all
parts of a state together. Only where something differs is each part looked at by itself.

**Attributes.** A module anneals a temperature, counts its calls or holds a queue in an attribute
that is neither a parameter nor a buffer; an optimizer counts its steps. No `state_dict()` of torch
has these. Which of them change is found by looking: at the first commits, and later so seldom that
it costs next to nothing. Until then small ones are all copied at each commit, from then on those
that change. They are put back and sent. Others are sent if they hold tensors, and else never
touched: what a process alone knows, such as its rank, stays as it is. Left alone is what holds
anything but plain values, such as a tensor on an autograd graph: it is computed anew. Ranks are not
compared by attributes: many of them are of one rank, such as its last loss.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_driver.errors import UsageError
from elastic_driver.worker.current import say
from elastic_driver.worker.state_sync.contents import (
    TensorSpec,
    UnkeptError,
    fill_tensor,
    random_state,
)
from elastic_driver.worker.state_sync.message import Reader, Writer
from elastic_driver.worker.state_sync.taking import Taker, copied, put_back
from elastic_driver.worker.state_sync.values import SIMPLE, is_array, is_single, kind_of, too_deep
from elastic_driver.worker.torch_seams import version_of

# ---- a glance --------------------------------------------------------------------------


class Structure(NamedTuple):
    """The containers that show what an object is made of."""

    tables: Sequence[dict[Any, Any]]  # whose values count
    members: Sequence[Iterable[Any]]  # whose items count: lists, and dictionaries for their keys
    # Functions, and the objects of which their results count: flags, or an object inside.
    results: Sequence[tuple[Callable[[Any], Any], Sequence[Any]]] = ()


class Glance:
    """All that was in the containers of some structures, when this was made."""

    def __init__(self, structures: Sequence[Structure]) -> None:
        tables = [table for each in structures for table in each.tables]
        self._tables = [table for table in tables if table]
        self._empty = [table for table in tables if not table]  # most of a module's are
        self._members = [members for each in structures for members in each.members]
        self._results = [results for each in structures for results in each.results]
        self._seen = self._now()

    def _now(self) -> list[Any]:
        now: list[Any] = []
        for table in self._tables:
            now += table.values()
        for members in self._members:
            now += members
        for function, things in self._results:
            now += map(function, things)
        return now

    def is_same(self) -> bool:
        """Return whether the containers hold the same objects, in the same order."""
        if any(self._empty):
            return False
        now = self._now()
        seen = self._seen
        return len(now) == len(seen) and all(map(is_, now, seen))


# ---- parts -----------------------------------------------------------------------------

Named = list[tuple[str, Tensor]]
Outgoing = tuple[Any, Named]  # a document of plain data; name and tensor of each number in it


class Rest(NamedTuple):
    """How long commits can spare a part, while a glance at its structure shows nothing new."""

    until: float  # seconds, of `Attributes`' clock
    settings: Any = None  # and no longer than these live objects equal those that were kept
    kept: Any = None


NEVER = Rest(float("-inf"))


class StatePart:
    """Any object with `state_dict()` and `load_state_dict()`, all of it small: a scheduler, …"""

    def __init__(self, name: str, thing: Any) -> None:
        self.name, self.thing = name, thing
        self.kept: Any = None  # what `take` has returned at the last commit
        self._has_changed = False  # since the last look

    def look(self) -> bool:
        """Walk the object; return whether its structure is another than at the last look."""
        self._refresh()
        changed, self._has_changed = self._has_changed, False
        return changed

    def structure(self) -> Structure | None:
        """Return the containers that show what the last look has found.

        None: nothing shows it, so that the object has to be looked at, at each commit.
        """
        return Structure((), ())

    def _refresh(self) -> None:
        """Follow the structure of now."""

    def tensors(self) -> Named:
        """Return the leaves of this part that `leaves` looks after, by name."""
        return []

    def require_kept(self) -> None:
        """Raise `UnkeptError` for a tensor that cannot be kept; called for each new structure."""

    def take(self) -> Any:
        """Return a copy of all small things, for a commit.

        The commit counts once all parts have given theirs; `kept` is what they gave. Raises
        `UnkeptError` for what cannot be kept.
        """
        try:
            return copied(self._state())
        except UnkeptError as error:
            raise error.inside(self.name) from None
        except RecursionError:
            raise too_deep(self.name) from None

    def rest(self) -> Rest:
        """Return, right after a commit, how long `take` would return `kept` again."""
        return NEVER

    def copies(self) -> Any:
        """Return what is a copy in `kept`."""
        return self.kept

    def roll_back(self) -> None:
        """Put back the structure and the small things of `kept`."""
        self.thing.load_state_dict(copied(self.kept))

    def outgoing(self) -> Outgoing:
        """Return a document of the whole part, and the tensors that the document refers to."""
        writer = Writer()
        return [self._class(), writer.write(copied(self._state()), self.name)], writer.tensors

    def values(self) -> list[tuple[str, Any]]:
        """Return name and value of each small thing that ranks are to have alike."""
        state = self.kept
        if isinstance(state, dict):
            return [(f"{self.name}.{key}", value) for key, value in state.items()]
        return [(self.name, state)]

    def places(self, document: Any, specs: Sequence[TensorSpec], /) -> list[Tensor]:
        """Return the tensors to receive into: this part's own tensors where it has them.

        Raises `UsageError` where this part is built differently from the sender's.
        """
        self._require_class(document[0])
        return [spec.allocate() for spec in specs]

    def accept(self, document: Any, tensors: Sequence[Tensor], /) -> None:
        """Load the received document and tensors."""
        self.thing.load_state_dict(Reader(tensors, what=self.name).read(document[1]))

    def _state(self) -> Any:
        try:
            return self.thing.state_dict()
        except UsageError:
            raise
        except Exception as error:  # a script's own method
            problem = f"its state_dict() has failed ({error})"
            raise UnkeptError(
                self.name, problem, "mend it, or leave it out of the state"
            ) from error

    def _class(self) -> str:
        return type(self.thing).__qualname__

    def _require_class(self, theirs: str) -> None:
        if theirs != self._class():
            raise UsageError(
                f"{self.name} is of the class {self._class()}, in the trained state it is "
                f"{theirs}; build the same objects on every worker"
            )


def require_tensor(name: str, tensor: Tensor) -> None:
    """Raise `UnkeptError` for a tensor of a module or an optimizer that cannot be kept."""
    if nn.parameter.is_lazy(tensor):
        problem, hint = "it has no shape yet (it is lazy)", "run one batch before the first commit"
    elif tensor.is_meta:
        problem, hint = "it is on the meta device, without memory", "give it its first values"
    elif tensor.is_inference():
        problem, hint = "it was made under inference_mode", "create it under no_grad"
    elif tensor.layout != torch.strided:
        problem, hint = f"it is of layout {tensor.layout}", "keep dense tensors in the state"
    elif tensor.is_quantized:
        problem, hint = "it is quantized", "keep dense tensors of numbers in the state"
    else:
        return
    raise UnkeptError(name, problem, hint)


def trained_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def names_in(written: Any) -> list[str]:
    """Return the keys of a dictionary that a `Writer` wrote; all are strings."""
    items = written[2]
    return list(items[: len(items) // 2])


# ---- attributes ------------------------------------------------------------------------

ATTRIBUTES = 5  # the place of plain attributes in a document
LOOKS = 4  # commits at which everything is looked at
SHARE = 0.0002  # of the time, for the looks of later
LARGEST = 16 * 1024 * 1024  # bytes of an attribute that is copied at each commit
SMALL = 64 * 1024  # bytes of one that is copied before it is known to change
DEEPEST = 4  # containers inside of containers that are looked into
_INTERNAL = frozenset(vars(nn.Module()))  # also `training`, which is kept
_MISSING = object()
_Found = dict[str, dict[str, Any]]  # attributes of each object, by its path


class KeptAttribute(NamedTuple):
    """An attribute at a commit."""

    owner: dict[str, Any]
    key: str
    copy: Any


class KnownAttributes(NamedTuple):
    """An object, and the names of all its attributes at a commit that has looked at them."""

    thing: Any
    names: frozenset[str]
    copy: Any = None


Attribute = KeptAttribute | KnownAttributes


class Attributes:
    """The plain attributes of some objects, as far as they change.

    Args:
        name: of the part that the objects belong to.
        objects: with their paths in there.
        clock: seconds.
    """

    def __init__(
        self,
        name: str,
        objects: Sequence[tuple[str, Any]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._name = name
        self._objects = objects
        self._clock = clock
        self._looks: dict[int, dict[str, Any]] = {}  # of each object, by its identity
        self._moving: dict[tuple[int, str], None] = {}  # object and key of those that change
        self._told: set[tuple[int, str]] = set()  # of these: too large
        self._left, self._look_at = LOOKS, 0.0

    def follow(self, objects: Sequence[tuple[str, Any]]) -> None:
        """Look at these objects from now on; what is known of those that stay still holds."""
        now = {id(each) for _, each in objects}
        self._objects = objects
        self._left = max(self._left, 1)
        self._looks = {key: look for key, look in self._looks.items() if key in now}
        self._moving = {key: None for key in self._moving if key[0] in now}

    @property
    def rest_until(self) -> float:
        """The time, of its clock, until which `take` has nothing to do."""
        return float("-inf") if self._left > 0 or self._moving else self._look_at

    def take(self) -> list[Attribute]:
        """Return copies of the attributes that change, for a commit."""
        found: list[Attribute] = []
        began = self._clock()
        is_learning = self._left > 0
        if is_learning or began >= self._look_at:
            self._look()
            self._left = max(self._left - 1, 0)
            self._look_at = began + (self._clock() - began) / SHARE
        if not is_learning and not self._moving:
            return []
        taker = Taker(alone=True)
        changing = {number for number, _ in self._moving}
        for path, each in self._objects:
            if not is_learning and id(each) not in changing:
                continue
            own = vars(each)
            if is_learning:
                found.append(KnownAttributes(each, frozenset(own)))
            for key in self._chosen(each, everything=is_learning):
                if key not in own:
                    found.append(KeptAttribute(own, key, _MISSING))
                elif _can_be_kept(own[key]):
                    copy = taker.take(own[key], _path(self._name, path, key))
                    found.append(KeptAttribute(own, key, copy))
        return found

    def put_back(self, kept: Sequence[Attribute]) -> None:
        """Make the attributes what they were at the commit.

        One that has come since then goes, as far as the commit knew all that there were.
        """
        done: dict[int, Any] = {}
        for each in kept:
            if isinstance(each, KnownAttributes):
                own = vars(each.thing)
                new = [key for key in _names(each.thing) if key not in each.names]
                for key in [key for key in new if _can_be_kept(own[key])]:
                    del own[key]
            elif each.copy is _MISSING:
                each.owner.pop(each.key, None)
            else:
                each.owner[each.key] = put_back(each.copy, done)

    def outgoing(self, tensors: list[tuple[str, Tensor]]) -> Any:
        """Return a document of the attributes that have changed, and of all others with tensors.

        Those may be copies of first weights, which differ from rank to rank. `tensors`: of the
        documents before this one; those of this one are added.
        """
        self._look()
        changing: _Found = {path: {} for path, _ in self._objects}
        others: _Found = {path: {} for path, _ in self._objects}
        for path, each in self._objects:
            for key, value in vars(each).items():
                if (id(each), key) in self._moving:
                    found = changing
                elif key in self._looks[id(each)] and 0 < _size_of(value) <= LARGEST:
                    found = others
                else:
                    continue
                if _can_be_kept(value):
                    found[path][key] = value
        writer = Writer()
        writer.tensors = tensors
        return writer.write([changing, others], self._name)

    def accept(self, document: Any, tensors: Sequence[Tensor]) -> None:
        """Take over what the sender has, in this process's own objects."""
        live = [{path: dict(vars(each)) for path, each in self._objects} for _ in range(2)]
        changing, others = Reader(tensors, what=self._name).read(document, live)
        for path, each in self._objects:
            for key, value in (*changing.get(path, {}).items(), *others.get(path, {}).items()):
                _set(vars(each), key, value)
            self._moving |= {(id(each), key): None for key in changing.get(path, ())}
        self._looks.clear()

    def _look(self) -> None:
        """Find the attributes that have changed since the last look."""
        for path, each in self._objects:
            now = looks_of(each)
            before = self._looks.get(id(each), now)
            self._looks[id(each)] = now
            for key in {**before, **now}:
                if before.get(key, _MISSING) != now.get(key, _MISSING):
                    self._moves(path, each, key)

    def _moves(self, path: str, each: Any, key: str) -> None:
        if (id(each), key) in self._told:
            return
        size = _size_of(vars(each).get(key))
        if size > LARGEST:
            self._told.add((id(each), key))
            self._moving.pop((id(each), key), None)
            say(
                f"{_path(self._name, path, key)} changes, and its {size / 1e6:.0f} MB are too much "
                "to be copied at each commit: it is neither put back nor sent to other workers; "
                "register it as a buffer"
            )
            return
        self._moving[id(each), key] = None

    def _chosen(self, thing: Any, *, everything: bool) -> list[str]:
        """Return the keys of what changes; `everything`: also of what is small."""
        keys = [key for number, key in self._moving if number == id(thing)]
        if everything:
            others = {key: None for key in _names(thing) if _size_of(vars(thing)[key]) <= SMALL}
            told = [key for number, key in self._told if number == id(thing)]
            keys += [key for key in others if key not in keys and key not in told]
        return keys


def _path(name: str, path: str, key: str) -> str:
    return ".".join(filter(None, (name, path, key)))


def _names(thing: Any) -> list[str]:
    """Return the names of an object's own attributes."""
    if isinstance(thing, Optimizer):  # what is private is torch's, or another library's
        return [key for key in vars(thing) if key[0] != "_" and key not in _OF_OPTIMIZERS]
    return [key for key in vars(thing) if key not in _INTERNAL]


_OF_OPTIMIZERS = frozenset(("defaults", "state", "param_groups", "step"))


def looks_of(thing: Any) -> dict[str, Any]:
    """Return, for each attribute of an object, what is equal as long as a plain value is."""
    own = vars(thing)
    return {key: _look_of(own[key]) for key in _names(thing)}


def _set(own: dict[str, Any], key: str, value: Any) -> None:
    """Set an attribute; a tensor that is there is filled."""
    mine = own.get(key)
    if isinstance(value, Tensor) and isinstance(mine, Tensor) and TensorSpec.of(value).fits(mine):
        fill_tensor(mine, value)
    else:
        own[key] = value


def _look_of(value: Any, depth: int = 0) -> Any:
    """Return something that is equal as long as a plain value is; None for other objects."""
    kind = type(value)
    if kind in SIMPLE:
        return kind, value
    if isinstance(value, Tensor):
        is_dense = _is_dense(value)
        return (id(value), version_of(value), value.data_ptr()) if is_dense else None
    if is_array(value):
        return hash(value.tobytes())
    if (random := random_state(value)) is not None:
        state = random[0]()
        return hash(state.numpy().tobytes() if isinstance(state, Tensor) else repr(state))
    if is_single(value):
        return repr(value)
    if (container := kind_of(kind)) is None or depth == DEEPEST:
        return None
    looks = [_look_of(each, depth + 1) for each in container.children(value)]
    return sorted(map(repr, looks)) if isinstance(value, set | frozenset) else looks


def _can_be_kept(value: Any) -> bool:
    """Return whether a value is plain, and another process could read it."""
    if type(value) in SIMPLE:
        return True
    if not _is_plain(value):
        return False
    try:
        Taker(alone=True).take(value, "")
    except (UnkeptError, RecursionError):
        return False
    return True


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether nothing but plain values is inside."""
    kind = type(value)
    if kind in SIMPLE or is_single(value) or is_array(value):
        return True
    if isinstance(value, Tensor):
        return _is_dense(value)
    if (container := kind_of(kind)) is None:
        return random_state(value) is not None
    if container.problem is not None or depth == DEEPEST:
        return False
    return all(_is_plain(each, depth + 1) for each in container.children(value))


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own, and is neither trained nor on a graph."""
    has_memory = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta
    return has_memory and not tensor.requires_grad


def _size_of(value: Any, depth: int = 0) -> int:
    """Return the bytes of the tensors and arrays inside of a value."""
    if isinstance(value, Tensor) or is_array(value):
        return int(value.nbytes)
    if (container := kind_of(type(value))) is None or depth == DEEPEST:
        return 0
    return sum(_size_of(each, depth + 1) for each in container.children(value))
