"""Finds what a script trains with and no state keeps: averages, schedulers, scalers, samplers.

It looks at a few commits at the beginning of the training, on one rank. A module, or a container of
tensors, counts as left out if it changes from commit to commit and no optimizer trains it, unless
it is a copy that is made anew from what the state has at each of them; a copy that is made now and
then holds older weights, which the state has no more. Of each, a few small pieces are compared, so
that a look takes less than a millisecond (`tests/worker/mistakes/test_left_out.py`).
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from elastic_driver.worker.mistakes.script_objects import (
    Kept,
    Variable,
    children,
    pointer_of,
    search,
    tell,
    variables,
)
from elastic_driver.worker.state_sync.contents import contents
from elastic_driver.worker.torch_seams import buffers_of, parameters_of

FIRST, LAST = 3, 20  # the commits at which changes are looked for
SEARCHES = frozenset((3, 4, 8, 16))  # the commits at which variables are looked through
CHANGES = 2  # that prove that a thing goes on changing; one of its own if it is like the weights
MOST_WATCHED = 16
PIECES = 4  # of each thing
PIECE = 1024  # numbers of a tensor that are compared
ALIKE = 0.9  # the least cosine between an average of weights and the weights
MOST_HELD = 64 * 1024 * 1024  # bytes of a container that is held on to from one commit to the next
_POSITIONS = ("ElasticSampler", "FixedBatch", "ShardedDataset")
_OURS = "elastic_driver."


class Piece(NamedTuple):
    """The beginning of a tensor, as float32 on the CPU, and its mark: equal for equal content."""

    shape: tuple[int, ...]
    values: Tensor
    mark: tuple[tuple[int, ...], int]

    @classmethod
    def of(cls, tensor: Tensor) -> "Piece | None":
        """Return a tensor's piece; None for one that cannot hold an average."""
        if not tensor.is_floating_point() or not pointer_of(tensor):
            return None
        flat = tensor.detach()
        shape = tuple(tensor.shape)
        if not flat.is_contiguous() and flat.numel() > PIECE:
            flat = flat[0]
        values = flat.reshape(-1)[:PIECE].to("cpu", torch.float32)
        return cls(shape, values, (shape, contents([values])[0]))


class Weights:
    """The pieces of the state's parameters: of now, and their marks of this and the last look."""

    MOST_ALIKE = 8  # of one shape

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in {id(p): p for p in parameters}.values():
            found = self._by_shape.setdefault(tuple(parameter.shape), [])
            if len(found) < self.MOST_ALIKE:
                found.append(parameter)
        self._now: dict[tuple[int, ...], list[Piece]] = {}
        self._marks: set[Any] = set()
        self._marks_before: set[Any] = set()

    def has_shape(self, shape: Iterable[int]) -> bool:
        """Return whether a parameter has this shape."""
        return tuple(shape) in self._by_shape

    def look(self, shapes: Iterable[tuple[int, ...]]) -> None:
        """Take the pieces of now, of parameters with these shapes."""
        self._now = {
            shape: [p for p in map(Piece.of, self._by_shape.get(shape, ())) if p is not None]
            for shape in set(shapes)
        }
        self._marks_before = self._marks
        self._marks = {piece.mark for pieces in self._now.values() for piece in pieces}

    def has(self, piece: Piece) -> bool:
        """Return whether a parameter has this content, or had it at the last look."""
        return piece.mark in self._marks or piece.mark in self._marks_before

    def has_now(self, piece: Piece) -> bool:
        """Return whether a parameter has this content."""
        return piece.mark in self._marks

    def likeness(self, piece: Piece) -> float:
        """Return the largest cosine between a piece and a parameter's of the same shape."""
        cosines = [
            torch.cosine_similarity(piece.values, other.values, dim=0).item()
            for other in self._now.get(piece.shape, ())
        ]
        return max(cosines, default=0.0)


