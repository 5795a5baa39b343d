"""What ranks and their coordinator tell each other; see `negotiation`.

In the steady state a message holds numbers only: both sides remember what was sent before
(`Sent`, `Received`).
"""

from collections.abc import Callable, Sequence
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


ToCoordinator: TypeAlias = Ready | Leave
FromCoordinator: TypeAlias = Orders | Farewell | Broken
_encoder = Encoder()
encode = _encoder.encode
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
