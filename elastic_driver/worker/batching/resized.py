"""Buffers that a step resizes or makes: all ranks get the same ones.

Per-channel observers have no elements until their first micro-batch; caches are made in it. Ranks
without micro-batches have not seen that. It is rare, so it may cost: every rank tells which buffers
its micro-batches have resized or made, and each of their values goes to all ranks, in the order
of the virtual workers. All ranks then decide the same, or raise the same `UsageError`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_driver.errors import UsageError
from elastic_driver.worker.batching import agreement
from elastic_driver.worker.batching.buffers import Buffers
from elastic_driver.worker.batching.sight import Place, Rule
from elastic_driver.worker.torch_seams.modules import buffers_of, unsaved_buffers_of

_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


class _Made(msgspec.Struct, frozen=True):
    """What one micro-batch left in a buffer that is no longer as the step began with it."""

    name: str
    late: bool  # made in this step; else resized
    virtual_worker: int
    dtype: str
    shape: tuple[int, ...]
    persistent: bool


Given = tuple[_Made, Tensor]


def settle(
    model: nn.Module,
    buffers: Buffers,
    weights: Sequence[float],
    ranges: Sequence[range],
    device: torch.device,
) -> None:
    """Give such buffers the same value on every rank. Collective, if there are several ranks."""
    found = list(_made(model, buffers))
    given = found if len(ranges) == 1 else _given_by_all(found, ranges, device)
    by_name: dict[str, list[Given]] = {}
    for made, value in given:
        by_name.setdefault(made.name, []).append((made, value))
    places = {buffers.name(place): place for place in buffers.places}
    for name in sorted(by_name):
        found = sorted(by_name[name], key=lambda each: each[0].virtual_worker)
        _require_one_shape(name, found)
        if name in places:
            _fill(places[name], _resized(buffers, places[name], found, weights))
        else:
            _add(model, *_late(found))


def _made(model: nn.Module, buffers: Buffers) -> list[Given]:
    known = [(name, False) for name in buffers.odd] + [(name, True) for name in buffers.late]
    found = []
    for name, late in known:
        owner, _, key = name.rpartition(".")
        persistent = key not in unsaved_buffers_of(model.get_submodule(owner))
        values: Mapping[int, Tensor] = (buffers.late if late else buffers.odd)[name]
        for virtual_worker, value in values.items():
            shape = tuple(value.shape)
            made = _Made(name, late, virtual_worker, str(value.dtype), shape, persistent)
            found.append((made, value))
    return found


def _given_by_all(
    own: Sequence[Given], ranges: Sequence[range], device: torch.device
) -> list[Given]:
    """Return what all ranks have made, with the values on this rank's device. Collective."""
    text = msgspec.json.encode([made for made, _ in own]).decode()
    values = {(made.name, made.virtual_worker): value for made, value in own}
    everything: list[Given] = []
    for rank, (theirs, mine) in enumerate(
        zip(agreement.exchange_texts(text, device), ranges, strict=True)
    ):
        for made in msgspec.json.decode(theirs, type=list[_Made]):
            if made.dtype not in _DTYPES or made.virtual_worker not in mine:
                raise UsageError(f"rank {rank} sent a buffer {made.name} that it cannot have")
            value = values.get((made.name, made.virtual_worker))
            if value is None or rank != dist.get_rank():
                value = torch.empty(made.shape, dtype=_DTYPES[made.dtype], device=device)
            value = value.to(device).contiguous()
            if value.numel():
                dist.broadcast(value.view(-1).view(torch.uint8), rank)
            everything.append((made, value))
    return everything


def _require_one_shape(name: str, given: Sequence[Given]) -> None:
    first = given[0][0]
    for made, _ in given:
        if (made.shape, made.dtype, made.late) != (first.shape, first.dtype, first.late):
            raise UsageError(
                f"buffer {name} got another size in each micro-batch ({first.shape} and "
                f"{made.shape}); make it as large as it can become before training, or keep it "
                "out of the buffers"
            )


def _resized(
    buffers: Buffers, place: Place, given: Sequence[Given], weights: Sequence[float]
) -> Tensor:
    """Return the value of a buffer that micro-batches have resized."""
    if place.rule is Rule.CONSTANT:
        raise buffers.table(place)
    values = [value for _, value in given]
    if all(torch.equal(value, values[0]) for value in values):
        same = values[0]
    elif place.rule in _COMBINED:
        return _COMBINED[place.rule](torch.stack(values))
    elif place.rule is Rule.MEAN:
        part = torch.tensor([weights[made.virtual_worker] for made, _ in given])
        shares = (part / part.sum()).to(values[0]).view(-1, *[1] * values[0].dim())
        same = (torch.stack(values) * shares).sum(0)
    else:
        raise UsageError(
            f"buffer {buffers.name(place)} of whole numbers was resized and filled in another way "
            "by each micro-batch; change it once a step, after the loop over micro-batches"
        )
    if len(given) < len(weights) and place.start.numel():
        raise UsageError(
            f"buffer {buffers.name(place)} was resized by some micro-batches of a step and not by "
            "others; resize it before training, or between two steps"
        )
    return same


_COMBINED: dict[Rule, Callable[[Tensor], Tensor]] = {
    Rule.LOWEST: lambda values: values.amin(0),
    Rule.HIGHEST: lambda values: values.amax(0),
}


def _fill(place: Place, value: Tensor) -> None:
    with torch.no_grad():
        place.tensor.resize_(value.shape).copy_(value)


def _late(given: Sequence[Given]) -> Given:
    """Return a buffer that was made in this step: the same by all micro-batches."""
    made, value = given[0]
    for other, another in given:
        if not torch.equal(value, another):
            raise UsageError(
                f"buffer {made.name} was made in this step, with another value by virtual worker "
                f"{other.virtual_worker} than by {made.virtual_worker}; make it before training"
            )
    return made, value


def _add(model: nn.Module, made: _Made, value: Tensor) -> None:
    """Register a buffer that other ranks' micro-batches have made, unless it is there."""
    owner, _, key = made.name.rpartition(".")
    try:
        module: Any = model.get_submodule(owner)
    except AttributeError:
        module = None
    if module is None:
        raise UsageError(
            f"buffer {made.name} came with a module that other ranks do not have; add modules on "
            "every rank, between two steps"
        )
    if buffers_of(module).get(key) is None:
        if key in buffers_of(module):
            buffers_of(module)[key] = value
        else:
            module.register_buffer(key, value, persistent=made.persistent)
