"""The buffers of a model in one step: their values at its start, and what micro-batches make of it.

Each micro-batch starts from the values at the step's start, whichever worker runs it. What it
leaves there is combined by the rule of the buffer (`sight.Rule`):

- MEAN: floating-point buffers become the weighted mean of what micro-batches leave. It is computed
  from the *changes*, so that what does not change keeps its bits. Where that loses more than half
  of the digits, or is no number (a start at infinity, or at 1e9), the mean of the *values* is taken
  for those elements; `StepSum` fetches it.
- COUNT: small integer buffers and flags must change by the same in every micro-batch.
- LOWEST, HIGHEST: of observers that say so.
- DERIVED: scale and zero point of a fake quantizer, computed anew from its combined observer.
- CONSTANT: tables of integers, histograms: refused by name if they change.

All that is no sum travels as *the verdict*: one vector of integers of which all ranks take the
maximum. Nothing here communicates. The tensors of a model keep their identity: a buffer that the
script rebinds or resizes is put back into the tensor that was there when the step began.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elastic_driver.errors import UsageError
from elastic_driver.worker.batching.sight import Place, Rule, Sight, describe

_LOWEST = torch.iinfo(torch.int64).min
_HIGHEST = torch.iinfo(torch.int64).max
_INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_AFTER = "change it once a step, after the loop over micro-batches, or keep it out of the buffers"


class Buffers:
    """The buffers of one model, as they are in this step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._signature: Any = None
        self.places: list[Place] = []
        self.look(Sight(model))

    def look(self, sight: Sight) -> bool:
        """Take over the buffers of now; return whether they are others than before."""
        self._owners, self._vacant = sight.owners, sight.vacant
        self._number = sum(map(len, sight.owners))
        signature = [
            (id(module), key, id(each), each.shape, each.dtype, each.device)
            for module, key, each in sight.buffers
        ]
        if signature == self._signature:
            return False
        self._signature = signature  # the places keep these ids taken
        self.places = [Place(*each) for each in sight.buffers]
        self._checks: list[tuple[Place, Any, str, Tensor, torch.Size]] = [
            (each, each.get, each.key, each.tensor, each.shape) for each in self.places
        ]
        self._group()
        return True

    def _group(self) -> None:
        self._means = _groups(self.places, {Rule.MEAN})
        self._counts = _groups(self.places, {Rule.COUNT}, torch.int64)
        self._extremes = _groups(self.places, {Rule.LOWEST, Rule.HIGHEST}, torch.float64)
        self._derived = _groups(self.places, {Rule.DERIVED})
        self._groups = self._means + self._counts + self._extremes + self._derived
        self._constants = [each for each in self.places if each.rule is Rule.CONSTANT]
        for place in self._constants:
            place.start = place.tensor.detach().clone()
        self._pointers = list(_pointers(self.places))

    def lines(self, names: dict[int, str]) -> list[str]:
        """Return a line for each buffer, which must be the same on all ranks."""
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
        self._reached: list[Tensor | None] = [None] * len(self._extremes)
        self._touched: list[Tensor | None] = [None] * len(self._derived)
        self._resized_derived: set[int] = set()
        self.odd: dict[str, dict[int, Tensor]] = {}  # resized in this step; by virtual worker
        self.late: dict[str, dict[int, Tensor]] = {}  # that began to exist in it
        self.removed: str | None = None
        with torch.no_grad():
            for group in self._groups:
                torch._foreach_copy_(group.parts, group.tensors)
            for place in self._constants:
                place.start.copy_(place.tensor)

    def rewind(self) -> None:
        """Put the recorded values back. A constant that has changed is refused later."""
        with torch.no_grad():
            for group in self._groups:
                torch._foreach_copy_(group.tensors, group.parts)

    def restore(self) -> None:
        """Put everything back, also constants, sizes and identities: the step is left half done."""
        with torch.no_grad():
            for place, get, key, tensor, shape in self._checks:
                if get(key) is not tensor or tensor.shape != shape:
                    place.put_back()
            for place in self._constants:
                place.tensor.copy_(place.start)
        self.rewind()

    # ---- after each micro-batch ----------------------------------------------------------

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def leaf(self, virtual_worker: int) -> list[Tensor]:
        """Take note of what this micro-batch has left; return what is to be added up.

        It is the change of each kind in `mean_starts`, and then the value of each, in new tensors.
        """
        for place, get, key, tensor, shape in self._checks:
            if (now := get(key)) is not tensor or tensor.shape != shape:
                self._notice(place, now, virtual_worker)
        if sum(map(len, self._owners)) != self._number or any(
            owner[key] is not None for owner, key in self._vacant
        ):
            self._notice_late(virtual_worker)
        for found, group in zip(self._counted, self._counts, strict=True):
            found.append(group.flat())
        for at, group in enumerate(self._extremes):
            value, before = group.flat() * group.signs, self._reached[at]
            self._reached[at] = value if before is None else torch.maximum(before, value)
        for at, group in enumerate(self._derived):
            moved, before = group.flat() != group.start, self._touched[at]
            self._touched[at] = moved if before is None else moved | before
        values = [group.flat() for group in self._means]
        return [*(g.change(v) for g, v in zip(self._means, values, strict=True)), *values]

    def _notice(self, place: Place, now: Tensor | None, virtual_worker: int) -> None:
        """Put a rebound or resized buffer's value where the step began with it."""
        if now is None:
            self.removed = self.removed or self.name(place)
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
            for key, tensor in module._buffers.items():
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

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def verdict(self, device: torch.device) -> Tensor | None:
        """Return this rank's part of what is no sum: integers, to be combined by their maximum."""
        parts: list[Tensor] = []
        for found, group in zip(self._counted, self._counts, strict=True):
            if found:
                changes = torch.stack(found) - group.start
                parts += [changes.amax(0), -changes.amin(0)]
            else:
                parts += [torch.full_like(group.start, _LOWEST)] * 2
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

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def judge(self, verdict: Tensor | None) -> None:
        """Read what all ranks found. Raises `UsageError`, the same on all of them.

        The tensors are not touched yet; `apply` needs the result.
        """
        self._added: list[Tensor] = []
        self._found: list[Tensor] = []
        self._remade: list[Place] = []
        if verdict is None:
            return
        sizes = [len(group.start) for group in self._counts for _ in range(2)]
        sizes += [len(group.start) for group in self._extremes]
        sizes += [1] * sum(len(group.places) for group in self._derived)
        sizes += [1] * len(self._constants)
        parts = iter(verdict.cpu().split_with_sizes(sizes))
        for group in self._counts:
            most, least = next(parts), -next(parts)
            if not torch.equal(most, least):
                raise self._uneven(group, most, least)
            self._added.append(most.to(group.device))
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
        found, failed = [], []
        for group, change in zip(self._means, changes, strict=True):
            value = group.start + change
            limit = group.start.abs() * group.smallest
            bad = ((value.abs() < limit) | ~value.isfinite()) & (change != 0)
            failed.append(bad.nonzero().view(-1) if bool(bad.any()) else None)
            found.append(value)
        return found, failed

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def apply(self, means: Sequence[Tensor], changes: Sequence[Tensor]) -> None:
        """Set all buffers to the values of the step. Raises `UsageError` for a queue."""
        for place, count in self._pointers:
            self._refuse_queue(place, count, changes)
        for group, value in zip(self._means, means, strict=True):
            torch._foreach_copy_(group.tensors, group.shaped(value))
        for group, added in zip(self._counts, self._added, strict=True):
            torch._foreach_copy_(group.tensors, group.shaped(group.start + added))
        for group, value in zip(self._extremes, self._found, strict=True):
            torch._foreach_copy_(group.tensors, group.shaped(value))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def derive(self) -> None:
        """Compute scales and zero points from their observers; these have their values."""
        modules = {id(place.module): place.module for place in self._remade}
        for module in modules.values():
            observer: Any = module.activation_post_process
            scale, zero_point = observer.calculate_qparams()
            for name, value in (("scale", scale), ("zero_point", zero_point)):
                buffer = module._buffers[name]
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
        first, rows = int(pointer.start), int(added)
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
        self.device = self.tensors[0].device
        with torch.no_grad():
            self.start = self.flat()
            self.parts = self.shaped(self.start)
            self._bits = _bits(self.start)
        for place, part in zip(places, self.parts, strict=True):
            place.start = part
        if dtype.is_floating_point or dtype.is_complex:
            self.smallest = torch.finfo(dtype).eps ** 0.5  # of a value that keeps half its digits
        self.signs = torch.ones_like(self.start)
        for place, part in zip(places, self.shaped(self.signs), strict=True):
            if place.rule is Rule.LOWEST:
                part.fill_(-1)

    def flat(self) -> Tensor:
        """Return all values of now, in a new tensor: (elements,)."""
        return torch.cat([tensor.reshape(-1) for tensor in self.tensors]).to(self._dtype)

    def change(self, flat: Tensor) -> Tensor:
        """Return these values' difference from the start: 0 where they are the same bits."""
        # The difference of two infinities (in masks) is no number.
        return torch.where(_bits(flat) == self._bits, 0, flat - self.start)

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