class _Watched:
    """A thing that may be left out. `pieces` returns those of now, by name; None: it is gone."""

    def __init__(self, variable: Variable, *, must_be_alike: bool) -> None:
        self.name, self.must_be_alike = variable.name, must_be_alike
        self.kind = type(variable.thing).__name__
        self.changes = self.own_changes = 0  # own: not to what the state has
        self.is_alike = False  # has been like the weights
        self.copies = 0  # changes to what the state has, after having held what it has no more
        self.is_old = False  # holds what the state has no more
        self.last: dict[Any, Any] = {}

    def tensors(self) -> dict[Any, Tensor] | None:
        """Return the tensors of now, by place; None: the thing is gone, or another one."""
        raise NotImplementedError

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of what is compared."""
        return [tuple(t.shape) for t in (self.tensors() or {}).values()]

    def look(self, weights: Weights, trained: Callable[[Tensor], bool]) -> bool:
        """Compare with the last look; return whether the thing is still to be watched."""
        now = self.tensors()
        if now is None:
            return False
        pieces = {
            place: piece
            for place, tensor in now.items()
            if not trained(tensor) and (piece := Piece.of(tensor)) is not None
        }
        before = self.last
        self.last = {place: piece.mark for place, piece in pieces.items()}
        changed = [p for place, p in pieces.items() if before.get(place, p.mark) != p.mark]
        own = [piece for piece in changed if not weights.has(piece)]
        self.copies += bool(changed) and not own and self.is_old
        self.is_old = not changed and not all(map(weights.has_now, pieces.values()))
        self.changes += bool(changed)
        if own:
            self.is_alike = _alike(own, weights)
            self.own_changes += self.is_alike or not self.must_be_alike
        return True

    @property
    def is_proven(self) -> bool:
        """Return whether it is sure that this thing goes on changing by itself."""
        least = 1 if self.is_alike else CHANGES
        return self.changes >= CHANGES and (self.own_changes >= least or self.copies >= CHANGES)


def _alike(pieces: Sequence[Piece], weights: Weights) -> bool:
    sizes = [len(piece.values) for piece in pieces]
    cosines = [weights.likeness(piece) for piece in pieces]
    mean = sum(c * s for c, s in zip(cosines, sizes, strict=True)) / sum(sizes)
    return max(sizes) > 1 and mean >= ALIKE


class _WatchedModule(_Watched):
    """A module; parameters that change are proof enough, buffers have to look like weights."""

    def __init__(self, variable: Variable, kept: Kept, weights: Weights) -> None:
        super().__init__(variable, must_be_alike=True)
        found: list[tuple[Tensor, tuple[Any, Callable[[Any], Any], str]]] = []
        for module in variable.thing.modules():
            owner = weakref.ref(module)
            for where in (parameters_of, buffers_of):
                for name, tensor in where(module).items():
                    if tensor is not None and not kept.has_tensor(tensor):
                        found.append((tensor, (owner, where, name)))
        parameters = [pair for pair in found if pair[1][1] is parameters_of]
        self.must_be_alike = not parameters
        chosen = parameters or [pair for pair in found if weights.has_shape(pair[0].shape)]
        chosen.sort(key=lambda pair: -pair[0].numel() if pointer_of(pair[0]) else 0)
        self._places = [place for _, place in chosen[: PIECES - 1] + chosen[PIECES - 1 :][-1:]]

    def tensors(self) -> dict[Any, Tensor] | None:
        """See `_Watched`."""
        found = {}
        for number, (owner, where, name) in enumerate(self._places):
            module = owner()
            tensor = None if module is None else where(module).get(name)
            if tensor is not None:
                found[number] = tensor
        return found or None


class _WatchedContainer(_Watched):
    """A list or dictionary of tensors; to be watched it has to stay the same object.

    A large one is not held on to, so its tensors have to stay the same objects.
    """

    def __init__(self, variable: Variable, chosen: Sequence[tuple[Any, Tensor]]) -> None:
        super().__init__(variable, must_be_alike=True)
        tensors = [t for _, t in children(variable.thing) if isinstance(t, Tensor)]
        small = sum(tensor.nbytes for tensor in tensors) <= MOST_HELD
        self._held = variable.thing if small else None
        self._places = [place for place, _ in chosen]
        self._tensors = [weakref.ref(tensor) for _, tensor in chosen]

    def is_still(self, thing: Any) -> bool:
        """Return whether a thing of the same name is the watched one."""
        return self._held is None or self._held is thing

    def tensors(self) -> dict[Any, Tensor] | None:
        """See `_Watched`."""
        if self._held is None:
            alive = [ref() for ref in self._tensors]
            found = {
                place: t for place, t in zip(self._places, alive, strict=True) if t is not None
            }
            return found if len(found) == len(self._places) else None
        now = dict(children(self._held))
        return {place: t for place in self._places if isinstance(t := now.get(place), Tensor)}


class LeftOut:
    """Looks for what is left out of the states of this process."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        self._positions: dict[str, tuple[Any, Any]] = {}  # by name: a weak reference, its progress
        self._weights: Weights | None = None
        self._searched = False

    def look(
        self,
        commit: int,
        values: Callable[[], Iterable[Any]],
        frame: FrameType | None,
        trained: Callable[[Tensor], bool],
    ) -> None:
        """Look, at the commit of this number in this process.

        Args:
            commit: its number.
            values: returns all attributes of the states.
            frame: the script's, that has called commit().
            trained: whether an optimizer trains a tensor.
        """
        if commit in SEARCHES:
            self._search(values(), frame)
        elif not self._watched:
            return
        weights = self._weights
        assert weights is not None  # noqa: S101 - the first look searches
        weights.look(shape for each in self._watched.values() for shape in each.shapes())
        for name, each in list(self._watched.items()):
            if not each.look(weights, trained):
                del self._watched[name]
            elif each.is_proven:
                del self._watched[name]
                _tell_changing(each)

    def _search(self, values: Iterable[Any], frame: FrameType | None) -> None:
        kept = Kept(values)
        weights = Weights(kept.parameters)
        if self._weights is not None:
            weights._marks = self._weights._marks
        self._weights = weights
        found: set[str] = set()

        def look(variable: Variable) -> bool:
            thing = variable.thing
            if kept.has(thing):
                return False
            if isinstance(thing, nn.Module):
                self._watch(variable, lambda: _WatchedModule(variable, kept, weights), found, kept)
                return False
            if isinstance(thing, LRScheduler):
                _judge_scheduler(variable, kept)
                return False
            if isinstance(thing, torch.amp.GradScaler):
                _judge_scaler(variable, kept)
                return False
            if type(thing).__module__.startswith(_OURS):
                self._judge_position(variable)
                return False
            if isinstance(thing, Mapping | list | tuple):
                chosen = _weight_like(thing, kept, weights)
                if chosen:
                    self._watch(variable, lambda: _WatchedContainer(variable, chosen), found, kept)
            return not isinstance(thing, Tensor | torch.optim.Optimizer)

        search(variables(frame), look)
        for name, each in list(self._watched.items()):
            if isinstance(each, _WatchedContainer) and name not in found:
                del self._watched[name]

    def _watch(
        self, variable: Variable, make: Callable[[], _Watched], found: set[str], kept: Kept
    ) -> None:
        before = self._watched.get(variable.name)
        if isinstance(before, _WatchedContainer) and not before.is_still(variable.thing):
            del self._watched[variable.name]
            before = None
        found.add(variable.name)
        if before is None and len(self._watched) < MOST_WATCHED:
            new = make()
            if new.tensors() and not _is_kept_by_hand(new, variable.thing, kept):
                self._watched[variable.name] = new

    def _judge_position(self, variable: Variable) -> None:
        """Tell of a sampler that is read from commit to commit, and that no state moves."""
        thing = variable.thing
        if type(thing).__name__ not in _POSITIONS or not getattr(thing, "together", True):
            return
        now = _place_of(thing)
        reference, before = self._positions.get(variable.name, (None, None))
        self._positions[variable.name] = weakref.ref(thing), now
        if reference is None or reference() is not thing or now is None or before is None:
            return
        if before[0] == now[0] and 0 <= before[1] < now[1]:
            tell(
                "left-out",
                f"{variable.name!r} ({type(thing).__name__}) is read between commits, but is not "
                "in the state, so nobody knows what was trained of it: after a change of the "
                f"workers its data begins anew; give it to the state: "
                f"TorchState(…, {_last_name(variable.name, 'sampler')}={variable.name})",
                variable.name,
            )


