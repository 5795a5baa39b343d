"""What the shard ledger answers and keeps: plain data, fit for JSON.

`core.shards` makes them; HTTP routes, workers and checkpoints carry them.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from elastic_driver.core.shard_sources import Shard, SourceState

__all__ = [
    "Accepted",
    "Answer",
    "End",
    "Granted",
    "LedgerState",
    "Quarantined",
    "Refusal",
    "Refused",
    "ShardCounts",
    "Verdict",
    "Wait",
]


class Granted(Struct, frozen=True, tag="granted"):
    """Train this shard and report it done with the token; renew within `lease` seconds."""

    shard: Shard
    token: int
    lease: float


class Wait(Struct, frozen=True, tag="wait"):
    """Nothing for you now, but there may be later: ask again."""

    reason: str


class End(Struct, frozen=True, tag="end"):
    """Nothing will come any more. `complete`: every record was trained."""

    complete: bool
    quarantined: tuple[str, ...]  # names
    reason: str


Answer = Granted | Wait | End


class Accepted(Struct, frozen=True, tag="accepted"):
    """The shard counts as done by you. `late`: you had lost it, but nobody else had begun it."""

    shard: Shard
    late: bool = False


class Refusal(str, Enum):
    """Why a report is refused; for programs."""

    HELD = "held"  # somebody else trains it now
    DONE = "done"  # finished already, or never handed out with this token


class Refused(Struct, frozen=True, tag="refused"):
    """The shard does not count as done by you; leave it."""

    code: Refusal
    reason: str


Verdict = Accepted | Refused


class Quarantined(Struct, frozen=True):
    """A shard that nobody gets any more, and why."""

    shard: Shard
    losses: int
    reason: str


class ShardCounts(Struct, frozen=True):
    """Where the shards are, for people and metrics."""

    epoch: int
    done: int  # shards, over all epochs
    done_records: int
    doing: int
    returned: int  # to do again
    quarantined: int
    workers: int  # that hold shards


class LedgerState(Struct, frozen=True):
    """A checkpoint: everything that was not done when it was made is to do after `restore`."""

    source: SourceState
    outstanding: tuple[Shard, ...]  # handed out or returned, in the order they come next
    losses: tuple[tuple[Shard, int], ...]
    quarantined: tuple[Quarantined, ...]
    done: int
    done_records: int
    next_token: int
