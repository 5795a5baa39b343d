"""The buffers of a model in one step: their values at its start, and what micro-batches make of it.

Each micro-batch starts from the values at the step's start, whichever worker runs it. What it
leaves there is combined by the rule of the buffer (`sight.Rule`):

- MEAN: floating-point buffers become the weighted mean of what micro-batches leave. It is computed
  from the *changes*, so that what does not change keeps its bits. Where that loses more than half
  of the digits, or is no number (a start at infinity, or at 1e9), the mean of the *values* is taken
  for those elements; `StepSum` fetches it. A single number that all micro-batches leave the same (a
  counter) becomes just that, without rounding.
- COUNT: small integer buffers and flags must change by the same in every micro-batch.
- LOWEST, HIGHEST: of observers that say so.
- DERIVED: scale and zero point of a fake quantizer, computed anew from its combined observer.
- CONSTANT: tables of integers, histograms: refused by name if they change.

All that is no sum travels as *the verdict*: one vector of integers of which all ranks take the
maximum. Nothing here communicates. The tensors of a model keep their identity: a buffer that the
script rebinds or resizes is put back into the tensor that was there when the step began.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from elastic_driver.errors import UsageError
from elastic_driver.worker.batching.sight import Place, Rule, Sight, describe, names_of
from elastic_driver.worker.torch_seams import buffers_of, copy_all, flatten

_LOWEST = torch.iinfo(torch.int64).min
_HIGHEST = torch.iinfo(torch.int64).max
_KIND = attrgetter("shape", "dtype", "device")
_NOTHING = nullcontext()  # entered many times a step
_AFTER = "change it once a step, after the loop over micro-batches, or keep it out of the buffers"


class Buffers:
    """The buffers of one model, as they are in this step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sight: Sight | None = None
        self._tensors: list[Tensor] = []
        self._kinds: Any = None
        self.places: list[Place] = []

    def look(self, sight: Sight) -> bool:
        """Take over the buffers of now; return whether they are others than before."""
        if sight is self._sight and list(map(_KIND, self._tensors)) == self._kinds:
            return False
        self._sight = sight
        self._tensors = [tensor for *_, tensor in sight.buffers]
        self._kinds = list(map(_KIND, self._tensors))
        self.places = [Place(*each) for each in sight.buffers]
        self._shapes = [place.shape for place in self.places]
        self._group()
        return True

    def _group(self) -> None:
        self._means = _groups(self.places, {Rule.MEAN})
        self._counts = _groups(self.places, {Rule.COUNT}, torch.int64)
        self._extremes = _groups(self.places, {Rule.LOWEST, Rule.HIGHEST}, torch.float64)
        self._derived = _groups(self.places, {Rule.DERIVED})
        self._guarded = any(each.requires_grad for each in self._tensors)
        self._groups = self._means + self._counts + self._extremes + self._derived
        self._constants = [each for each in self.places if each.rule is Rule.CONSTANT]
        for place in self._constants:
            place.start = place.tensor.detach().clone()
        self._pointers = list(_pointers(self.places))
        self._single = [group for group in self._means if group.singles is not None]
        sizes = [len(group.start) for group in self._counts for _ in range(2)]
        sizes += [len(group.singles) for group in self._single for _ in range(2)]
        sizes += [len(group.start) for group in self._extremes]
        sizes += [1] * sum(len(group.places) for group in self._derived)
        sizes += [1] * len(self._constants)
        self._sizes = sizes  # of the parts of a verdict

    def lines(self) -> list[str]:
        """Return a line for each buffer, which must be the same on all ranks."""
        names = names_of(self._model)
        return [
            f"{describe('buffer', names.get(id(each.tensor), each.key), each.tensor)} "
            f"({each.rule.value})"
            for each in self.places
        ]

    def mean_starts(self) -> list[Tensor]:
        """Return, per kind of buffers with a mean, all values in one flat tensor: (elements,)."""
        return [group.start for group in self._means]

    def begin(self) -> None:
        """Record the values at the start of the step."""
        self._counted: list[list[Tensor]] = [[] for _ in self._counts]
        self._singles: list[list[Tensor]] = [[] for _ in self._single]
        self._reached: list[Tensor | None] = [None] * len(self._extremes)
        self._touched: list[Tensor | None] = [None] * len(self._derived)
        self._resized_derived: set[int] = set()
        self.odd: dict[str, dict[int, Tensor]] = {}  # resized in this step; by virtual worker
        self.late: dict[str, dict[int, Tensor]] = {}  # that began to exist in it
        self.trouble: UsageError | None = None
        with torch.no_grad():
            for group in self._groups:
                copy_all(group.parts, group.tensors)
            for place in self._constants:
                place.start.copy_(place.tensor)

    def rewind(self) -> None:
        """Put the recorded values back. A constant that has changed is refused later."""
        with torch.no_grad() if self._guarded else _NOTHING:
            for group in self._groups:
                copy_all(group.tensors, group.parts)

    def restore(self) -> None:
        """Put everything back, also constants, sizes and identities: the step is left half done."""
        with torch.no_grad():
            for place in self.places:
                if place.get(place.key) is not place.tensor or place.tensor.shape != place.shape:
                    place.put_back()
            for place in self._constants:
                place.tensor.copy_(place.start)
        self.rewind()

    # ---- after each micro-batch ----------------------------------------------------------

    def leaf(self, virtual_worker: int) -> list[Tensor]:
        """Take note of what this micro-batch has left; return what is to be added up.

        It is the change of each kind in `mean_starts`, and then the value of each, in new tensors.
        """
        assert self._sight is not None  # noqa: S101 - look() came first
        if not self._sight.buffers_hold() or [t.shape for t in self._tensors] != self._shapes:
            for place in self.places:
                now = place.get(place.key)
                if now is not place.tensor or place.tensor.shape != place.shape:
                    self._notice(place, now, virtual_worker)
            self._notice_late(virtual_worker)
        for found, group in zip(self._counted, self._counts, strict=True):
            found.append(group.flat())
        if self._extremes or self._derived:
            self._note_observers()
        values = [group.flat() for group in self._means]
        if self._single:
            given = [v for g, v in zip(self._means, values, strict=True) if g.singles is not None]
            for found, group, value in zip(self._singles, self._single, given, strict=True):
                found.append(value[group.singles])
        return [g.change(v) for g, v in zip(self._means, values, strict=True)] + values

    def _note_observers(self) -> None:
        for at, group in enumerate(self._extremes):
            value = group.flat() * group.signs
            before = self._reached[at]
            self._reached[at] = value if before is None else torch.maximum(before, value)
        for at, group in enumerate(self._derived):
            moved = group.flat() != group.start
            before = self._touched[at]
            self._touched[at] = moved if before is None else moved | before

    def _notice(self, place: Place, now: Tensor | None, virtual_worker: int) -> None:
        """Put a rebound or resized buffer's value where the step began with it."""
        if now is None:
            self.trouble = UsageError(
                f"buffer {self.name(place)} was removed inside the loop over micro-batches; remove "
                "buffers between two steps"
            )
        elif _class_of(now) != _class_of(place.tensor):
            self.trouble = UsageError(
                f"buffer {self.name(place)} became {now.dtype} inside the loop over micro-batches, "
                f"from {place.tensor.dtype}; register it with the type that it is to have"
            )
        elif now.shape == place.shape:
            place.put_back(now.detach())
            return
        elif place.rule is Rule.DERIVED:
            self._resized_derived.add(id(place))
        else:
            found = self.odd.setdefault(self.name(place), {})
            found[virtual_worker] = now.detach().to(place.tensor.dtype, copy=True)
        place.put_back()

    def _notice_late(self, virtual_worker: int) -> None:
        known = {(id(place.module), place.key) for place in self.places}
        for prefix, module in self._model.named_modules():
            for key, tensor in buffers_of(module).items():
                if tensor is not None and (id(module), key) not in known:
                    name = f"{prefix}.{key}" if prefix else key
                    if any(tensor is place.tensor for place in self.places):
                        continue  # another name of the same tensor
                    self.late.setdefault(name, {})[virtual_worker] = tensor.detach().clone()

    def name(self, place: Place) -> str:
        """Return the name of a buffer: "1.running_mean"."""
        for prefix, module in self._model.named_modules():
            if module is place.module:
                return f"{prefix}.{place.key}" if prefix else place.key
        return place.key

    # ---- at the end of the step ----------------------------------------------------------

    def verdict(self, device: torch.device) -> Tensor | None:
        """Return this rank's part of what is no sum: integers, to be combined by their maximum."""
        parts: list[Tensor] = []
        for found, group in zip(self._counted, self._counts, strict=True):
            if found:
                least, most = torch.aminmax(torch.stack(found), dim=0)
                parts += [most - group.start, group.start - least]
            else:
                parts += [torch.full_like(group.start, _LOWEST)] * 2
        for found, group in zip(self._singles, self._single, strict=True):
            if found:
                least, most = torch.aminmax(_to_key(torch.stack(found).to(torch.float64)), dim=0)
                parts += [most, -1 - least]
            else:
                parts += [torch.full_like(group.singles, _LOWEST)] * 2
        for value, group in zip(self._reached, self._extremes, strict=True):
            parts.append(
                torch.full_like(group.start, _LOWEST, dtype=torch.int64)
                if value is None
                else _to_key(value)
            )
        for moved, group in zip(self._touched, self._derived, strict=True):
            flags = torch.zeros_like(group.start, dtype=torch.bool) if moved is None else moved
            parts += [
                part.any().view(1) | (id(place) in self._resized_derived)
                for place, part in zip(group.places, group.shaped(flags), strict=True)
            ]
        parts += [
            (_comparable(place.tensor) != _comparable(place.start)).any().view(1)
            for place in self._constants
        ]
        return torch.cat([part.to(device, torch.int64) for part in parts]) if parts else None

    @property
    def verdict_size(self) -> int:
        """The integers of a verdict."""
        return sum(self._sizes)

    @staticmethod
    def no_verdict(size: int, device: torch.device) -> Tensor:
        """Return the verdict of a rank that has none."""
        return torch.full((size,), _LOWEST, device=device)

    def judge(self, verdict: Tensor | None) -> None:
        """Read what all ranks found. Raises `UsageError`, the same on all of them.

        The tensors are not touched yet; `apply` needs the result.
        """
        self._added: list[Tensor] = []
        self._same: list[tuple[Tensor, Tensor]] = []
        self._found: list[Tensor] = []
        self._remade: list[Place] = []
        if verdict is None:
            return
        parts = iter(verdict.cpu().split_with_sizes(self._sizes))
        for group in self._counts:
            most = next(parts)
            least = -next(parts)
            if not torch.equal(most, least):
                raise self._uneven(group, most, least)
            self._added.append(most.to(group.device))
        for _group in self._single:
            high = next(parts)
            low = -1 - next(parts)
            self._same.append((high == low, _from_key(high)))
        self._found = [_from_key(next(parts)).to(g.device) * g.signs for g in self._extremes]
        derived = [place for group in self._derived for place in group.places]
        self._remade = [place for place in derived if next(parts)]
        for place, part in zip(self._constants, parts, strict=True):
            if bool(part):
                raise self.table(place)

    def table(self, place: Place) -> UsageError:
        """Return the error for a buffer that must not change while micro-batches run."""
        return UsageError(
            f"buffer {self.name(place)} was changed by micro-batches, and a table of integers, a "
            f"histogram or a queue has no mean over them; {_AFTER}"
        )

    def _uneven(self, group: "_Group", most: Tensor, least: Tensor) -> UsageError:
        for place, high, low in zip(
            group.places, group.shaped(most), group.shaped(least), strict=True
        ):
            if not torch.equal(high, low):
                at = int((high != low).reshape(-1).nonzero()[0])
                return UsageError(
                    f"buffer {self.name(place)} of whole numbers was changed by "
                    f"{int(low.reshape(-1)[at])} in one micro-batch and by "
                    f"{int(high.reshape(-1)[at])} in another, so it depends on the samples; "
                    f"{_AFTER}"
                )
        raise AssertionError("the parts of a group are its whole")

    def means(self, changes: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the new values of each kind with a mean, and the elements for which they fail.

        `changes` are the sums over all workers. Elements are indices into the flat tensor: there
        the mean of the values has to be taken. None: there are none.
        """
        found: list[Tensor] = []
        failed: list[Tensor | None] = []
        for group, change in zip(self._means, changes, strict=True):
            value = group.start + change
            found.append(value)
            digits = torch.sub(value.abs(), group.start.abs(), alpha=group.smallest)
            least, most = map(float, torch.aminmax(digits)) if len(digits) else (0, 0)
            if least >= 0 and most < math.inf:  # the usual case, in few operations
                failed.append(None)
                continue
            bad = ((digits < 0) | ~value.isfinite()) & (change != 0)
            failed.append(bad.nonzero().view(-1) if bool(bad.any()) else None)
            group.infinite = True  # or it may be, from now on
        return found, failed

    def settle_singles(self, means: Sequence[Tensor]) -> None:
        """Put single numbers that all micro-batches left the same in place of their mean."""
        given = [m for g, m in zip(self._means, means, strict=True) if g.singles is not None]
        for group, mean, (same, value) in zip(self._single, given, self._same, strict=True):
            at = group.singles[same.to(group.device)]
            mean[at] = value[same].to(mean)

    def apply(self, means: Sequence[Tensor], changes: Sequence[Tensor]) -> None:
        """Set all buffers to the values of the step. Raises `UsageError` for a queue."""
        for place, count in self._pointers:
            self._refuse_queue(place, count, changes)
        for group, value in zip(self._means, means, strict=True):
            copy_all(group.tensors, group.shaped(value))
        for group, added in zip(self._counts, self._added, strict=True):
            copy_all(group.tensors, group.shaped(group.start + added))
        for group, value in zip(self._extremes, self._found, strict=True):
            copy_all(group.tensors, group.shaped(value))

    def derive(self) -> None:
        """Compute scales and zero points from their observers; these have their values."""
        modules = {id(place.module): place.module for place in self._remade}
        for module in modules.values():
            observer: Any = module.activation_post_process
            scale, zero_point = observer.calculate_qparams()
            for name, value in (("scale", scale), ("zero_point", zero_point)):
                buffer = buffers_of(module)[name]
                assert buffer is not None  # noqa: S101 - it has been changed
                buffer.resize_(value.shape).copy_(value)

    def _refuse_queue(self, pointer: Place, sibling: Place, changes: Sequence[Tensor]) -> None:
        """Raise if an integer moved by n, and another buffer changed in just n rows behind it."""
        added = next(
            part
            for group, flat in zip(self._counts, self._added, strict=True)
            for place, part in zip(group.places, group.shaped(flat), strict=True)
            if place is pointer
        )
        first = int(pointer.start)
        rows = int(added)
        if rows < 2 or first < 0:
            return
        moved = next(
            part
            for group, flat in zip(self._means, changes, strict=True)
            for place, part in zip(group.places, group.shaped(flat), strict=True)
            if place is sibling
        )
        moved = moved != 0
        for dimension, size in enumerate(moved.shape):
            if rows < size and first + rows <= size and bool(moved.any()):
                inside = moved.narrow(dimension, first, rows)
                if int(inside.sum()) == int(moved.sum()):
                    raise UsageError(
                        f"buffer {self.name(sibling)} is a queue, in which {self.name(pointer)} "
                        f"points: the samples of all micro-batches belong into it; {_AFTER}"
                    )


class _Group:
    """Buffers of one kind on one device; `start` has their values when the step began."""

    def __init__(self, dtype: torch.dtype, places: Sequence[Place]) -> None:
        self._dtype, self.places = dtype, places
        self.tensors = [place.tensor for place in places]
        self._sizes = [tensor.numel() for tensor in self.tensors]
        self._mixed = len({tensor.dtype for tensor in self.tensors}) > 1
        self.device = self.tensors[0].device
        with torch.no_grad():
            self.start = self.flat()
            self.parts = self.shaped(self.start)
        for place, part in zip(places, self.parts, strict=True):
            place.start = part
        self.infinite = not bool(self.start.isfinite().all())
        if dtype.is_floating_point or dtype.is_complex:
            self.smallest = torch.finfo(dtype).eps ** 0.5  # of a value that keeps half its digits
        singles = _singles(places)
        self.singles: Any = torch.tensor(singles, device=self.device) if singles else None
        self.signs = torch.ones_like(self.start)
        for place, part in zip(places, self.shaped(self.signs), strict=True):
            if place.rule is Rule.LOWEST:
                part.fill_(-1)

    def flat(self) -> Tensor:
        """Return all values of now, in a new tensor: (elements,)."""
        tensors, dtype = self.tensors, self._dtype
        if self._mixed:
            tensors = [tensor.to(dtype) for tensor in tensors]
        flat: Tensor
        if len(tensors) == 1:
            flat = tensors[0].to(dtype, copy=True).reshape(-1)
        else:
            flat = flatten(tensors).to(dtype)
        return flat.detach() if flat.requires_grad else flat

    def change(self, flat: Tensor) -> Tensor:
        """Return these values' difference from the start."""
        if self.infinite:  # masks: the difference of two infinities is no number
            return torch.where(flat == self.start, 0, flat - self.start)
        return flat - self.start

    def shaped(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat tensor, with the shapes of the buffers."""
        values = flat.split_with_sizes(self._sizes)
        return [value.view(each.shape) for value, each in zip(values, self.places, strict=True)]


def _groups(
    places: Iterable[Place], rules: set[Rule], dtype: torch.dtype | None = None
) -> list[_Group]:
    """Return the places with one of these rules by dtype and device; `dtype` makes them one."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Place]] = {}
    for place in places:
        if place.rule in rules:
            kind = dtype or place.tensor.dtype, place.tensor.device
            kinds.setdefault(kind, []).append(place)
    return [_Group(kind, found) for (kind, _), found in kinds.items()]


def _singles(places: Sequence[Place]) -> list[int]:
    """Return where the single numbers of a mean are in the flat tensor of these places."""
    found, at = [], 0
    for place in places:
        size = place.tensor.numel()
        if size == 1 and place.rule is Rule.MEAN and not place.tensor.is_complex():
            found.append(at)
        at += size
    return found


def _pointers(places: Sequence[Place]) -> Iterable[tuple[Place, Place]]:
    """Yield each single integer that may point into another buffer of its module, with that."""
    for place in places:
        if place.rule is Rule.COUNT and len(place.tensor.reshape(-1)) == 1:
            if place.key == "num_batches_tracked" or place.tensor.dtype == torch.bool:
                continue
            for other in places:
                if other.module is place.module and other.rule is Rule.MEAN and other.shape:
                    yield place, other


def _class_of(tensor: Tensor) -> tuple[bool, bool]:
    """Return whether these are whole, real or complex numbers: other types only round."""
    return tensor.is_floating_point(), tensor.is_complex()


def _comparable(tensor: Tensor) -> Tensor:
    """Return a view that can be compared: torch compares no floating-point numbers of 8 bits."""
    narrow = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.view(torch.uint8) if narrow else tensor


def _to_key(values: Tensor) -> Tensor:
    """Return integers in the order of these 64-bit numbers; no number is above all of them."""
    bits = values.contiguous().view(torch.int64)
    keys = bits ^ ((bits >> 63) & _HIGHEST)
    return torch.where(values.isnan(), _HIGHEST, keys)


def _from_key(keys: Tensor) -> Tensor:
    bits = keys ^ ((keys >> 63) & _HIGHEST)
    return torch.where(keys == _HIGHEST, torch.nan, bits.view(torch.float64))
