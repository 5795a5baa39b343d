"""Begins operations and waits for them, with Horovod's numbers for those under way."""

import itertools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from elastic_driver.horovod.common.exceptions import HorovodUsageError, NotInYetError
from elastic_driver.horovod.common.process_sets import ProcessSet
from elastic_driver.horovod.engine import lifecycle as running
from elastic_driver.horovod.engine import streams
from elastic_driver.horovod.engine.engine import Engine
from elastic_driver.horovod.engine.operation import Operation, SetPlace
from elastic_driver.horovod.engine.operation_log import DEBUG, TRACE
from elastic_driver.horovod.engine.requests import REMEMBERED, Kind, Request, title
from elastic_driver.horovod.engine.transfer import DTYPES

_OURS = ("elastic_driver.", "torch.")
Pick = Callable[[Any], Any]
_numbers = itertools.count()
_requests: dict[tuple[Any, ...], Request] = {}  # the oldest first; see `_remembered`
_under_way: dict[int, tuple[Engine, Operation, Pick]] = {}


def engine_now() -> Engine:
    """Return the engine of the world; raises `NotInYetError` outside of a world."""
    engine = running.current()
    if engine is None and running.awaits_run():
        raise NotInYetError(
            f"{_place_in_script()}: this worker is new in a job that trains, and is in no world "
            "before hvd.elastic.run; move operations into the function that it decorates"
        )
    if engine is None:
        raise NotInYetError("Horovod is not initialized; call hvd.init() first")
    return engine


def _place_in_script() -> str:
    """Return file and line of the script's call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    if frame is None:
        return "the script"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def place_in(process_set: ProcessSet) -> SetPlace:
    """Return the set as this rank sees it; raises ValueError unless this rank is in it."""
    return _place(engine_now(), process_set)


def _place(engine: Engine, process_set: ProcessSet) -> SetPlace:
    number = process_set.process_set_id
    if number is None:
        raise HorovodUsageError(
            f"{process_set} is not part of this world; add it with hvd.add_process_set(), "
            "after a change of the world in a reset callback"
        )
    place = engine.sets[number]
    if place.index < 0:
        raise HorovodUsageError(f"rank {engine.world.rank} is not in {process_set}")
    return place


def first(result: Any) -> Any:
    """Return the only tensor of a result."""
    return result[0]


def begin(
    kind: Kind,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    pick: Pick,
    *,
    outputs: Sequence[torch.Tensor] = (),
    gather: bool = True,
    **more: Any,
) -> int:
    """Begin an operation; return its number, for `poll` and `synchronize`.

    Args:
        kind: of the operation.
        tensors: the inputs.
        name: None for the next automatic one, which all ranks count alike.
        process_set: the ranks that take part.
        pick: makes what `synchronize` returns of the operation's result.
        outputs: where the results go, if their sizes are known.
        gather: whether the request may wait a moment for others.
        more: further fields of the request.
    """
    engine = engine_now()
    _place(engine, process_set)
    number = process_set.process_set_id or 0
    if name is None:
        request = _request(kind, lambda: engine.next_name(kind, number), number, tensors, more)
    else:
        request = _remembered(kind, name, number, tensors, more)
    inputs = _detached(tensors)
    in_place = outputs is tensors
    operation = Operation(request, inputs, inputs if in_place else _detached(outputs))
    engine.submit(operation, gather=gather)
    handle = next(_numbers)
    _under_way[handle] = engine, operation, pick
    if (log := running.log()).level <= DEBUG:
        shapes = ", ".join(f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in tensors)
        log.write(DEBUG, f"{title(request)} is called with {shapes or 'no tensor'}")
    return handle


def _remembered(
    kind: Kind,
    name: str,
    process_set: int,
    tensors: Sequence[torch.Tensor],
    more: dict[str, Any],
) -> Request:
    """Return the request that an earlier step has made for the same, or a new one.

    The same object is hashed once, and is compared with itself where ranks agree on it.
    """
    like = [(tensor.dtype, tensor.shape, tensor.device) for tensor in tensors]
    key = (kind, name, process_set, *like, *more.values())
    request = _requests.get(key)
    if request is None:
        request = _request(kind, lambda: name, process_set, tensors, more)
        if len(_requests) >= REMEMBERED:
            del _requests[next(iter(_requests))]
        _requests[key] = request
    return request


def _request(
    kind: Kind,
    name: Callable[[], str],
    process_set: int,
    tensors: Sequence[torch.Tensor],
    more: dict[str, Any],
) -> Request:
    """Return a request; raises `HorovodUsageError` for a dtype that cannot be carried.

    `name` is called after that check: automatic names are counted alike on all ranks.
    """
    try:
        dtypes = tuple([_NAMES[tensor.dtype] for tensor in tensors])
    except KeyError as error:
        raise HorovodUsageError(f"tensors of {error.args[0]} are not supported") from None
    return Request(
        kind,
        name(),
        process_set,
        dtypes,
        tuple([tuple(tensor.shape) for tensor in tensors]),
        device=tensors[0].device.type if tensors else "cpu",
        nbytes=sum([tensor.nbytes for tensor in tensors]),
        **more,
    )


def _detached(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors without gradients, of the same memory."""
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


def poll(handle: int) -> bool:
    """Return whether the operation is done, so that `synchronize` does not wait."""
    engine, operation, _ = _find(handle)
    if not operation.done:
        engine.flush()
    return operation.done


def synchronize(handle: Any) -> Any:
    """Wait until the operation is done and return its result.

    Raises `HorovodInternalError` where ranks disagree about it, or where the world breaks.
    """
    engine, operation, pick = _find(handle)
    try:
        result = engine.wait(operation)
        streams.follow(operation.written, operation.tensors)
        if (log := running.log()).level <= TRACE:
            log.write(TRACE, f"{title(operation.request)} is done")
        return pick(result)
    finally:
        del _under_way[handle]


def _find(handle: int) -> tuple[Engine, Operation, Pick]:
    try:
        return _under_way[handle]
    except KeyError:
        raise HorovodUsageError(
            f"handle {handle} is unknown: it was synchronized already, or its world has ended"
        ) from None


running.at_end(_under_way.clear)  # nobody can wait any more, and they hold their tensors
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
