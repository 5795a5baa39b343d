"""What the Brain and the drivers of its jobs send each other: reports, grants, and their receipts.

The Brain has a key-value store as a driver has one, and a job is to the Brain what an agent is to a
driver. The driver of a job renews `jobs/<job>/lease`, posts a `JobReport` each second and whenever
one of its figures has changed, and waits for `jobs/<job>/grant`, a `Grant`. A job is named by its
run id. Each grant has a higher number than all before it, those of an earlier Brain included.

A slot that a job has to give up belongs to it until a report with the number of that grant shows
no process there. The slots of a job that falls silent are its own until it is heard again, or its
driver has certainly ended; its processes end by themselves `lives_on` seconds later.

A job is believed about itself only: the slots that it says it holds count as far as it was granted
them. To a Brain that has lost its state, a job proves its grant by a receipt. The Brain gives one
with each grant, and the driver sends it back with its reports as it came. It names the job, the
run, the grant and the slots, and ends with an HMAC-SHA256 that only the Brain can make: its key
comes from the Brain's own token, which stays when the state is lost. The receipt also names the
book, which stands for one state: a Brain that has its state needs no receipt of its own book.

Pure. Times are unix seconds, durations seconds.
"""

import base64
import hmac
from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

MOST_HOSTS = 10_000
MOST_WORKERS = 100_000
MOST_RECEIPT = 4 * 2**20  # characters of a receipt
MOST_LIVES_ON_S = 7 * 86400.0
JOB_LEASE_S = 10.0  # how long the lease of a job lasts after its driver has renewed it

_Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=255)]
_Workers: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_WORKERS)]
_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e12)]
SlotsByHost: TypeAlias = Annotated[
    dict[_Name, Annotated[int, Meta(ge=0, le=MOST_WORKERS)]], Meta(max_length=MOST_HOSTS)
]


class Kind(Struct, frozen=True, kw_only=True):
    """The kind of a job; jobs with the same name, or with the same rest, are similar.

    `command` is a digest of the command line. `parameters`: of the model. `batch`: samples of a
    step, of all workers. None: not known.
    """

    name: Annotated[str, Meta(max_length=255)]
    command: Annotated[str, Meta(max_length=64)]
    parameters: _Count | None = None
    batch: _Count | None = None


class Speed(Struct, frozen=True, kw_only=True):
    """The progress of a world of `size` workers on `hosts` hosts.

    `steps` were done until `at`, by the clock of the worker that is rank 0. `rest`: the steps until
    the end. `micro_batches`: into which a step of a fixed batch is divided. `noise`: the scale of
    the gradients' noise (`features.sizes.search`). None: not known.
    """

    round: _Count
    size: _Workers
    hosts: Annotated[int, Meta(ge=1, le=MOST_HOSTS)]
    worker: _Name
    steps: Annotated[int, Meta(ge=-1, le=2**53)]
    at: _Seconds
    rest: _Count | None = None
    micro_batches: _Count | None = None
    noise: Annotated[float, Meta(ge=0.0, le=1e12)] | None = None


class JobReport(Struct, frozen=True, kw_only=True, tag="job_report"):
    """The state of a job, as its driver knows it.

    `began` tells runs of the same job apart. `most` None: no limit. `held`: the number of workers
    that a user asked for. `carried_out`: the newest grant whose hosts the job uses; 0: none yet.
    `receipt`: that of this grant. `holding`: slots with a process of the job, by host. `lives_on`:
    see above. `liveness`: HOST:PORT where others can connect as long as the driver lives; "":
    nowhere. After a worker has run out of memory, `memory_need` has the bytes that one should find
    (0: not known), and `room` the most workers for which hosts have the memory. `starved`: the most
    workers of hosts whose processors are too few for more. `planned`: the most workers of hosts by
    a user's plan. `speed`: None while the job does not train.
    """

    began: _Seconds
    least: _Workers
    most: _Workers | None = None
    weight: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    held: _Workers | None = None
    carried_out: _Count = 0
    receipt: Annotated[str, Meta(max_length=MOST_RECEIPT)] = ""
    holding: SlotsByHost = {}
    lives_on: Annotated[float, Meta(ge=0.0, le=MOST_LIVES_ON_S)] = 0.0
    liveness: Annotated[str, Meta(max_length=300)] = ""
    memory_need: _Count = 0
    room: SlotsByHost = {}
    starved: SlotsByHost = {}
    planned: SlotsByHost = {}
    kind: Kind
    speed: Speed | None = None


class JobOver(Struct, frozen=True, kw_only=True, tag="job_over"):
    """A job has ended; none of its processes is left."""

    began: _Seconds
    exit_code: Annotated[int, Meta(ge=0, le=255)]


class Grant(Struct, frozen=True, kw_only=True):
    """The slots that a job may use, by host, in the order in which it is to use them.

    No hosts: the job has to wait. `began` is that of the run it is for (0: any): another run of the
    same job may find it, and must not use it. `too_small`: the largest of the Brain's hosts with
    its idle memory ("" and 0: not known), if they have the memory for too few of its workers.
    `receipt`: the proof of this grant, which the job sends back with its reports.
    """

    began: _Seconds = 0.0
    number: Annotated[int, Meta(ge=1, le=2**53)]
    hosts: SlotsByHost
    reason: Annotated[str, Meta(max_length=1000)]
    too_small: tuple[Annotated[str, Meta(max_length=255)], _Count] | None = None
    receipt: Annotated[str, Meta(max_length=MOST_RECEIPT)] = ""


def lease_key(job: str) -> str:
    """Return the key of the lease that a job's driver renews."""
    return f"jobs/{job}/lease"


def grant_key(job: str) -> str:
    """Return the key of a job's newest `Grant`."""
    return f"jobs/{job}/grant"


_LABEL = b"receipts of grants"


class Proved(Struct, frozen=True, kw_only=True):
    """The content of a receipt: the slots of a grant, and others that the job may have had then.

    `known`: whether it is of the present book, so that the Brain knows it anyway.
    """

    number: int
    hosts: SlotsByHost
    claims: SlotsByHost
    known: bool = False


class _Receipt(Struct, frozen=True, array_like=True):
    book: str
    job: str
    began: float
    number: int
    hosts: SlotsByHost
    claims: SlotsByHost


class Receipts:
    """Makes the receipts of one Brain, and reads them. `book`: names its present state."""

    def __init__(self, token: str, book: str) -> None:
        self._key, self._book = hmac.digest(token.encode(), _LABEL, "sha256"), book

    def of(self, job: str, grant: Grant, claims: Mapping[str, int]) -> str:
        """Return the receipt of a grant."""
        said = _Receipt(self._book, job, grant.began, grant.number, dict(grant.hosts), dict(claims))
        body = base64.urlsafe_b64encode(msgspec.msgpack.encode(said)).decode()
        return f"{body}.{self._proof(body)}"

    def read(self, receipt: str, job: str, began: float) -> Proved | None:
        """Return what a receipt proves of this run of a job; None: nothing."""
        body, _, proof = receipt.rpartition(".")
        if not receipt.isascii() or not hmac.compare_digest(proof, self._proof(body)):
            return None
        try:
            said = msgspec.msgpack.decode(base64.urlsafe_b64decode(body), type=_Receipt)
        except (ValueError, msgspec.MsgspecError):
            return None
        if (said.job, said.began) != (job, began):
            return None
        return Proved(
            number=said.number,
            hosts=said.hosts,
            claims=said.claims,
            known=said.book == self._book,
        )

    def _proof(self, body: str) -> str:
        return hmac.digest(self._key, body.encode(), "sha256").hex()
