"""Shows a job to people: from the driver's documents to lines of text. Pure."""

import time
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from elastic_driver.core.decisions import StackGroup
from elastic_driver.core.status import JobStatus, SlowStatus
from elastic_driver.errors import UsageError
from elastic_driver.policies.tf_messages import TfStatus
from elastic_driver.runtime.failures import describe_failure
from elastic_driver.runtime.results import JobResult


class JobDocument(JobStatus, frozen=True, kw_only=True):
    """The answer of `GET /v1/status`: the job, and what the driver adds."""

    run_id: str
    endpoint: str
    started: float  # unix seconds
    slow: tuple[SlowStatus, ...] = ()


class ShownEvent(Struct, frozen=True):
    """The fields of an event of the log that are shown."""

    n: int
    t: float  # unix seconds
    event: str
    reason: str = ""
    worker: str | None = None
    host: str | None = None
    stacks: tuple[StackGroup, ...] = ()


STACKS_COLLECTED = "stacks_collected"
_PLACES = {"collective": "in a collective", "elsewhere": "outside of collectives"}
_decode_job = msgspec.json.Decoder(JobDocument).decode
read_event = msgspec.json.Decoder(ShownEvent).decode


class ServiceDocument(Struct, frozen=True, kw_only=True):
    """The answer of `GET /v1/status` where TensorFlow nodes are served without a job."""

    run_id: str
    endpoint: str
    started: float  # unix seconds
    tf: TfStatus
    state: Literal["serving"]


_decode_service = msgspec.json.Decoder(ServiceDocument).decode


def read_document(document: bytes) -> JobDocument | ServiceDocument:
    """Return the status of a job, or of a service that has no job."""
    try:
        return _decode_service(document)
    except msgspec.ValidationError:
        return _decode_job(document)


def read_job(document: bytes) -> JobDocument:
    """Return the status of a job; raises UsageError if there is none."""
    found = read_document(document)
    if isinstance(found, ServiceDocument):
        raise UsageError(f"run {found.run_id} serves TensorFlow nodes and has no job")
    return found


def status(document: bytes, now: float) -> str:
    """Return the job, or the service that has none, in some lines; `now`: unix seconds."""
    found = read_document(document)
    if isinstance(found, JobDocument):
        return job(found, now)
    tf, since = found.tf, duration(now - found.started)
    rows = [
        (n, f"{t.type} {t.index}", f"generation {tf.generation}") for n, t in tf.members.items()
    ]
    rows += [(node, "-", "waiting") for node in tf.waiting]
    rows += [(node, "-", "lost") for node in tf.lost]
    head = f"run {found.run_id} serves TensorFlow nodes for {since} at {found.endpoint}"
    return f"{head}\n\n{table(('NODE', 'TASK', 'STATE'), rows)}"


def job(document: JobDocument, now: float) -> str:
    """Return the whole job in some lines; `now`: unix seconds."""
    counters = document.counters
    most = "any" if document.max_np is None else document.max_np
    wanted = "any" if document.wanted is None else document.wanted
    head = [
        f"run {document.run_id} at {document.endpoint}",
        f"{document.state} for {duration(now - document.started)}, round {document.round}: "
        f"{document.size} workers ({wanted} wanted, {document.min_np} to {most})",
        f"failures {counters.failures}{_limit(counters.max_restarts)}, "
        f"changes {counters.resets}{_limit(counters.reset_limit)}",
    ]
    if document.reason:
        head.append(f"now: {printable(document.reason)}")
    return "\n".join([*head, "", hosts(document), "", workers(document)])


def ended(result: JobResult, now: float) -> str:
    """Return the end of a job and of each of its workers; `now`: unix seconds."""
    word = "failed" if result.exit_code else "succeeded"
    head = f"{word} {duration(now - result.ended)} ago (status {result.exit_code})"
    rows = []
    for w in result.workers:
        code = "lost" if w.exit_code is None else str(w.exit_code)
        took = "-" if w.seconds is None else duration(w.seconds)
        words = w.last_words.rpartition("\n")[2]
        rank = "-" if w.rank is None else str(w.rank)
        rows.append((rank, w.host, str(w.slot), str(w.pid or "-"), w.worker, code, took, words))
    names = ("RANK", "HOST", "SLOT", "PID", "WORKER", "EXIT", "TIME", "LAST WORDS")
    text = f"{head}: {printable(result.reason)}\n\n{table(names, rows)}"
    failure = result.failure
    if failure is None or not failure.log_tail:
        return text
    said = [f"  {_clean(line)}" for line in failure.log_tail.splitlines()]
    return "\n".join([text, "", f"last words of {describe_failure(failure)}", *said])


def hosts(document: JobDocument) -> str:
    """Return a line for each host."""
    rows = []
    for h in document.hosts:
        left = f"{duration(h.cooldown_left)} left: " if h.cooldown_left > 0 else ""
        doubt = f"may be lost, for {h.suspected_for:.1f} s: {', '.join(h.evidence)}"
        why = doubt if h.evidence else left + h.reason
        rows.append((h.host, h.state, str(h.slots), str(h.workers), h.agent, why))
    return table(("HOST", "STATE", "SLOTS", "WORKERS", "AGENT", "WHY"), rows)


def workers(document: JobDocument) -> str:
    """Return a line for each worker's process, by rank."""
    slow = {s.worker: f"slow in {s.kind}: {s.ratio:.1f} times the usual" for s in document.slow}
    rows = []
    for w in document.members:
        note = f"leaves: {w.leaving}" if w.leaving else slow.get(w.worker, "")
        rank = "-" if w.rank < 0 else str(w.rank)
        rows.append((rank, w.state, w.host, str(w.slot), str(w.pid or "-"), w.worker, note))
    return table(("RANK", "STATE", "HOST", "SLOT", "PID", "WORKER", ""), rows)


def event(found: ShownEvent) -> str:
    """Return an event in one line, in local time."""
    when = time.strftime("%H:%M:%S", time.localtime(found.t))
    name = f"{found.event} {found.worker or found.host or ''}".rstrip()
    reason = printable(found.reason)
    return f"{when} {found.n:>5} {name}{': ' * bool(reason)}{reason}"


def stacks(found: ShownEvent) -> str:
    """Return each group of ranks with its stack, the odd ones first."""
    parts = [printable(found.reason)]
    for group in sorted(found.stacks, key=lambda g: not g.odd):
        ranks = ", ".join(map(str, group.ranks))
        place = _PLACES.get(group.where, group.where)
        apart = ", apart from the others" if group.odd else ""
        head = f"rank{'s' if len(group.ranks) > 1 else ''} {ranks}: {printable(place)}{apart}"
        parts.append("\n".join([head, *(f"  {_clean(x)}" for x in group.stack.splitlines())]))
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return aligned columns; only the head if there are no rows."""
    lines = [tuple(head), *(tuple(map(printable, row)) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def printable(text: str) -> str:
    """Return text from a script or a host as one line without control characters."""
    return _clean(" ".join(text.split()))


def _clean(line: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in line)


def duration(seconds: float) -> str:
    """Return seconds as people say them: `12 s`, `3 min`, `5 h 20 min`, `2 d 4 h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, hours, days = whole // 60 % 60, whole // 3600 % 24, whole // 86400
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _limit(limit: int | None) -> str:
    return "" if limit is None else f" of {limit}"
