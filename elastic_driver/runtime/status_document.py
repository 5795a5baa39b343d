"""The document of `GET /v1/status`: one type for all who read it, and for what describes it.

The driver makes it (`runtime.driver`); the metrics, the page, `elasticctl` and the document of all
routes know it by these types. A test compares them with what a driver answers. Before the job there
is less to say, and a driver that serves TensorFlow nodes has no job. Times are seconds; `started`
is in unix seconds. docs/status.md explains each key.
"""

import contextlib
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct

from elastic_driver.features import chapters
from elastic_driver.job.status import CounterStatus, JobStatus, SlowStatus
from elastic_driver.words.progress import Measured

if TYPE_CHECKING:
    CheckReport = Any
else:  # of the feature that checks hosts; None if there is none
    CheckReport = reduce(or_, (each.DOCUMENT for each in chapters("report")), type(None))


class GoodputStatus(Struct, frozen=True):
    """Where the time of the worker slots went: the key `goodput`."""

    seconds: dict[str, float] = {}  # of slots, by class
    goodput: float | None = None  # the part that trained, 0 to 1
    slots: float = 0.0  # mean over `wall`
    wall: float = 0.0


class RunCounters(CounterStatus, frozen=True, kw_only=True):
    """The job's counters, and those of what watches it."""

    false_alarms: int = 0  # about slow ranks
    # By class; they never go back.
    slot_seconds: dict[str, float] = {}  # noqa: RUF012 - msgspec copies it


class JobDocument(JobStatus, frozen=True, kw_only=True):
    """The status of a job, and what the driver adds."""

    run_id: str
    endpoint: str
    started: float
    counters: RunCounters
    command: tuple[str, ...] = ()
    step: int = 0
    measured: Measured = Measured()
    slow: tuple[SlowStatus, ...] = ()
    goodput: GoodputStatus | None = None
    events: dict[str, int] = {}  # noqa: RUF012 - how many were logged, by name
    node_check: CheckReport | None = None
    tf: Any = None  # what the machine of TensorFlow's clusters shows


class ServiceDocument(Struct, frozen=True, kw_only=True):
    """The status where TensorFlow nodes are served without a job."""

    run_id: str
    endpoint: str
    started: float
    tf: Any
    state: Literal["serving"]


class StartingDocument(Struct, frozen=True, kw_only=True):
    """The status before the job begins, and while its hosts are checked."""

    run_id: str
    started: float
    state: Literal["starting", "checking", "done"]  # done: the check, the job begins next
    node_check: CheckReport | None = None


StatusDocument = JobDocument | ServiceDocument | StartingDocument
_decode_job = msgspec.json.Decoder(JobDocument).decode
_decode_starting = msgspec.json.Decoder(StartingDocument).decode
_decode_service = msgspec.json.Decoder(ServiceDocument).decode


def read_status(document: bytes) -> StatusDocument:
    """Return the status of a job, of one that has not begun, or of a service that has no job.

    Raises one of `wire.UNREADABLE` if it is none of these.
    """
    for decode in (_decode_service, _decode_starting):
        with contextlib.suppress(msgspec.ValidationError):
            return decode(document)
    return _decode_job(document)
