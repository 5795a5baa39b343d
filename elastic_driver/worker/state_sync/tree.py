"""A state as a tree of leaves: one walk over everything that a script has given to it.

`Tree` holds the attributes of a state. Each commit walks them (`keep`): objects that were replaced,
added or removed since the last one are seen there, and what cannot be kept is refused by name.
Modules, optimizers and other objects with a state of their own have a part each (`parts`), also
inside of lists and dictionaries. Their tensors are `leaves`. Everything else is a plain value.

The same walk serves to roll back, to send and receive, to write checkpoints, and to compare ranks.
"""

import time
from collections.abc import Callable, Collection
from operator import is_
from typing import Any, NamedTuple

import msgspec
from torch import Tensor
from torch.optim import Optimizer

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.contents import UnkeptError
from elastic_driver.worker.state_sync.leaves import Leaves
from elastic_driver.worker.state_sync.message import ComparingWriter
from elastic_driver.worker.state_sync.module_parts import ModulePart, part_for
from elastic_driver.worker.state_sync.optimizer_part import OptimizerPart
from elastic_driver.worker.state_sync.part import Glance, Rest, StatePart, Structure, trained_by
from elastic_driver.worker.state_sync.steps import Gradients, Steps
from elastic_driver.worker.state_sync.taking import (
    Taker,
    as_kept,
    left,
    objects_in,
    put_back,
    size_of,
)
from elastic_driver.worker.state_sync.values import SIMPLE, has_part, too_deep

MOST_ENTRIES = 64  # of a table whose entries are compared one by one
SMALL_BYTES = 1024 * 1024  # of a buffer that is copied at each commit
PartMaker = Callable[[str, Any], StatePart | None]


class _Usual(NamedTuple):
    """Attributes that are numbers and the like, but for some objects that have parts."""

    kinds: list[type[Any]]  # of all
    things: dict[str, Any]  # those that have parts

    def is_like(self, values: dict[str, Any]) -> bool:
        """Return whether these attributes need no walk."""
        things = map(values.get, self.things)
        is_like = self.kinds == list(map(type, values.values()))
        return is_like and all(map(is_, things, self.things.values()))


class _Resting(NamedTuple):
    """Parts that commits can spare."""

    glance: Glance | None  # at what all parts are made of
    rests: dict[StatePart, Rest]

    def awake(self, now: float) -> list[StatePart]:
        """Return the parts that cannot be spared now."""
        rests = self.rests
        try:
            return [
                part
                for part, (until, settings, kept) in rests.items()
                if now >= until or settings != kept
            ]
        except Exception:  # a setting is a tensor now, say, which equals nothing
            return [*rests]


