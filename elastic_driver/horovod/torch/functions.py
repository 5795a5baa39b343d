"""Sends parameters, the state of optimizers, and Python objects between the ranks.

Objects travel as bytes that torch's safe unpickler reads, after their number. A script may allow
classes of its own with `torch.serialization.add_safe_globals`, as for `torch.load`. A rank whose
object cannot be packed sends the reason in place of it: it raises its own error, all others one
that names the rank, and nobody waits. Tensors of an optimizer's state are taken out of it and
travel by themselves; it is loaded exactly as it was, into the objects that the script holds.
"""

import hashlib
import io
import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elastic_driver.errors import UsageError
from elastic_driver.horovod.common.exceptions import HorovodUsageError
from elastic_driver.horovod.common.process_sets import ProcessSet, global_process_set
from elastic_driver.horovod.engine.requests import ranks
from elastic_driver.horovod.torch.mpi_ops import (
    allgather,
    broadcast_,
    broadcast_async_,
    rank,
    synchronize,
)
from elastic_driver.worker.state_sync.contents import TensorSpec
from elastic_driver.worker.state_sync.values import first_line

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
_MAX_REASON_CHARS = 1000
# Classes of plain values for which pickle writes a call; torch's safe unpickler lacks them.
_PLAIN = (bytes, frozenset, range, slice)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any] | torch.Tensor], root_rank: int
) -> None:
    """Set tensors to those of the root rank, on all ranks.

    Args:
        params: `model.state_dict()`, or pairs such as `model.named_parameters()` gives, or a list
            of tensors. What is no tensor is left alone.
        root_rank: the rank that all others follow.

    Raises `HorovodUsageError`, on all ranks, where one has other parameters than the others.
    """
    named: dict[str, torch.Tensor] = {}

    def facts() -> dict[str, str]:
        named.update(_tensors_of(params))
        return {name: _kind(tensor) for name, tensor in named.items()}

    _require_equal("broadcast_parameters", facts)
    _broadcast_all(named, root_rank, "broadcast_parameters")


def _tensors_of(params: Any) -> dict[str, torch.Tensor]:
    """Return the tensors among the parameters by name, in an order that is the same on all ranks.

    Raises `HorovodUsageError` for what is neither a dict nor a list of pairs or tensors.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor | torch.nn.Module):
        listed = list(params)
        pairs = [
            each if isinstance(each, tuple) else (str(n), each) for n, each in enumerate(listed)
        ]
        if any(len(pair) != 2 for pair in pairs):
            raise HorovodUsageError("parameters are pairs of a name and a tensor, or tensors")
    else:
        raise HorovodUsageError(f"parameters of type {type(params).__name__}: give a state_dict()")
    tensors = [(name, value) for name, value in pairs if isinstance(value, torch.Tensor)]
    found = dict(tensors)
    if len(found) != len(tensors):
        raise HorovodUsageError("two parameters have the same name")
    return found


def _broadcast_all(tensors: Mapping[str, torch.Tensor], root_rank: int, name: str) -> None:
    """Set tensors, which have equal names and kinds on all ranks, to those of the root rank."""
    handles = [
        broadcast_async_(tensor.detach(), root_rank, f"{name}.{key}")
        for key, tensor in tensors.items()
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give the optimizer of all ranks exactly the state and the options of the root rank.

    Args:
        optimizer: of the same class and parameter groups on all ranks.
        root_rank: the rank that all others follow.
        model: not needed.

    Raises ValueError, on all ranks, for L-BFGS, and where one has another optimizer.
    """
    name, here = "broadcast_optimizer_state", rank() == root_rank
    _require_equal(name, lambda: _facts_of(optimizer))
    mine: list[torch.Tensor] = []

    def document() -> Any:
        tree, tensors = _apart(optimizer.state_dict())
        mine.extend(tensors)
        return tree, [tuple(TensorSpec.of(tensor)) for tensor in tensors]

    tree, specs = _send_object(document, root_rank, name, global_process_set)
    tensors = mine or [TensorSpec(*spec).allocate() for spec in specs]
    _broadcast_all({str(n): each for n, each in enumerate(tensors)}, root_rank, name)
    if not here:
        load_exactly(optimizer, _put_together(tree, tensors))