def _place_of(thing: Any) -> tuple[int, int] | None:
    """Return the loop that is under way, and how far it is; None: there is none."""
    share = getattr(thing, "_pass", None)
    if share is not None:
        return id(share), share.drawn if 0 < share.drawn < share.length else -1
    step = getattr(thing, "current", None)  # of a FixedBatch
    if step is not None:
        return step.epoch, step.number
    progress = getattr(thing, "progress", None)  # of a ShardedDataset
    return None if progress is None else (0, progress.trained)


def _weight_like(thing: Any, kept: Kept, weights: Weights) -> list[tuple[Any, Tensor]]:
    """Return some tensors in a container that have shapes of parameters, and are not kept."""
    if not any(isinstance(tensor, Tensor) for _, tensor in children(thing)):
        return []
    gradients = {id(p.grad) for p in kept.parameters}
    found = [
        (place, tensor)
        for place, tensor in children(thing)
        if isinstance(tensor, Tensor)
        and tensor.numel() > 1
        and weights.has_shape(tensor.shape)
        and not kept.has_tensor(tensor)
        and id(tensor) not in gradients
    ]
    found.sort(key=lambda pair: -pair[1].numel())
    return found[:PIECES]


def _is_kept_by_hand(new: _Watched, thing: Any, kept: Kept) -> bool:
    """Return whether a state has a copy of a thing: its `state_dict()`, or its tensors."""
    keys = thing.state_dict() if isinstance(thing, nn.Module) else thing
    if isinstance(keys, Mapping) and keys and kept.keeps_dictionary_with(*keys):
        return True
    shapes = new.shapes()
    plain = [p for t in kept.plain if tuple(t.shape) in shapes and (p := Piece.of(t)) is not None]
    known = {piece.mark for piece in plain}
    mine = [Piece.of(tensor) for tensor in (new.tensors() or {}).values()]
    return bool(known) and all(piece is None or piece.mark in known for piece in mine)


