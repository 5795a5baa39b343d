"""Copies plain values at a commit, and puts them back, in the script's own objects."""

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn

from elastic_driver.worker.state_sync.contents import (
    UnkeptError,
    fill_tensor,
    random_state,
    require_dense,
    require_kept,
)
from elastic_driver.worker.state_sync.values import (
    DEEPEST,
    SIMPLE,
    Kind,
    child_names,
    has_nameless_factory,
    has_part,
    is_array,
    is_single,
    kind_of,
    knot,
    too_deep,
    unkept,
)


class _Held:
    """A container, and what it held at the commit."""

    __slots__ = ("items", "kind", "value")

    def __init__(self, value: Any, kind: Kind) -> None:
        self.value, self.kind = value, kind
        self.items: list[Any] | None = None

    def put_back(self, done: dict[int, Any]) -> Any:
        done[id(self)] = self.value
        items = [put_back(item, done) for item in self.items or ()]
        if self.kind.fill is not None:
            self.kind.fill(self.value, items)
        return self.value

    def as_kept(self, done: dict[int, Any]) -> Any:
        if id(self) in done:
            return done[id(self)]
        kind = self.kind
        more = self.kind.more(self.value)
        if kind.fill is None:
            done[id(self)] = kind.make([as_kept(item, done) for item in self.items or ()], more)
        else:
            done[id(self)] = kind.make([], more)  # first, because it may hold itself
            kind.fill(done[id(self)], [as_kept(item, done) for item in self.items or ()])
        return done[id(self)]


class _HeldBytes:
    """A `bytearray`."""

    __slots__ = ("copy", "value")

    def __init__(self, value: bytearray) -> None:
        self.value = value
        self.copy = bytes(value)

    def put_back(self, _done: dict[int, Any]) -> Any:
        self.value[:] = self.copy
        return self.value

    def as_kept(self, _done: dict[int, Any]) -> Any:
        return bytearray(self.copy)


class _HeldTensor:
    """A tensor, and a copy of its content."""

    __slots__ = ("copy", "flag", "value")

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.copy = value.detach().clone()
        self.flag = value.requires_grad

    def put_back(self, _done: dict[int, Any]) -> Any:
        fill_tensor(self.value, self.copy)
        if self.value.requires_grad != self.flag:
            self.value.requires_grad_(self.flag)
        return self.value

    def as_kept(self, _done: dict[int, Any]) -> Any:
        if isinstance(self.value, nn.Parameter):
            return nn.Parameter(self.copy, self.flag)
        return self.copy.detach().requires_grad_(self.flag)


