"""Sends Python objects between the ranks, so that what one rank cannot send is an error on all.

The bytes of an object travel after their number. A rank whose object cannot be packed sends the
reason in place of it: it raises its own error, all others one that names the rank, and nobody
waits.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from elastic_driver.errors import UsageError
from elastic_driver.horovod.common.exceptions import HorovodUsageError
from elastic_driver.horovod.common.process_sets import ProcessSet
from elastic_driver.horovod.engine.agreement import ranks
from elastic_driver.horovod.torch.mpi_ops import allgather, broadcast_, rank
from elastic_driver.horovod.torch.packing import packed, unpacked

MAX_REASON_CHARS = 1000
# Classes of plain values for which pickle writes a call; torch's safe unpickler lacks them.
_PLAIN = (bytes, frozenset, range, slice)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class _Parcel(NamedTuple):
    """What a rank sends: bytes, or in their place the reason why it has none."""

    content: bytes
    error: Exception | None = None

    @property
    def number(self) -> int:
        """Return the number of bytes; below zero for a reason."""
        return -len(self.content) if self.error else len(self.content)


def send_object(make: Callable[[], Any], root_rank: int, name: str, process_set: ProcessSet) -> Any:
    """Return on all ranks what `make` returns on the root rank; the others do not call it.

    Raises the error of `make`, or the one of packing what it returned, on the root rank, and
    `HorovodUsageError` on the others.
    """
    made: list[Any] = []
    mine = _parcel(lambda: _pack(_kept(make(), made))) if rank() == root_rank else _Parcel(b"")
    number = torch.tensor([mine.number])
    broadcast_(number, root_rank, f"{name}.length", process_set)
    is_reason, data = bool(number < 0), _buffer(mine.content, abs(int(number)))
    broadcast_(data, root_rank, f"{name}.data", process_set)
    if mine.error is not None:
        raise mine.error
    if is_reason:
        raise _refusal(name, {root_rank: _text(data)})
    return made[0] if rank() == root_rank else _unpack(_content(data))


def gather_objects(make: Callable[[], Any], name: str) -> list[Any]:
    """Return what `make` returns on each rank, in the order of ranks.

    Raises the error of `make`, or the one of packing what it returned, on ranks that have one, and
    `HorovodUsageError` on the others.
    """
    return [_unpack(content) for content in _gathered(_parcel(lambda: _pack(make())), name)]


def require_equal(name: str, facts: Callable[[], Mapping[str, str]]) -> None:
    """Return if `facts` are the same on all ranks; else raise on all of them.

    Raises `HorovodUsageError` with the first fact that differs, or as `gather_objects` where one
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
        return _Parcel(text[:MAX_REASON_CHARS].encode(errors="replace"), error)


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


def _kept(value: Any, place: list[Any]) -> Any:
    place.append(value)
    return value


def _pack(value: Any) -> bytes:
    with _plain_classes():
        return packed(value, "the object")


def _unpack(data: bytes) -> Any:
    with _plain_classes():
        return unpacked(data)


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
