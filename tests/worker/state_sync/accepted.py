"""Values that a script might give to a state: kinds that are seldom, and some that nobody can keep.

`Other` is a fresh process, which has only what a script has at its start.
"""

from __future__ import annotations

import dataclasses
import enum
import random
import struct
import subprocess
import sys
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import torch
from torch import nn

from elastic_driver.worker.state_sync.contents import TensorSpec, as_bytes
from elastic_driver.worker.state_sync.message import Reader, Writer, places
from tests.worker.state_sync import values as _values  # noqa: F401 - the classes of its values

T = TypeVar("T")


def three() -> list[int]:
    return [3]


class Mean(nn.Module):
    """A module that is a dataclass, too, would be one; this is the plain form."""


@dataclasses.dataclass
class Table(dict):  # type: ignore[type-arg]
    """A dataclass that holds more than its fields."""

    name: str = "t"


@dataclasses.dataclass
class Box(Generic[T]):
    content: T


class Base:
    """A base whose objects have attributes of any name."""


@dataclasses.dataclass
class HalfSlotted(Base):
    __slots__ = ("field",)
    field: int


def _half_slotted() -> HalfSlotted:
    found = HalfSlotted(1)
    found.more = [2]  # type: ignore[attr-defined]
    return found


class Size(NamedTuple):
    width: int
    height: int


class Sized(Size, enum.Enum):
    SMALL = (1, 2)


class Open(enum.IntEnum):
    """An enumeration that makes members for values that it does not know."""

    ONE = 1

    @classmethod
    def _missing_(cls, value: object) -> Open:
        member = int.__new__(cls, value)  # type: ignore[call-overload]
        member._name_, member._value_ = f"UNKNOWN_{value}", value
        return member


class Perm(enum.Flag):
    R = 4
    W = 2


class Zone(tzinfo):
    def utcoffset(self, _: datetime | None) -> timedelta:
        return timedelta(hours=1)

    def dst(self, _: datetime | None) -> timedelta:
        return timedelta(0)

    def tzname(self, _: datetime | None) -> str:
        return "own"


class OwnTensor(torch.Tensor):
    pass


def _in_a_function() -> dict[str, Callable[[], Any]]:
    @dataclasses.dataclass
    class Local:
        x: int = 0

    class Colour(enum.Enum):
        RED = 1

    class Pair(NamedTuple):
        a: int = 1

    def make() -> list[int]:
        return []

    return {
        "local dataclass": Local,
        "local enum": lambda: Colour.RED,
        "local named tuple": Pair,
        "local class": lambda: Local,
        "local function": lambda: make,
        "local factory": lambda: defaultdict(make, a=[1]),
        "local factory inside": lambda: {"a": [defaultdict(lambda: 7)]},
    }


def _knotted() -> Any:
    found: list[Any] = [1]
    found.append((found, {"me": found}))
    return found