def _pointers(places: Sequence[Place]) -> Iterable[tuple[Place, Place]]:
    """Yield each single integer that may point into another buffer of its module, with that."""
    for place in places:
        if place.rule is Rule.COUNT and len(place.tensor.reshape(-1)) == 1:
            if place.key == "num_batches_tracked" or place.tensor.dtype == torch.bool:
                continue
            for other in places:
                if other.module is place.module and other.rule is Rule.MEAN and other.shape:
                    yield place, other


def _comparable(tensor: Tensor) -> Tensor:
    """Return a view that can be compared: torch compares no floating-point numbers of 8 bits."""
    narrow = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.view(torch.uint8) if narrow else tensor


def _bits(tensor: Tensor) -> Tensor:
    """Return a view in which what is no number equals itself."""
    integers = _INTEGERS.get(tensor.dtype)
    return tensor if integers is None else tensor.view(integers)


def _to_key(values: Tensor) -> Tensor:
    """Return integers in the order of these 64-bit numbers; no number is above all of them."""
    bits = values.contiguous().view(torch.int64)
    keys = bits ^ ((bits >> 63) & _HIGHEST)
    return torch.where(values.isnan(), _HIGHEST, keys)


def _from_key(keys: Tensor) -> Tensor:
    bits = keys ^ ((keys >> 63) & _HIGHEST)
    return torch.where(keys == _HIGHEST, torch.nan, bits.view(torch.float64))
