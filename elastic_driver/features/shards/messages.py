"""Data shards, the requests for them, their answers, and checkpoints: plain data for JSON.

Counts and offsets are records; times are seconds.
"""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from elastic_driver.kernel.machine import InWords
from elastic_driver.kernel.services import RepeatableRequest
from elastic_driver.words import counted
from elastic_driver.words.orders import WorkerId

# The holder of shards that all members of the job's world train together.
WORLD = "world"
# The name in which a worker opens a data set without holding any shard.
OPENING = "opening"

Offset = Annotated[int, Meta(ge=0, le=2**62)]
Count = Annotated[int, Meta(ge=1, le=2**62)]
Losses = Annotated[int, Meta(ge=1, le=10**6)]
Partition = Annotated[str, Meta(max_length=512)]


class Shard(Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Records start … stop − 1 of a partition, in one epoch. Its value is its identity."""

    epoch: Offset
    partition: Partition  # "" for a data set without partitions
    start: Offset
    stop: Offset

    @property
    def name(self) -> str:
        """The name for people: `epoch 0, records 512–1023` or `epoch 0, clicks-3 records 0–99`."""
        where = f"{self.partition} records" if self.partition else "records"
        return f"epoch {self.epoch}, {where} {self.start}–{self.stop - 1}"

    @property
    def records(self) -> int:
        """The number of its records."""
        return self.stop - self.start


# ---- descriptions of data sets, and their progress -----------------------------------------


class RangeDescription(Struct, frozen=True, tag="range", forbid_unknown_fields=True):
    """A data set of `records` records, cut into shards of `shard_records`, for some epochs.

    `shuffle` draws the shards of each epoch in an order given by (seed, epoch); the records
    inside a shard are shuffled by the trainer. `epochs` None: for ever. `max_losses`: the number of
    workers that die training a shard before it is put in quarantine.
    """

    records: Offset
    shard_records: Count
    epochs: Count | None = 1
    shuffle: bool = True
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    max_losses: Losses = 3


class StreamDescription(Struct, frozen=True, tag="stream", forbid_unknown_fields=True):
    """Partitions that grow (of a log, a queue), each with its first offset."""

    partitions: Annotated[dict[Partition, Offset], Meta(min_length=1, max_length=4096)]
    shard_records: Count
    max_losses: Losses = 3


Description = RangeDescription | StreamDescription


class RangeState(Struct, frozen=True, tag="range"):
    """Progress of a data set of known length: two numbers for any length."""

    epoch: Offset
    taken: Offset  # shards of this epoch


class StreamState(Struct, frozen=True, tag="stream"):
    """Progress of a stream."""

    offsets: dict[str, Offset]  # the first record of each partition that is in no shard yet
    ends: dict[str, Offset]
    closed: tuple[str, ...]


class Quarantined(Struct, frozen=True):
    """A shard that is given to no worker any more, and why."""

    shard: Shard
    losses: Offset
    reason: str


class LedgerState(Struct, frozen=True):
    """A checkpoint: everything that was not done when it was made is to do after `restore`."""

    source: RangeState | StreamState
    outstanding: tuple[Shard, ...]  # handed out or returned, in the order they come next
    losses: tuple[tuple[Shard, Offset], ...]
    quarantined: tuple[Quarantined, ...]
    done: Offset
    done_records: Offset
    next_token: Offset


class ShardCheckpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """A data set's description and progress, to be kept beside a model's checkpoint."""

    dataset: Description
    state: LedgerState


class RestoreRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`worker` goes back to a checkpoint; refused once another one has got a shard."""

    worker: WorkerId
    saved: ShardCheckpoint

    @property
    def dataset(self) -> Description:
        """The description in the checkpoint."""
        return self.saved.dataset


# ---- requests and answers ------------------------------------------------------------------


class NextRequest(RepeatableRequest, frozen=True, forbid_unknown_fields=True):
    """Give `worker` a shard; wait up to `wait` seconds for one if others still hold some."""

    worker: WorkerId
    dataset: Description
    wait: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0


class DoneRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`worker` has trained the shard it was given with this token."""

    worker: WorkerId
    shard: Shard
    token: Count


class ResumeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """After a change of the world: `worker` holds these tokens (→ records trained of each)."""

    worker: WorkerId
    dataset: Description
    held: Annotated[dict[Count, Offset], Meta(max_length=4096)]


class Resumed(Struct, frozen=True):
    """The tokens of a `ResumeRequest` that are not the worker's any more."""

    lost: tuple[int, ...]


class Claim(Struct, frozen=True, forbid_unknown_fields=True):
    """A shard that the world trains: `trained` of its records, from the front, are in its model."""

    shard: Shard
    token: Count
    trained: Offset


class AgreeRequest(RepeatableRequest, frozen=True, forbid_unknown_fields=True):
    """What the model of the world was trained with; the driver's account becomes that.

    `held`: shards in training, also those that are trained to the end and not reported done yet.
    `state`: everything else; None: nothing was trained, and the data begin where the first world
    began. With `follows` too, the model is not known, and the driver's account stays as it is.
    """

    worker: WorkerId
    dataset: Description
    held: Annotated[tuple[Claim, ...], Meta(max_length=4096)]
    state: LedgerState | None = None
    follows: bool = False


class Agreed(Struct, frozen=True):
    """What the world holds from now on, with its tokens; `state`: everything else.

    Shards in quarantine are among those of `state` that are to do.
    """

    held: tuple[Claim, ...]
    state: LedgerState


class ExtendRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A stream's partition can be read up to offset `end`, and with `closed` never further."""

    partition: Partition
    end: Offset
    closed: bool = False


class Granted(Struct, frozen=True, tag="granted"):
    """Train this shard and report it done with the token; renew within `lease` seconds."""

    shard: Shard
    token: int
    lease: float


class Wait(Struct, frozen=True, tag="wait"):
    """There is no shard now, but there may be one later: ask again."""

    reason: str


class End(Struct, frozen=True, tag="end"):
    """No shard will come any more. `complete`: every record was trained."""

    complete: bool
    quarantined: tuple[str, ...]  # names
    reason: str


NextAnswer = Granted | Wait | End


class ShardAccepted(Struct, frozen=True, tag="accepted"):
    """The shard counts as done by you. `late`: you had lost it, but no other worker had it."""

    shard: Shard
    late: bool = False


class ShardRefused(Struct, frozen=True, tag="refused"):
    """The shard does not count as done by you; leave it.

    `code`, for programs: "held" (another worker trains it now) or "done" (it was finished before,
    or never handed out with this token).
    """

    code: Literal["held", "done"]
    reason: str


DoneAnswer = ShardAccepted | ShardRefused


class ShardCounts(Struct, frozen=True):
    """The number of shards by state, for people and metrics."""

    epoch: int
    done: int  # shards, over all epochs
    done_records: int
    doing: int
    returned: int  # to do again
    quarantined: int
    workers: int  # that hold shards


class ShardStatus(Struct, frozen=True):
    """A data set as people see it."""

    dataset: Description
    counts: ShardCounts
    quarantined: tuple[Quarantined, ...]


# ---- events of `shards.DataSets` -----------------------------------------------------------


class ReadStatus(Struct, frozen=True):
    """Asks for the `ShardStatus`."""


class ReadCheckpoint(Struct, frozen=True):
    """Asks for a `ShardCheckpoint`."""


Request = (NextRequest | DoneRequest | ResumeRequest | ExtendRequest | ShardCheckpoint) | (
    RestoreRequest | AgreeRequest | ReadStatus | ReadCheckpoint
)


class ShardRequest(Struct, frozen=True, tag="shard_request"):
    """A request for a data set; a `ShardCheckpoint` in it is to be restored, whoever trains."""

    machine: ClassVar[Literal["shards"]] = "shards"

    ticket: int
    dataset: str
    request: Request
    owner: str = ""  # the slot of the worker that asks; "": a person or the driver, without a share


class ShardBatch(InWords, frozen=True, tag="shard_batch"):
    """Requests that came together, handled as one event."""

    machine: ClassVar[Literal["shards"]] = "shards"

    requests: tuple[ShardRequest, ...]

    def in_words(self) -> str:
        """See `InWords.in_words`."""
        return f"{counted(len(self.requests), 'request')} for shards"


class StopOrdered(Struct, frozen=True, tag="stop_ordered"):
    """A worker was ordered to stop: its end is no failure, whatever its exit status."""

    machine: ClassVar[Literal["shards"]] = "shards"

    worker: str