def _nested(depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = {"in": [found]}
    return found


def _dunder() -> Any:
    found = Box[int](3)
    found.__dict__["__marked__"] = 1
    return found


def _under_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


ODD: dict[str, Callable[[], Any]] = {
    **_in_a_function(),
    "module factory": lambda: defaultdict(three, a=[1]),
    "class as factory": lambda: defaultdict(OrderedDict, a=OrderedDict(b=1)),
    "nested factories": lambda: defaultdict(three, a=defaultdict(dict, b={1: 2})),
    "partial": lambda: defaultdict(types.MethodType(three, 0).__func__, a=1),
    "slice of odd": lambda: slice(None, object(), None),
    "slice of tensors": lambda: slice(torch.tensor(1), None, None),
    "huge range": lambda: range(2**70),
    "huge slice": lambda: slice(2**70),
    "far zone": lambda: datetime(2026, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin")),
    "zone": lambda: ZoneInfo("Europe/Berlin"),
    "own zone": lambda: datetime(2026, 7, 1, 12, tzinfo=Zone()),
    "fold": lambda: datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
    "time with zone": lambda: time(1, 2, fold=1, tzinfo=timezone(timedelta(seconds=3601))),
    "generator": lambda: random.Random(3),
    "numpy generator": lambda: np.random.default_rng(3),
    "other bits": lambda: np.random.Generator(np.random.Philox(3)),
    "old generator": lambda: [np.random.RandomState(3)],
    "torch generator": lambda: {"g": torch.Generator().manual_seed(3)},
    "system random": random.SystemRandom,
    "dataclass that is a dict": lambda: Table("x"),
    "generic": lambda: Box[int](3),
    "dunder": _dunder,
    "half in slots": _half_slotted,
    "enum of tuples": lambda: Sized.SMALL,
    "unknown member": lambda: Open(7),
    "known member": lambda: Open(1),
    "flags": lambda: Perm.R | Perm.W,
    "no flag": lambda: Perm(0),
    "objects": lambda: np.array([object()]),
    "overlapping": lambda: np.zeros(
        2, np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2]})
    ),
    "with metadata": lambda: np.zeros(2, np.dtype("f4", metadata={"a": 1})),
    "big endian": lambda: np.arange(3, dtype=">i4"),
    "structured scalar": lambda: np.zeros(1, dtype=[("x", "f4")])[0],
    "times": lambda: np.array(["2026-01-01T00:00"], dtype="M8[m]"),
    "no text": lambda: np.array([], dtype="U0"),
    "conjugated": lambda: torch.tensor([1 + 2j, 3j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j]).conj().imag,
    "quantized": _quantized,
    "meta": lambda: torch.ones(2, device="meta"),
    "own tensor": lambda: torch.ones(2).as_subclass(OwnTensor),
    "lazy": nn.UninitializedParameter,
    "under inference": _under_inference,
    "on a graph": lambda: torch.ones(1, requires_grad=True) * 2,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "eight bits": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "one of many": lambda: torch.arange(4.0)[::2][:1],
    "sixteen bits": lambda: torch.ones(2).to(torch.uint16),
    "tensor keys": lambda: {torch.ones(1): 1, torch.zeros(1): [2]},
    "NaN keys": lambda: {float("nan"): 1, (float("nan"),): 2},
    "knot": _knotted,
    "deep": lambda: _nested(40),
    "deeper": lambda: _nested(140),
    "method": lambda: "abc".upper,
    "function": lambda: three,
    "type": lambda: Counter,
    "numpy type": lambda: np.float32,
    "ellipsis": lambda: [..., NotImplemented],
    "half a pair": lambda: {"\ud800": b"\xff"},
    "queue": lambda: deque([deque([1], 2)], 0),
    "struct": lambda: torch.max(torch.ones(2, 2), 0),
    "path": lambda: __import__("pathlib").PurePosixPath("/a/\udcff"),
    "date": lambda: {date(2026, 1, 2): 1},
}


class Other:
    """A process that was just started: it reads what is sent, and says what it has read."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def read(self, value: Any) -> bytes:
        """Send a value; return what the process has then, as `told` says it of a value here."""
        writer = Writer()
        document = msgspec.msgpack.encode(writer.write(value, "value"))
        tensors = [(TensorSpec.of(t), as_bytes(t).numpy().tobytes()) for _, t in writer.tensors]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _put(self._process.stdin, msgspec.msgpack.encode([document, tensors]))
        return _get(self._process.stdout)

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def told(value: Any) -> bytes:
    """All of a value as bytes: what a `Writer` writes of it, tensors too."""
    writer = Writer()
    data = writer.write(value, "value")
    contents = [as_bytes(t).tolist() for _, t in writer.tensors]
    return msgspec.msgpack.encode([data, contents])


def _put(stream: BinaryIO | Any, data: bytes) -> None:
    stream.write(struct.pack("<q", len(data)) + data)
    stream.flush()


def _get(stream: BinaryIO | Any) -> bytes:
    size = stream.read(8)
    return b"" if len(size) < 8 else bytes(stream.read(struct.unpack("<q", size)[0]))


def serve() -> None:
    """Read values from standard input, and say what was read, until that ends."""
    warnings.simplefilter("ignore")
    while request := _get(sys.stdin.buffer):
        document, tensors = msgspec.msgpack.decode(request)
        data = msgspec.msgpack.decode(document)
        specs = [msgspec.convert(spec, TensorSpec) for spec, _ in tensors]
        try:
            into = places(data, specs, None)
            for target, (_, content) in zip(into, tensors, strict=True):
                if content:
                    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                    with torch.no_grad():
                        target.copy_(flat.view(target.dtype).view(target.shape))
            answer = told(Reader(into).read(data))
        except Exception as error:  # of any kind: the test shows it
            answer = f"{type(error).__name__}: {error}".encode()
        _put(sys.stdout.buffer, answer)
