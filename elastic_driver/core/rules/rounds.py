"""A membership round: the barrier through which workers become one process group.

    FORMING → COMPLETE → CLOSING → CLOSED, then the next round is FORMING

Who may be a member and when a round is complete is decided by `elastic` and `plain`; a
`Round` only keeps its own life in order. Times are monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class RoundState(str, Enum):
    """How far a round has come."""

    FORMING = "forming"  # waits for hosts, agents and workers
    COMPLETE = "complete"  # published; its members train
    CLOSING = "closing"  # its members are leaving, or being stopped
    CLOSED = "closed"  # everybody left; its keys are gone


ROUND_TRANSITIONS: dict[RoundState, tuple[RoundState, ...]] = {
    RoundState.FORMING: (RoundState.COMPLETE, RoundState.CLOSING),  # broken before it began
    RoundState.COMPLETE: (RoundState.CLOSING,),
    RoundState.CLOSING: (RoundState.CLOSED,),
    RoundState.CLOSED: (),
}


_NOT_THE_SCRIPT = ("/torch/", "/elastic_driver/", "/threading.py", "/contextlib.py")


@dataclass(frozen=True, slots=True)
class Stall:
    """A member's word that its training thread stands still."""

    waits: bool  # in a collective
    seconds: float  # without progress, when it was said
    at: float  # when it was said first
    first_seconds: float
    stack: str

    @property
    def place(self) -> str:
        """The innermost place in the script itself, for a sentence."""
        lines = [line.strip() for line in self.stack.splitlines()]
        places = [line for line in lines if line.startswith("File ")]
        own = [line for line in places if not any(name in line for name in _NOT_THE_SCRIPT)]
        return (own or places or ["an unknown place"])[-1]


@dataclass(frozen=True, slots=True)
class Slow:
    """The verdict that a member computes slowly."""

    ratio: float  # its time over the usual one
    since: float


@dataclass(slots=True)
class Round:
    """One round; `since` is when it entered its present state."""

    number: int
    since: float
    state: RoundState = RoundState.FORMING
    placed: tuple[str, ...] = ()  # workers started for it, by their rank at birth
    members: tuple[str, ...] = ()  # workers it was completed with, by rank
    at_boundary: bool = False  # CLOSING: its members finish a common step first
    asked_at: float | None = None  # CLOSING at a boundary: its members' progress was asked for
    notice_reason: str = ""  # and this is why they leave
    left_since: float | None = None  # CLOSING at a boundary: the first member left it then
    stepped: bool = False  # a member has finished a step in it
    broken: str = ""  # a plain round: why it cannot go on though nobody failed
    change_since: float | None = None  # COMPLETE: a planned change waits since then
    slots_since: float | None = None  # FORMING: enough slots are ready since then
    placed_at: float | None = None  # FORMING: `placed` was decided then
    need: int = 0  # the number of workers it settled for when they were placed
    started_at: float | None = None  # FORMING: the last of `placed` is up since then
    stalls: dict[str, Stall] = field(default_factory=dict)  # members that stand still
    slow: dict[str, Slow] = field(default_factory=dict)  # members that compute slowly, oldest first

    def enter(self, state: RoundState, now: float) -> None:
        """Move on; raises ValueError where the table does not allow it."""
        if state not in ROUND_TRANSITIONS[self.state]:
            raise ValueError(f"round {self.number} cannot go from {self.state} to {state}")
        self.state, self.since = state, now
