"""The messages between ranks and their coordinator, and the check that requests are alike.

In the steady state a message holds numbers only: both sides remember what was sent before
(`Sent`, `Received`). `agree` compares the requests of all ranks with one key. Pure: no clock,
thread, socket or tensor. `negotiation` decides when an operation is complete.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Literal, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

Kind = Literal[
    "allreduce",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "barrier",
    "join",
    "add_process_set",
    "remove_process_set",
]
Key: TypeAlias = tuple[str, str, int]  # kind, name, process set
Shape: TypeAlias = tuple[int, ...]
REMEMBERED = 4096  # requests or agreements by connection and direction
FORGOTTEN = -1  # the number of what is not remembered
MAX_ERROR_CHARS = 2000
OPERATIONS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
_WITHOUT_JOIN = "allgather broadcast alltoall reducescatter add_process_set remove_process_set"
T = TypeVar("T")


class Request(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, cache_hash=True):
    """An operation that one rank is ready for.

    Grouped operations have several tensors. `root` is the root rank in the world; `splits` are the
    rows for each rank of an alltoall, or the ranks of a new process set; `nbytes` is the size of
    the tensors.
    """

    kind: Kind
    name: str
    process_set: int = 0
    dtypes: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    op: int = 0
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()
    device: str = "cpu"
    nbytes: int = 0

    @property
    def key(self) -> Key:
        """Return what makes requests of several ranks one operation."""
        return self.kind, self.name, self.process_set


class Agreement(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, cache_hash=True):
    """An operation that all ranks of its process set are ready for, or the error they get.

    Args:
        sizes: by rank of the set: the first dimension of each tensor of an allgather, or the
            splits of an alltoall.
        absent: ranks of the world that have joined; they contribute nothing.
        pattern: where ranks are absent, the operation as the others have requested it.
        value: the number of a new process set, or the rank that joined last.
    """

    kind: Kind
    name: str
    process_set: int = 0
    error: str = ""
    sizes: tuple[Shape, ...] = ()
    absent: tuple[int, ...] = ()
    pattern: Request | None = None
    value: int = 0

    @property
    def key(self) -> Key:
        """Return the key of the requests."""
        return self.kind, self.name, self.process_set


class New(Struct, Generic[T], array_like=True):
    """Something that is sent for the first time, with the number to remember it by."""

    number: int
    item: T


class Ready(Struct, tag="ready", array_like=True):
    """A rank is ready for these operations."""

    requests: list[int | New[Request]]


class Leave(Struct, tag="leave", array_like=True):
    """A rank leaves in good order."""


class Orders(Struct, tag="orders", array_like=True):
    """Operations to carry out, in this order; the agreements of a batch are one transfer."""

    process_set: int
    batches: list[list[int | New[Agreement]]]


class Farewell(Struct, tag="farewell", array_like=True):
    """All ranks have left."""


class Broken(Struct, tag="broken", array_like=True):
    """The world is broken."""

    reason: str


encode = Encoder().encode
decode_to_coordinator = Decoder(Ready | Leave).decode
decode_from_coordinator = Decoder(Orders | Farewell | Broken).decode


def is_repeated(item: Request | Agreement) -> bool:
    """Return whether it may come again: with an automatic name, and as an error, it does not."""
    if isinstance(item, Agreement) and (item.error or item.absent):
        return False
    return ".noname." not in item.name


class Sent(Generic[T]):
    """Remembers what was sent on a connection; the oldest item is forgotten first."""

    def __init__(self, capacity: int = REMEMBERED) -> None:
        self._numbers: dict[T, int] = {}
        self._capacity = capacity

    def shorten(self, items: Sequence[T], *, repeated: Callable[[T], bool]) -> list[int | New[T]]:
        """Return the number of each item, or the item with a number the peer does not know yet.

        Items that are not `repeated` are not remembered.
        """
        known = [self._numbers.get(item) for item in items]
        if None not in known:
            return known  # type: ignore[return-value]
        return [self._shorten(item, repeated(item)) for item in items]

    def _shorten(self, item: T, repeated: bool) -> int | New[T]:
        if not repeated:
            return New(FORGOTTEN, item)
        number = self._numbers.get(item)
        if number is not None:
            return number
        number = len(self._numbers)
        if number >= self._capacity:
            number = self._numbers.pop(next(iter(self._numbers)))
        self._numbers[item] = number
        return New(number, item)


class Received(Generic[T]):
    """Remembers what came on a connection."""

    def __init__(self) -> None:
        self._items: dict[int, T] = {}

    def expand(self, short: int | New[T]) -> T:
        """Return the item; raises KeyError for a number that was not sent before."""
        if isinstance(short, int):
            return self._items[short]
        if short.number != FORGOTTEN:
            self._items[short.number] = short.item
        return short.item


def agree(
    members: Sequence[int], requests: Mapping[int, Request], joined: Sequence[int]
) -> Agreement:
    """Return the agreement of all members, which is an error where they disagree.

    Args:
        members: the ranks of the process set, in order.
        requests: by rank; all have the same key. At least one.
        joined: members that have no request because they have joined.
    """
    first = next(iter(requests.values()))
    kind, name, process_set = first.kind, first.name, first.process_set
    error = disagreement(requests) or _joined_error(first, joined)
    if error:
        return Agreement(kind, name, process_set, error=error[:MAX_ERROR_CHARS])
    sizes: tuple[tuple[int, ...], ...] = ()
    if kind == "allgather":
        sizes = tuple(tuple(shape[0] for shape in requests[r].shapes) for r in members)
    elif kind == "alltoall":
        sizes = tuple(requests[r].splits for r in members)
    absent = tuple(sorted(joined))
    return Agreement(
        kind, name, process_set, sizes=sizes, absent=absent, pattern=first if absent else None
    )


def disagreement(requests: Mapping[int, Request]) -> str:
    """Return an error that names operation, ranks and values; "" if all ranks agree."""
    first = next(iter(requests.values()))
    if list(requests.values()).count(first) == len(requests):
        return ""
    for what, value in _COMPARED[first.kind]:
        values: dict[str, list[int]] = {}
        for rank, request in sorted(requests.items()):
            values.setdefault(value(request), []).append(rank)
        if len(values) > 1:
            told = "; ".join(f"{value} on {ranks(found)}" for value, found in values.items())
            return f"{title(first)}: ranks disagree about the {what}: {told}"
    return ""


def title(request: Request | Agreement) -> str:
    """Return how messages name an operation."""
    where = f" of process set {request.process_set}" if request.process_set else ""
    return f"{request.kind} {request.name!r}{where}"


def ranks(numbers: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0, 2, 5"."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:16]))
    more = f" and {len(numbers) - 16} more" if len(numbers) > 16 else ""
    return f"ranks {shown}{more}"


def _joined_error(first: Request, joined: Sequence[int]) -> str:
    if not joined:
        return ""
    adasum = first.kind == "allreduce" and OPERATIONS[first.op] == "Adasum"
    if first.kind in _WITHOUT_JOIN.split() or adasum:
        what = "Adasum" if adasum else first.kind
        verb = "has" if len(joined) == 1 else "have"
        return f"{title(first)}: {ranks(sorted(joined))} {verb} joined, and {what} needs all ranks"
    return ""


def _shapes(request: Request) -> str:
    return _told([list(shape) for shape in request.shapes])


def _shapes_but_first(request: Request) -> str:
    return _told([["*", *shape[1:]] for shape in request.shapes]).replace("'", "")


def _dtypes(request: Request) -> str:
    return _told(list(request.dtypes))


def _told(values: Sequence[object]) -> str:
    if len(values) == 1:
        return str(values[0])
    return f"({', '.join(map(str, values))})"


_Compared = tuple[tuple[str, Callable[[Request], str]], ...]
_NUMBER: _Compared = (("number of tensors", lambda request: str(len(request.shapes))),)
_TYPE: _Compared = (("dtype", _dtypes), ("device", lambda request: request.device))
_SHAPE: _Compared = (("shape", _shapes),)
_ROWS: _Compared = (("shape beyond the first dimension", _shapes_but_first),)
_SCALE: _Compared = (
    ("operation", lambda request: OPERATIONS[request.op]),
    ("prescale factor", lambda request: f"{request.prescale:g}"),
    ("postscale factor", lambda request: f"{request.postscale:g}"),
)
_ROOT: _Compared = (("root rank", lambda request: str(request.root)),)
_COMPARED: dict[str, _Compared] = {
    "allreduce": _NUMBER + _TYPE + _SHAPE + _SCALE,
    "reducescatter": _NUMBER + _TYPE + _SHAPE + _SCALE,
    "allgather": _NUMBER + _TYPE + _ROWS,
    "broadcast": _NUMBER + _TYPE + _ROOT + _SHAPE,
    "alltoall": _NUMBER + _TYPE + _ROWS,
    "barrier": (),
    "join": (),
    "add_process_set": (("ranks", lambda request: str(list(request.splits))),),
    "remove_process_set": (("process set", lambda request: str(request.root)),),
}