def _facts_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return what the optimizers of all ranks have to have in common."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise HorovodUsageError("the state of L-BFGS cannot be broadcast")
    facts = {"the optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            facts[f"parameter {index} of group {number}"] = _kind(parameter)
    return facts


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root rank's object on all ranks.

    Plain values, containers and tensors can be sent, and classes that all ranks allow with
    `torch.serialization.add_safe_globals`. Nothing that comes is executed.

    Args:
        obj: counts on the root rank only.
        root_rank: a rank of the world.
        name: makes the calls of the ranks one operation.
        process_set: the ranks that take part.

    Raises an error for another object, on all ranks: on the root rank its own, on the others
    `HorovodUsageError` with the root rank and the reason.
    """
    return _send_object(lambda: obj, root_rank, name or "broadcast_object", process_set)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, in the order of ranks. See `broadcast_object`.

    An object that one rank cannot send is an error on all ranks.
    """
    return _gather_objects(lambda: obj, name or "allgather_object")


# ---- objects ---------------------------------------------------------------------------


class _Parcel(NamedTuple):
    """The bytes that a rank sends, or in their place the reason why it has none."""

    content: bytes
    error: Exception | None = None

    @property
    def number(self) -> int:
        """Return the number of bytes; below zero for a reason."""
        return -len(self.content) if self.error else len(self.content)


def _send_object(
    make: Callable[[], Any], root_rank: int, name: str, process_set: ProcessSet
) -> Any:
    """Return on all ranks what `make` returns on the root rank; the others do not call it.

    Raises the error of `make`, or the one of packing what it returned, on the root rank, and
    `HorovodUsageError` on the others.
    """
    made: list[Any] = []
    mine = _parcel(lambda: _pack(_noted(make(), made))) if rank() == root_rank else _Parcel(b"")
    number = torch.tensor([mine.number])
    broadcast_(number, root_rank, f"{name}.length", process_set)
    is_reason, data = bool(number < 0), _buffer(mine.content, abs(int(number)))
    broadcast_(data, root_rank, f"{name}.data", process_set)
    if mine.error is not None:
        raise mine.error
    if is_reason:
        raise _refusal(name, {root_rank: _text(data)})
    return made[0] if rank() == root_rank else _unpack(_content(data))


def _gather_objects(make: Callable[[], Any], name: str) -> list[Any]:
    """Return what `make` returns on each rank, in the order of ranks.

    Raises the error of `make`, or the one of packing what it returned, on ranks that have one, and
    `HorovodUsageError` on the others.
    """
    return [_unpack(content) for content in _gathered(_parcel(lambda: _pack(make())), name)]


def _require_equal(name: str, facts: Callable[[], Mapping[str, str]]) -> None:
    """Return if `facts` are the same on all ranks; else raise on all of them.

    Raises `HorovodUsageError` with the first fact that differs, or as `_gather_objects` where one
    rank cannot tell its own.
    """
    mine = _parcel(lambda: json.dumps(facts(), sort_keys=True).encode())
    digest = hashlib.sha256(mine.content).digest()[:8]
    number = torch.tensor([[mine.number, int.from_bytes(digest, "little", signed=True)]])
    numbers = allgather(number, f"{name}.facts")
    if mine.error is None and bool((numbers == number).all()):
        return
    told = [json.loads(content) for content in _gathered(mine, name)]
    raise HorovodUsageError(f"{name}: {_difference(told)}")


# ---- parcels -----------------------------------------------------------------------------


def _parcel(make: Callable[[], bytes]) -> _Parcel:
    try:
        return _Parcel(make())
    except Exception as error:
        text = " ".join(_COLOURS.sub("", str(error)).split())
        if not isinstance(error, UsageError):
            text = f"{type(error).__name__}: {text}"
        return _Parcel(text[:_MAX_REASON_CHARS].encode(errors="replace"), error)


def _gathered(mine: _Parcel, name: str) -> list[bytes]:
    """Return the bytes of all ranks; raises where one has none."""
    numbers = allgather(torch.tensor([mine.number]), f"{name}.lengths").tolist()
    whole = allgather(_buffer(mine.content, len(mine.content)), f"{name}.data")
    if mine.error is not None:
        raise mine.error
    parts = whole.split([abs(number) for number in numbers])
    reasons = {r: _text(parts[r]) for r, number in enumerate(numbers) if number < 0}
    if reasons:
        raise _refusal(name, reasons)
    return [_content(part) for part in parts]


def _refusal(name: str, reasons: Mapping[int, str]) -> HorovodUsageError:
    guilty, reason = sorted(reasons), next(iter(reasons.values()))
    return HorovodUsageError(f"{name}: {ranks(guilty)} cannot take part: {reason}")


def _difference(told: Sequence[Mapping[str, str]]) -> str:
    """Return the first fact that differs, with the ranks of each value."""
    things = {thing: None for facts in told for thing in facts}
    for thing in things:
        values: dict[str, list[int]] = {}
        for number, facts in enumerate(told):
            values.setdefault(facts.get(thing, "missing"), []).append(number)
        if len(values) > 1:
            by_rank = "; ".join(f"{value} on {ranks(found)}" for value, found in values.items())
            return f"ranks disagree about {thing}: {by_rank}"
    return "ranks disagree"


# ---- bytes -------------------------------------------------------------------------------


def _noted(value: Any, place: list[Any]) -> Any:
    place.append(value)
    return value


def _pack(value: Any) -> bytes:
    """Return `value` in the form that `_unpack` reads.

    Raises `UsageError` for a value that the safe unpickler would refuse.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        _unpack(buffer.getvalue())
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"the object cannot be sent to other workers: {first_line(error)}. Give its class "
            "state_dict() and load_state_dict(), keep plain values and tensors in the state, or "
            f"allow {type(value).__name__} with torch.serialization.add_safe_globals([...])"
        ) from error
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    """Return the value in `data`; raises `pickle.UnpicklingError` for more than plain data."""
    with _plain_classes():
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _plain_classes() -> Any:
    """Return a context in which the safe unpickler knows `_PLAIN`."""
    known = torch.serialization.get_safe_globals()
    return torch.serialization.safe_globals([each for each in _PLAIN if each not in known])


def _buffer(content: bytes, length: int) -> torch.Tensor:
    """Return the bytes as a tensor; an empty one of this length where there are none."""
    if not content:
        return torch.empty(length, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _content(tensor: torch.Tensor) -> bytes:
    data = bytearray(len(tensor))
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return bytes(data)


def _text(tensor: torch.Tensor) -> str:
    return _content(tensor).decode(errors="replace")


# ---- the state of an optimizer ---------------------------------------------------------


@contextmanager
def same_objects(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let what happens inside change the contents of groups and state, not the objects.

    torch makes new ones when it loads a state. A scheduler of the optimizer that was given to
    `DistributedOptimizer` would go on with the old ones, and change no rate any more.
    """
    groups, state = optimizer.param_groups, optimizer.state
    yield
    loaded, optimizer.param_groups = optimizer.param_groups, groups
    for group, new in zip(groups, loaded, strict=True):
        if group is not new:
            group.clear()
            group.update(new)
    if optimizer.state is not state:
        content, optimizer.state = optimizer.state, state
        state.clear()
        state.update(content)


def load_exactly(optimizer: torch.optim.Optimizer, received: dict[str, Any]) -> None:
    """Load a state dict; tensors of groups, such as rates, are filled in place.

    `load_state_dict` casts floating state to the dtype of its parameter, and makes other values
    anew from what they iterate over, which breaks strings. Both are put right.
    """
    before = [dict(group) for group in optimizer.param_groups]
    with same_objects(optimizer):
        optimizer.load_state_dict(received)
    for group, old in zip(optimizer.param_groups, before, strict=True):
        for key, value in group.items():
            group[key] = _filled(old.get(key), value)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in received["state"].items():
        if isinstance(index, int) and isinstance(values, dict):
            loaded = optimizer.state[parameters[index]]
            loaded.update({key: _exact(loaded.get(key), value) for key, value in values.items()})


def _filled(old: Any, new: Any) -> Any:
    """Return `old` with the content of `new` where both are tensors of one kind; else `new`."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor) or old is new:
        return new
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return new
    with torch.no_grad():
        return old.copy_(new)


def _exact(loaded: Any, sent: Any) -> Any:
    """Return the value that was sent, on the device to which torch has loaded it."""
    if isinstance(sent, Tensor):
        if not isinstance(loaded, Tensor) or loaded.dtype == sent.dtype:
            return loaded if isinstance(loaded, Tensor) else sent
        return sent.to(loaded.device)
    if type(sent) is dict and isinstance(loaded, dict):
        return {key: _exact(loaded.get(key), value) for key, value in sent.items()}
    if type(sent) in (list, tuple) and isinstance(loaded, list | tuple):
        pairs = zip(loaded, sent, strict=True)
        return type(sent)([_exact(mine, value) for mine, value in pairs])
    return sent


def _apart(value: Any) -> tuple[Any, list[Tensor]]:
    """Return `value` with each tensor replaced by an index into the list that comes with it.

    Containers become tagged pairs, so that no value can be mistaken for an index.
    """
    tensors: list[Tensor] = []

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value.detach())
            return ("tensor", len(tensors) - 1)
        if type(value) is dict:
            return ("dict", [(key, visit(item)) for key, item in value.items()])
        if type(value) in (list, tuple):
            return (type(value).__name__, [visit(item) for item in value])
        return ("value", value)

    return visit(value), tensors


def _put_together(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the value that was taken apart, with these tensors in their places."""
    kind, content = tree
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _put_together(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_put_together(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    return content