class Tree:
    """The attributes of one state, and what they held at its last commit.

    Args:
        values: the attributes by name; the state's own dictionary.
        steps: of the optimizers.
        make_part: returns the part of an object, None for a plain value.
        needs_part: whether an attribute has a part.
        clock: seconds.
    """

    def __init__(
        self,
        values: dict[str, Any],
        steps: Steps,
        make_part: PartMaker = part_for,
        needs_part: Callable[[Any], bool] = has_part,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.values, self.steps = values, steps
        self._make_part, self._needs_part = make_part, needs_part
        self._clock = clock
        self.parts: dict[str, StatePart] = {}
        self.leaves = Leaves(steps)
        self.gradients = Gradients()
        steps.on_begin = self.gradients.before
        self._objects: dict[str, Any] = {}  # that have parts, as they were at the last walk
        self._given: dict[str, Any] = {}  # those of them that are no optimizers of optimizers
        self._usual: _Usual | None = None  # None: each of them has to be looked at
        self._glance: Glance | None = None  # at what they are made of
        self._is_seen = False  # the last walk has found this to be the same
        self._resting: _Resting | None = None  # what the next commit can spare
        self._optimizers: list[Optimizer] | None = None
        self._kept: dict[str, Any] | None = None  # of the attributes: values, copies, objects
        self._kept_parts: dict[str, StatePart] = {}
        self._names: dict[int, str] = {}  # of parameters and trained attributes, by identity
        self._trained_attributes: list[int] = []  # identities of plain tensors with gradients
        self.known: dict[str, Tensor] = {}  # all these, by name
        self._is_named = False
        self._is_torn = False  # the roll-back has failed half-way
        self._nameless: set[str] = set()  # see `Taker`: what was there before the first commit
        self.changes = 0  # how often the walk has found another structure

    # ---- the walk ------------------------------------------------------------------------

    def walk(self, *, lenient: bool = False) -> dict[str, Any]:
        """Walk all attributes as they are now; return their copies.

        `lenient`: plain values are about to be replaced, so they may be of any kind. Raises
        `UnkeptError` for what cannot be kept.
        """
        if (usual := self._walk_as_usual()) is not None:
            return usual
        at_first = None if self._kept is None else self._nameless
        taker = Taker(at_first)
        kept = {}
        known = self._objects
        needs_part = self._needs_part
        for name, value in self.values.items():
            if type(value) in SIMPLE:
                kept[name] = value
            elif known.get(name) is value or needs_part(value):
                kept[name] = value
                taker.add_part(name, value)
            else:
                try:
                    kept[name] = self._taken(taker, name, value)
                except UnkeptError:
                    if not lenient:
                        raise
        if self._kept is None:
            self._nameless |= taker.nameless
        self._arrange(taker.parts, taker.tensors)
        things = {name: value for name, value in kept.items() if type(value) not in SIMPLE}
        has_plain = list(taker.parts) != list(things)
        is_usual = not has_plain and self._glance is not None
        self._usual = _Usual(list(map(type, kept.values())), things) if is_usual else None
        return kept

    def _walk_as_usual(self) -> dict[str, Any] | None:
        """Return the copies of all attributes; None where all have to be walked.

        They need no walk where all are numbers and the like, but for objects that have parts, which
        are those of the last walk, made of the same things.
        """
        usual = self._usual
        glance = self._glance
        kept = self.values.copy()
        if usual is None or glance is None or not usual.is_like(kept) or not glance.is_same():
            return None
        self._is_seen = True
        return kept

    def _taken(self, taker: Taker, name: str, value: Any) -> Any:
        try:
            return taker.take(value, name)
        except RecursionError:
            raise too_deep(name) from None

    def _arrange(self, objects: dict[str, Any], plain: list[tuple[str, Tensor]]) -> None:
        """Give each object its part; look at all parts, and hand their tensors to `leaves`."""
        trained = [(path, tensor) for path, tensor in plain if tensor.requires_grad]
        attributes = [id(tensor) for _, tensor in trained]
        if attributes != self._trained_attributes:
            self._is_named = False
        glance = self._glance if self._is_named and _are_alike(objects, self._given) else None
        self._is_seen = glance is not None and glance.is_same()
        if self._is_seen:
            return
        self._given = dict(objects)
        self._optimizers = None
        self._usual = self._glance = None
        for path, optimizer in _inner_optimizers(objects):
            objects[path] = optimizer
        changed = not _are_alike(objects, self._objects)
        if changed:
            parts = {}
            for path, thing in objects.items():
                part = self.parts.get(path) or self._kept_parts.get(path)
                if part is None or part.thing is not thing:
                    part = self._make_part(path, thing)
                if part is not None:
                    parts[path] = part
            self.parts, self._objects = parts, objects
        looks = [part.look() for part in self.parts.values()]  # all of them
        if changed or any(looks):
            self._is_named = False
        if not self._is_named:
            self._name_all(trained)
            self._trained_attributes, self._is_named = attributes, True
        structures = [part.structure() for part in self.parts.values()]
        if None not in structures:
            inner = Structure([vars(each) for each in self.optimizers()], ())
            self._glance = Glance([inner, *filter(None, structures)])

    def _name_all(self, attributes: list[tuple[str, Tensor]]) -> None:
        """Name all tensors, and tell `leaves` which of them optimizers move."""
        for part in self.parts.values():
            part.require_kept()
        self.changes += 1
        modules = self._all(ModulePart)
        optimizers = self._all(OptimizerPart)
        tensors = [pair for part in modules for pair in part.tensors()]
        names: dict[int, str] = {}
        for name, tensor in (*tensors, *attributes):
            names.setdefault(id(tensor), name)
        known = {names[id(tensor)]: tensor for _, tensor in (*tensors, *attributes)}
        trained: set[str] = set()
        remembered: list[tuple[str, Tensor, Tensor | None]] = []
        for part in optimizers:
            part.know(known)
            tensors += part.own_parameters()
            remembered += part.remembered()
            trained.update(name for name, _ in part.tensors())
            trained.update(names[id(p)] for p in part.parameters() if id(p) in names)
        self._require_trained(known)
        self._names = {id(tensor): name for name, tensor in known.items()}
        for part in optimizers:
            self._names |= {id(p): n for n, p in part.own_parameters()}
        self.known = known
        buffers = {id(b): b.nbytes for part in modules for _, b in part.buffers()}
        small = {n for n, t in tensors if buffers.get(id(t), SMALL_BYTES + 1) <= SMALL_BYTES}
        self.leaves.arrange(tensors, remembered, trained, small)
        parameters = self.parameters()
        told = set(map(id, parameters))
        untold = [t for t in known.values() if t.requires_grad and id(t) not in told]
        self.gradients.watch(self.optimizers(), untold)
        self.steps.known = {id(tensor) for _, tensor, *_ in (*tensors, *remembered)}
        self.steps.known.update(map(id, parameters))
        for value in self.values.values():
            if callable(tell := getattr(value, "trained_by", None)):
                tell(parameters)

    def _require_trained(self, known: dict[str, Tensor]) -> None:
        """Raise `UnkeptError` for an optimizer that trains what no part of the state keeps."""
        kept = set(map(id, known.values()))
        for name, part in self.parts.items():
            if not isinstance(part.thing, Optimizer) or isinstance(part, OptimizerPart):
                continue
            if any(id(parameter) not in kept for parameter in trained_by(part.thing)):
                raise UnkeptError(
                    name,
                    f"it is a {type(part.thing).__name__} with a state_dict() of its own, and "
                    "trains a parameter that is in no module of the state",
                    "give the state the parameter, or the module that it belongs to",
                )

    def _all(self, kind: type[Any]) -> list[Any]:
        return [part for part in self.parts.values() if isinstance(part, kind)]

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers of the state."""
        if self._optimizers is None:
            things = [part.thing for part in self.parts.values()]
            self._optimizers = [thing for thing in things if isinstance(thing, Optimizer)]
        return self._optimizers

    def parameters(self) -> list[Tensor]:
        """Return all parameters that the state's optimizers train, each once."""
        found = {id(p): p for optimizer in self.optimizers() for p in trained_by(optimizer)}
        return list(found.values())

    # ---- commits -------------------------------------------------------------------------

    def keep(self, *, from_others: bool = False) -> None:
        """Walk everything, and copy what `roll_back` puts back.

        `from_others`: the state was received, so that its changes say nothing about the script.
        """
        kept = self.walk()
        now = self.steps.now()
        gradients = self.gradients.take(self.optimizers(), from_others=from_others)
        resting = self._resting if self._is_seen and not from_others else None
        if resting is not None and resting.glance is self._glance:
            parts = resting.awake(self._clock())
        else:
            parts = [*self.parts.values()]
            resting = None
        self._resting = None
        taken = [(part, part.take()) for part in parts]
        self.leaves.keep(now, from_others=from_others)
        # Nothing fails from here on: a commit counts as a whole, or the last one still does.
        for part, each in taken:
            part.kept = each
        self.gradients.note_commit(gradients, now)
        self._kept, self._kept_parts = kept, self.parts
        self._resting = resting or _Resting(self._glance, {})
        self._resting.rests.update((part, part.rest()) for part in parts)
        self._is_torn = False
        self.steps.restart()

    def copies(self) -> list[tuple[int, int, str, str]]:
        """Return what each commit copies: bytes, number of tensors, name of the first, and why."""
        leaves = self.leaves
        seen = set[int]()
        name, why = next(iter(leaves.moving.items()), ("", ""))
        found = [(leaves.copied_bytes, len(leaves.moving), name, why)]
        why = "it is a value of the state, and no parameter or buffer"
        for name, kept in (self._kept or {}).items():
            if name not in self._kept_parts:
                found.append((*size_of(kept, seen), name, why))
        for name, part in self._kept_parts.items():
            found.append((*size_of(part.copies(), seen), name, why))
        for name, copy in self.kept_gradients():
            found.append((copy.nbytes, 1, f"the gradient of {name}", "no step has used it yet"))
        return [each for each in found if each[1]]

    def is_clean(self) -> bool:
        """Return whether everything is, or can be put back to, what it was at the commit."""
        return not self._is_torn and self.leaves.is_clean()

    def roll_back(self, but: Collection[int] = ()) -> None:
        """Put everything back, in the script's own objects. Only where the tree is clean.

        `but`: the identities of objects and tensors that stay as they are.
        """
        if self._kept is None:
            return
        self._is_torn = True
        done: dict[int, Any] = {}
        for kept in self._kept.values() if but else ():
            done |= left(kept, but)
        values = {name: put_back(kept, done) for name, kept in self._kept.items()}
        self.values.clear()
        self.values.update(values)
        self.parts, self._optimizers = self._kept_parts, None
        self._usual = self._glance = None
        self._objects = {path: part.thing for path, part in self.parts.items()}
        for part in self.parts.values():
            if id(part.thing) not in but:
                part.roll_back()
        self.leaves.roll_back(but)
        self.drop_gradients()
        self.gradients.put_back(self.optimizers())
        self.steps.restart()
        self._is_torn = False

    def objects(self) -> set[int]:
        """Return the identities of all that can change here: values, parts and tensors."""
        plain = {id(value) for value in self.values.values() if type(value) not in SIMPLE}
        for kept in (self._kept or {}).values():
            plain |= objects_in(kept).keys()
        return plain | {id(part.thing) for part in self.parts.values()} | self.steps.known

    def drop_gradients(self) -> None:
        """Drop the gradients of all parameters of the state, whoever trains them."""
        for parameter in (*self.known.values(), *self.parameters()):
            if parameter.is_leaf:
                parameter.grad = None

    def kept_gradients(self, *, sure: bool = False) -> list[tuple[str, Tensor]]:
        """Return the gradients of the commit by name of their parameter; see `Gradients.named`."""
        return self.gradients.named(self._names, sure=sure)

    def receive_gradients(self, found: list[tuple[str, Tensor]]) -> None:
        """Take over the sender's; raises `UsageError` for one of an unknown parameter."""
        by_name = {
            name: tensor
            for part in self._all(OptimizerPart)
            for name, tensor in part.own_parameters()
        }
        by_name |= self.known
        strange = [name for name, _ in found if name not in by_name]
        if strange:
            raise UsageError(
                f"the sender has a gradient of {strange[0]!r}, which is not known here"
            )
        self.drop_gradients()
        pairs = [(by_name[name], gradient) for name, gradient in found]
        self.gradients.receive(pairs, self.optimizers())

    # ---- what is compared ----------------------------------------------------------------

    def compared(
        self, local: frozenset[str], *, as_committed: bool = False
    ) -> tuple[list[tuple[str, Any]], list[tuple[str, Tensor]]]:
        """Return name and value of each small leaf, and of each tensor, that ranks have alike.

        `local`: names of attributes and leaves that differ by intention. `as_committed`: what they
        were at the last commit, for a clean tree; otherwise as they are, right after `keep`.
        Floating-point buffers and counts of batches are left out: with DistributedDataParallel each
        rank has running statistics of its own. Which leaves are compared follows from the state
        alone, not from what this process has seen.
        """
        values, parts = self.values, self.parts
        names = self.leaves.names
        tensors = self.leaves.tensors
        copies = dict[int, Tensor]()
        if as_committed:
            done: dict[int, Any] = {}
            values = {name: as_kept(kept, done) for name, kept in (self._kept or {}).items()}
            parts, (names, tensors, copies) = self._kept_parts, self.leaves.committed()
        small: list[tuple[str, Any]] = []
        for name, value in values.items():
            if name not in parts and name not in local:
                small += [(f"state.{path}", each) for path, each in _entries(name, value)]
        large: list[tuple[str, Tensor]] = []
        statistics: set[int] = set()
        for part in parts.values():
            if not _is_local(part.name, local):
                small += part.values()
            if isinstance(part, ModulePart):
                statistics.update(id(b) for n, b in part.buffers() if _is_statistic(n, b))
        for name, tensor in zip(names, tensors, strict=True):
            if id(tensor) not in statistics and not _is_local(name, local):
                large.append((name, copies.get(id(tensor), tensor)))
        for name, tensor in self.kept_gradients(sure=True):
            if not _is_local(name, local):
                large.append((f"gradient of {name}", tensor))
        if not local:
            return small, large
        return [
            pair for pair in small if not _is_local(pair[0].removeprefix("state."), local)
        ], large

    def unsure_buffers(self, local: frozenset[str]) -> list[tuple[str, list[Tensor]]]:
        """Return groups of buffers that ranks have alike or apart, by name; see `compared`."""
        return [
            (name, buffers)
            for part in self.parts.values()
            if isinstance(part, ModulePart)
            for name, buffers in part.unsure_buffers()
            if not _is_local(name, local)
        ]

    def digest_input(self, value: Any, name: str) -> tuple[bytes, list[Tensor]]:
        """Return a plain value as bytes, equal for equal values, and the tensors inside.

        Raises `UnkeptError` for a value that cannot be kept.
        """
        parts = {**self._kept_parts, **self.parts}
        writer = ComparingWriter({id(part.thing): path for path, part in parts.items()})
        data = msgspec.msgpack.encode(writer.write(value, name))
        return data, [tensor for _, tensor in writer.tensors]


def _are_alike(objects: dict[str, Any], others: dict[str, Any]) -> bool:
    """Return whether these are the same objects under the same names, in the same order."""
    return list(objects) == list(others) and all(map(is_, objects.values(), others.values()))


def _entries(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return what is compared of an attribute: the entries of a table, each for itself."""
    if type(value) is dict and 0 < len(value) <= MOST_ENTRIES and set(map(type, value)) == {str}:
        return [(f"{name}.{key}", value[key]) for key in sorted(value)]
    return [(name, value)]


def _is_statistic(name: str, buffer: Tensor) -> bool:
    counts = name.rpartition(".")[2] == "num_batches_tracked"
    return bool(counts or buffer.is_floating_point() or buffer.is_complex())


def _is_local(name: str, local: frozenset[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in local)


def _inner_optimizers(objects: dict[str, Any]) -> list[tuple[str, Optimizer]]:
    """Return the optimizers that optimizers hold as attributes, such as SAM's, with their paths."""
    pending = [(path, each) for path, each in objects.items() if isinstance(each, Optimizer)]
    found: list[tuple[str, Optimizer]] = []
    known: set[int] = set()
    while pending:
        path, outer = pending.pop()
        if _no_optimizers.issuperset(map(type, vars(outer).values())):
            continue
        known = known or set(map(id, objects.values()))
        for name, value in vars(outer).items():
            if not isinstance(value, Optimizer):
                _no_optimizers.add(type(value))
            elif id(value) not in known:
                known.add(id(value))
                found.append((f"{path}.{name}", value))
                pending.append(found[-1])
    return found


_no_optimizers: set[type] = set()  # types of attributes that are none