def _judge_scheduler(variable: Variable, kept: Kept) -> None:
    thing = variable.thing
    if not variable.before or kept.keeps_dictionary_with("last_epoch"):
        return
    if kept.has(thing.optimizer):
        tell(
            "left-out",
            f"the scheduler {variable.name!r} ({type(thing).__name__}) is not in the state, though "
            "its optimizer is: a worker that joins begins its schedule anew; give it to the state: "
            f"TorchState(…, {_last_name(variable.name, 'scheduler')}={variable.name})",
            variable.name,
        )


def _judge_scaler(variable: Variable, kept: Kept) -> None:
    thing = variable.thing
    if (
        variable.before
        and thing.is_enabled()
        and not kept.keeps_dictionary_with("scale", "growth_factor")
    ):
        tell(
            "left-out",
            f"the gradient scaler {variable.name!r} is not in the state: a worker that joins "
            "scales its gradients otherwise than the others; give it to the state: "
            f"TorchState(…, {_last_name(variable.name, 'scaler')}={variable.name})",
            variable.name,
        )


def _tell_changing(each: _Watched) -> None:
    tell(
        "left-out",
        f"{each.name!r} ({each.kind}) changes from commit to commit, but is not in the state: when "
        "the workers change, each goes on with another one; give it to the state: "
        f"TorchState(…, {_last_name(each.name, 'average')}={each.name})",
        each.name,
    )


def _last_name(name: str, default: str) -> str:
    """Return a name for the attribute of the state that is to keep a thing."""
    last = name.rpartition(".")[2]
    return last if last.isidentifier() and not last.startswith("_") else default
