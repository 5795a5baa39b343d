"""The progress of a worker: it writes it with each heartbeat, and the driver reads it.

The watch over slow ranks, the job machine and the search for the best size judge by it, and
`/v1/status` shows it. Pure data; times are seconds.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from elastic_driver.core.fields import Count, Host, Seconds
from elastic_driver.core.measured import Numbers, StepTimes
from rendezvous.wire import UNREADABLE

MAX_SAMPLES = 64  # of measured steps in one message
MAX_LINKS = 16  # in one message
MAX_MARKS = 16  # in one message
MAX_DIGEST_CHARS = 32
MAX_BUFFERS = 64  # groups of buffers that are compared
BUFFERS_DIGEST_CHARS = 8
BUFFERS_OF = "buffers of "  # begins the names of their leaves
ODD_STEPS = 8  # of an optimizer without a commit, before anything is said
Share = Annotated[int, Meta(ge=0, le=2**31)]


class Sample(Struct, frozen=True, array_like=True):
    """A rank's time for a committed step, without waiting for other ranks.

    If steps are short, it is the mean of all steps since the last sample. `compute` is the time of
    all computing; of several forward-backward passes, only one is counted. `one_pass` is the time
    of that pass alone. `exchange` is not in `compute`: it is the processor time of exchanging the
    gradients, because the clock also counts waiting.
    """

    step: Count
    compute: Seconds
    one_pass: Seconds
    exchange: Seconds = 0.0


class Division(Struct, frozen=True, array_like=True):
    """A rank's part of a fixed batch: `share` of a step's `virtual_workers`."""

    virtual_workers: Share
    share: Share


class LinkUse(Struct, frozen=True, array_like=True):
    """The use of the connections to one peer's address since the round began.

    `seconds`: the time in which data was on its way. `carried`: bytes that arrived.
    """

    peer: Host
    seconds: Seconds
    carried: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Links(Struct, frozen=True, array_like=True):
    """The connections of a rank to other hosts; `address` is its own."""

    address: Host
    uses: Annotated[tuple[LinkUse, ...], Meta(max_length=MAX_LINKS)]


class GradientNorms(Struct, frozen=True, array_like=True):
    """The squared norms of a rank's own gradient, and of the mean over all ranks."""

    own: Annotated[float, Meta(ge=0.0)]
    mean: Annotated[float, Meta(ge=0.0)]


class StateMark(Struct, frozen=True, array_like=True):
    """A rank's state after `step` committed steps, as a `digest` (hex) of everything it keeps.

    All ranks mark the same steps, and ranks that hold the same state have the same digest.
    `buffers`: one behind the other, the digests of groups of floating-point buffers, of which
    nobody knows whether all ranks have them alike.
    """

    step: Count
    digest: Annotated[str, Meta(min_length=1, max_length=MAX_DIGEST_CHARS)]
    buffers: Annotated[str, Meta(max_length=MAX_BUFFERS * BUFFERS_DIGEST_CHARS)] = ""


Marks = Annotated[tuple[StateMark, ...], Meta(max_length=MAX_MARKS)]


class Progress(Struct, frozen=True):
    """A worker's progress: `step` committed steps in all, seconds for one, in round `round`.

    `samples` are its last measured steps, oldest first; each is sent several times. `division`: its
    part of a fixed batch, if the driver gives the shares. `links`: its connections to other hosts,
    if it has any. `marks`: the newest ones of this round, oldest first; each is sent several times.
    `commits` and `optimizer_steps`: of this process in this round.

    The other fields are only shown (`core.measured`). `at`: the time of the last step by the
    worker's own clock. `steps_done`, `samples_done`: of this process since it started. `numbers`,
    `total`: what `report_progress` got last, and the number of all steps. `reported`: the step that
    it named last, or the steps of its optimizers, in a round without commits. `micro_batches`:
    those of a step of a `FixedBatch`, and `batch` its samples. `parameters`: of the models of the
    state. `gradients`: measured in the last steps, where `--auto-scale` needs them.

    `checks`: of changes of the hosts, in this round. `boundary_time`: seconds from a commit or
    check to the next one, 0 if that is not known yet; `since`: seconds since the last one.
    """

    round: Count
    step: Annotated[int, Meta(ge=-1, le=2**53)]  # −1: nothing trained yet
    step_time: Seconds
    samples: Annotated[tuple[Sample, ...], Meta(max_length=MAX_SAMPLES)] = ()
    division: Division | None = None
    links: Links | None = None
    at: Seconds = 0.0
    steps_done: Count = 0
    samples_done: Count = 0
    numbers: Numbers = {}
    total: Count | None = None
    times: StepTimes | None = None
    reported: Count | None = None
    micro_batches: Count | None = None
    batch: Count | None = None
    parameters: Count | None = None
    gradients: GradientNorms | None = None
    marks: Marks = ()
    commits: Count = 0
    optimizer_steps: Count = 0
    checks: Count = 0
    boundary_time: Seconds = 0.0
    since: Seconds = 0.0


_decode_progress = msgspec.json.Decoder(Progress).decode


def decode_progress(data: bytes) -> Progress | None:
    """Return a worker's progress; None if it wrote something else."""
    try:
        return _decode_progress(data)
    except UNREADABLE:
        return None
