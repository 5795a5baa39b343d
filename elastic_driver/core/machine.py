"""The interface of every pure machine: an event and the time go in, decisions come out.

The driver runs all its machines (the job, the node check, each shard ledger, the TensorFlow
cluster) in one loop: it numbers an event, hands it to the machine that the event is for, and
carries out the decisions. A machine never reads a clock, draws a random number, starts a thread
or does I/O, so that the same events at the same times give the same decisions, byte for byte.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from msgspec.structs import replace

from elastic_driver.core.decisions import CausedDecision

Event_contra = TypeVar("Event_contra", contravariant=True)
Decision_co = TypeVar("Decision_co", covariant=True)
AnyDecision = TypeVar("AnyDecision", bound=CausedDecision)


class Machine(Protocol[Event_contra, Decision_co]):
    """A pure state machine. Times are monotonic seconds and never go back."""

    def handle(self, event: Event_contra, now: float) -> Sequence[Decision_co]:
        """Take in one event; return the decisions to carry out, in order. Never raises for one."""

    def deadline(self) -> float | None:
        """Return when to send a `Tick` if nothing happens before; None if only an event helps."""

    def check(self) -> list[str]:
        """Return every violated invariant as a sentence; usually there is none."""


def stamped(decisions: Iterable[AnyDecision], cause: int) -> list[AnyDecision]:
    """Return the decisions with the number of the event that caused them."""
    return [replace(decision, cause=cause) for decision in decisions]