class _HeldArray:
    """A NumPy array, and a copy of it."""

    __slots__ = ("copy", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.copy = value.copy()

    def put_back(self, _done: dict[int, Any]) -> Any:
        value, copy = self.value, self.copy
        if value.dtype == copy.dtype and value.shape != copy.shape and value.flags.owndata:
            value.resize(copy.shape, refcheck=False)
        if value.dtype != copy.dtype or value.shape != copy.shape:
            self.value = copy.copy()  # it cannot become again what it was
        elif value.flags.writeable:
            value[...] = copy
        return self.value

    def as_kept(self, _done: dict[int, Any]) -> Any:
        return self.copy


class _HeldRandom:
    """A random generator, and its state."""

    __slots__ = ("copy", "value", "write")

    def __init__(self, value: Any, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self.value, self.write = value, write
        state = read()
        self.copy = state.clone() if isinstance(state, Tensor) else state

    def put_back(self, _done: dict[int, Any]) -> Any:
        self.write(self.copy)
        return self.value

    def as_kept(self, _done: dict[int, Any]) -> Any:
        return self.value  # where it is counts for no comparison


_HELD = (_Held, _HeldTensor, _HeldArray, _HeldBytes, _HeldRandom)


class Taker:
    """Copies values at one commit, so that `put_back` can make them what they are now.

    `parts` collects the objects inside that have a part of their own, by path; `tensors` the
    tensors; `nameless` the paths of dictionaries whose factory has no name.

    Args:
        made_at_first: paths of such dictionaries that every worker makes by itself; None: all are.
        alone: the values are those of one object, in which no other objects have parts.
    """

    def __init__(
        self, made_at_first: Collection[str] | None = None, *, alone: bool = False
    ) -> None:
        self._made_at_first = frozenset[str]() if alone else made_at_first
        self._alone = alone
        self.nameless: set[str] = set()
        self._depth = 0
        self.parts: dict[str, Any] = {}
        self.tensors: list[tuple[str, Tensor]] = []
        self._seen: dict[int, Any] = {}
        self._known: set[int] = set()  # identities of the parts

    def take(self, value: Any, path: str) -> Any:
        """Return the copy of a value. Raises `UnkeptError` for a value that cannot be kept."""
        kind = type(value)
        if kind in SIMPLE:
            return value
        found = self._seen.get(id(value))
        if found is not None:
            if type(found) is _Held and found.items is None and found.kind.fill is None:
                raise knot(path, value)
            return found
        if (container := kind_of(kind)) is not None:
            return self._take_container(value, container, path)
        held = self._take_single(value, path)
        if isinstance(held, _HELD):
            self._seen[id(value)] = held
        return held

    def add_part(self, path: str, thing: Any) -> None:
        """Note an object with a part of its own; one that is in several places is one part."""
        if id(thing) not in self._known:
            self._known.add(id(thing))
            while path in self.parts:  # keys may read alike: 1 and "1"
                path += "'"
            self.parts[path] = thing

    def _take_container(self, value: Any, kind: Kind, path: str) -> Any:
        if kind.problem is not None:
            raise UnkeptError(path, *kind.problem)
        if type(value) is defaultdict and has_nameless_factory(value):
            self.nameless.add(path)
            if self._made_at_first is not None and path not in self._made_at_first:
                raise UnkeptError(path, *_NAMELESS)
        held = self._seen[id(value)] = _Held(value, kind)
        items = kind.children(value)
        if SIMPLE.issuperset(map(type, items)):
            held.items = items
            return held
        names = child_names(value, items)
        if self._depth >= DEEPEST:
            raise too_deep(path)
        self._depth += 1
        held.items = [
            self.take(each, f"{path}{name}") for each, name in zip(items, names, strict=True)
        ]
        self._depth -= 1
        return held

    def _take_single(self, value: Any, path: str) -> Any:
        if is_single(value):
            return value
        if isinstance(value, Tensor):
            require_kept(value, path)
            self.tensors.append((path, value))
            return _HeldTensor(value)
        if has_part(value) and not self._alone:
            self.add_part(path, value)
            return value
        if is_array(value):
            return _HeldArray(value)
        if type(value) is bytearray:
            return _HeldBytes(value)
        if (found := random_state(value)) is not None:
            return _HeldRandom(value, *found)
        raise unkept(path, value)


def put_back(kept: Any, done: dict[int, Any] | None = None) -> Any:
    """Make the object that was kept what it was then; return it.

    `done`: what stays as it is in this roll-back, by the identity of its copy; see `left`.
    """
    if not isinstance(kept, _HELD):
        return kept
    done = {} if done is None else done
    return done[id(kept)] if id(kept) in done else kept.put_back(done)


def as_kept(kept: Any, done: dict[int, Any]) -> Any:
    """Return a value equal to the one that was kept; the script's own stays as it is.

    `done`: of one call for all values, so that objects that occur twice stay one. It is to be read
    only: tensors and arrays in it are the copies themselves.
    """
    return kept.as_kept(done) if isinstance(kept, _HELD) else kept


def size_of(kept: Any, seen: set[int]) -> tuple[int, int]:
    """Return the bytes and the number of all tensors and arrays that were copied for a commit.

    `seen`: the identities of what was counted already.
    """
    size = count = 0
    pending = [kept]
    while pending:
        each = pending.pop()
        if type(each) in SIMPLE or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, _Held):
            pending += each.items or ()
        elif isinstance(each, _HeldTensor | _HeldArray):
            pending.append(each.copy)
        elif isinstance(each, Tensor) or is_array(each):
            size, count = size + each.nbytes, count + 1
        elif (kind := kind_of(type(each))) is not None:
            pending += kind.children(each)
    return size, count


def objects_in(kept: Any) -> dict[int, Any]:
    """Return the objects that were kept, also inside of others: their copies, by identity."""
    found: dict[int, Any] = {}
    pending = [kept]
    while pending:
        each = pending.pop()
        if isinstance(each, _HELD) and id(each.value) not in found:
            found[id(each.value)] = each
            pending += (each.items or ()) if isinstance(each, _Held) else ()
    return found


def left(kept: Any, but: Collection[int]) -> dict[int, Any]:
    """Return what `put_back` is to leave as it is: the objects of these identities."""
    return {id(copy): copy.value for number, copy in objects_in(kept).items() if number in but}


_NAMELESS = (
    "it is a defaultdict that makes its values by a function without a name that other workers "
    "know",
    "define the function at the top of a module, or make the defaultdict when the state is made",
)


def copied(value: Any) -> Any:
    """Return a copy of a value that shares nothing with it that can change.

    For the `state_dict()` of objects that load what they are given. What occurs twice in it is one
    object in the copy, too. Raises `UnkeptError`.
    """
    return _copied(value, {}, 0)


def _copied(value: Any, done: dict[int, tuple[Any, Any]], depth: int) -> Any:
    kind = type(value)
    if kind in SIMPLE:
        return value
    found = done.get(id(value))
    if found is not None:
        return found[1]
    if depth > DEEPEST:
        raise too_deep(_THEIRS)
    copy = _copy_of(value, kind, done, depth + 1)
    done[id(value)] = value, copy  # the value, too, so that its identity is not used again
    return copy


def _copy_of(value: Any, kind: type, done: dict[int, tuple[Any, Any]], depth: int) -> Any:
    if kind is dict and SIMPLE.issuperset(map(type, value)):
        return {k: v if type(v) in SIMPLE else _copied(v, done, depth) for k, v in value.items()}
    if kind is list:
        return [v if type(v) in SIMPLE else _copied(v, done, depth) for v in value]
    if (container := kind_of(kind)) is not None:
        if container.problem is not None:
            raise UnkeptError(_THEIRS, *container.problem)
        if has_nameless_factory(value):
            raise UnkeptError(_THEIRS, *_NAMELESS)
        items = container.children(value)
        if not SIMPLE.issuperset(map(type, items)):
            items = [_copied(item, done, depth) for item in items]
        return container.make(items, container.more(value))
    if isinstance(value, Tensor):
        require_dense(value, _THEIRS)
        return value.detach().clone()
    if is_array(value) or type(value) is bytearray:
        return value.copy()
    if is_single(value):
        return value
    raise unkept(_THEIRS, value)


_THEIRS = "its state_dict()"  # in place of a path; `UnkeptError.inside` adds whose
