"""What a machine is: a pure object that takes in events and decides; and how it declares itself.

A machine never reads a clock, draws a random number, starts a thread or does I/O, so the same
events at the same times give the same decisions, byte for byte. Its module has one `Declaration`,
which says all that others have to know of it: the kernel, the journal and its replay go by that.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar, get_args, runtime_checkable

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from elastic_driver.kernel.tables import Snapshots

Event_contra = TypeVar("Event_contra", contravariant=True)
Kind = TypeVar("Kind")
Decision_co = TypeVar("Decision_co", covariant=True)


class ForMachine(Protocol):
    """An event for a machine."""

    @property
    def machine(self) -> str:
        """The name of the machine that the event is for."""


class InWords(Struct, frozen=True):
    """An event or a decision that people read as a sentence.

    `says` is the sentence, in which `e` stands for the event or the decision itself; "": it has
    none, and its fields are shown.
    """

    says: ClassVar[str] = ""

    def in_words(self) -> str:
        """Return the sentence."""
        return type(self).says.format(e=self)


def kinds(base: type[Kind]) -> tuple[type[Kind], ...]:
    """Return the classes below this one that have no class below them, as they were declared."""
    below = tuple(kind for child in base.__subclasses__() for kind in kinds(child))
    return below or (base,)


class CausedDecision(InWords, frozen=True, kw_only=True):
    """A decision; `cause` is the number of the event that led to it (0: not numbered yet).

    The kernel fills it in (`stamped`).
    """

    cause: int = 0


AnyDecision = TypeVar("AnyDecision", bound=CausedDecision)


class Reply(CausedDecision, frozen=True, tag="reply"):
    """Answer the request with this ticket; a document of None is an answer without content."""

    ticket: int
    document: Struct | None
    reason: str = "it was requested"


class Machine(Protocol[Event_contra, Decision_co]):
    """A pure state machine. Times are monotonic seconds and never go back."""

    def handle(self, event: Event_contra, now: float) -> Sequence[Decision_co]:
        """Take in one event; return the decisions to carry out, in order. Never raises for one."""

    def deadline(self) -> float | None:
        """Return when to send a `Tick` if nothing happens before; None if only an event helps."""

    def check(self) -> list[str]:
        """Return every violated invariant as a sentence; usually there is none."""


@runtime_checkable
class Shown(Protocol):
    """A machine of which the status shows something."""

    def view(self) -> Struct:
        """Return what is shown now."""


def stamped(decisions: Iterable[AnyDecision], cause: int) -> list[AnyDecision]:
    """Return the decisions with the number of the event that caused them."""
    return [replace(decision, cause=cause) for decision in decisions]


# The ticket of a request, the name of what it is for ("": there is one), its kind, and itself.
RequestRow = tuple[int, str, str, Any]


class Requests(Struct, frozen=True, tag="requests"):
    """Requests as the journal has them: on the wire they have no tags, their paths tell the kind.

    `owners`: of each request; (): all have none.
    """

    requests: tuple[RequestRow, ...]
    owners: tuple[str, ...] = ()

    def rows(self) -> list[tuple[int, str, str, Any, str]]:
        """Return each request with its owner."""
        owners = self.owners or ("",) * len(self.requests)
        return [(*row, owner) for row, owner in zip(self.requests, owners, strict=True)]


@dataclass(frozen=True)
class Packing:
    """How events with requests are written to the journal: packed as `Requests`, and back."""

    event: type[Any]  # that is packed
    kinds: tuple[type[Any], ...]  # of the requests; no other machine has one of the same name
    pack: Callable[[Any], Requests]
    unpack: Callable[[Requests], Any]

    def read(self, found: Requests) -> Any:
        """Return the event of these requests; raises `ValueError` for what they cannot be."""
        kinds = {kind.__name__: kind for kind in self.kinds}
        rows = tuple(
            (ticket, name, kind, msgspec.convert(body, kinds[kind]))
            for ticket, name, kind, body in found.requests
        )
        return self.unpack(Requests(rows, found.owners))


def _one_by_one(events: Sequence[Any]) -> Any:
    (event,) = events
    return event


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """A machine, as the rest of the process knows it.

    Args:
        name: of the machine; its own events have it as their `machine`.
        events: a type, or a union of types: what it takes in. A class stands for all below it.
        decisions: likewise, what it decides.
        new: makes the machine when a process begins; its argument: the seconds for which a client
            may be silent. None: another part has it begin, or not.
        hears: by the names of other machines, events for them that it takes in, too, before them.
        follows: by the type of decisions of other machines, which event for this one follows once
            they were carried out; None: none.
        shown_as: where the status shows its `view()`, a struct; "": it does not.
        kind: the class that reads its snapshots; None: it is not journalled, and begins anew with
            the next driver.
        together: its events that come from many senders at about the same time: those that wait
            are handled as one, made by `batch` of at least one.
        packing: how its requests are written to the journal; None: it takes none.
    """

    name: str
    events: Any
    decisions: Any
    new: Callable[[float], "Machine[Any, Any]"] | None = None
    hears: Mapping[str, tuple[type[Any], ...]] = field(default_factory=dict)
    follows: Mapping[type[Any], Callable[[Any], ForMachine | None]] = field(default_factory=dict)
    shown_as: str = ""
    kind: type[Snapshots] | None = None
    together: tuple[type[Any], ...] = ()
    batch: Callable[[Sequence[Any]], Any] = _one_by_one
    packing: Packing | None = None

    @property
    def is_journalled(self) -> bool:
        """Return whether its events are written down, and a next driver goes on with it."""
        return self.kind is not None

    def event_types(self) -> tuple[type[Any], ...]:
        """Return the types of the events that it takes in."""
        return _types(self.events)

    def decision_types(self) -> tuple[type[Any], ...]:
        """Return the types of its decisions."""
        return _types(self.decisions)


def _types(found: Any) -> tuple[type[Any], ...]:
    named = get_args(found) or (found,)
    return tuple(dict.fromkeys(kind for base in named for kind in kinds(base)))
