"""Shows a job to people: from the driver's documents to lines of text. Pure."""

import time
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from elastic_driver.core.decisions import StackGroup
from elastic_driver.core.status import CounterStatus, HostStatus, MemberStatus, SlowStatus


class JobDocument(Struct, frozen=True):
    """The answer of `GET /v1/status`, as far as it is shown."""

    run_id: str
    endpoint: str
    started: float  # unix seconds
    state: str
    kind: str
    reason: str
    round: int
    size: int
    wanted: int | None
    min_np: int
    max_np: int | None
    members: tuple[MemberStatus, ...]
    hosts: tuple[HostStatus, ...]
    counters: CounterStatus
    slow: tuple[SlowStatus, ...] = ()


class ShownEvent(Struct, frozen=True):
    """A line of the event log, as far as it is shown."""

    n: int
    t: float  # unix seconds
    event: str
    reason: str = ""
    worker: str | None = None
    host: str | None = None


class CollectedStacks(Struct, frozen=True):
    """A line of the event log, as far as it has stacks."""

    n: int
    event: str
    reason: str = ""
    stacks: tuple[StackGroup, ...] = ()


STACKS_COLLECTED = "stacks_collected"
_PLACES = {"collective": "in a collective", "elsewhere": "outside of collectives"}
read_stacks = msgspec.json.Decoder(CollectedStacks).decode
read_job = msgspec.json.Decoder(JobDocument).decode
read_event = msgspec.json.Decoder(ShownEvent).decode


def job(document: JobDocument, now: float) -> str:
    """Return the whole job in some lines; `now`: unix seconds."""
    counters = document.counters
    most = "any" if document.max_np is None else document.max_np
    wanted = "any" if document.wanted is None else document.wanted
    head = [
        f"run {document.run_id} at {document.endpoint}",
        f"{document.state} for {duration(now - document.started)}, round {document.round}: "
        f"{document.size} workers ({wanted} wanted, {document.min_np} to {most})",
        f"failures {counters.failures}{_of(counters.max_restarts)}, "
        f"changes {counters.resets}{_of(counters.reset_limit)}",
    ]
    if document.reason:
        head.append(f"now: {printable(document.reason)}")
    return "\n".join([*head, "", hosts(document), "", workers(document)])


def hosts(document: JobDocument) -> str:
    """Return a line for each host."""
    rows = [
        (host.host, host.state, str(host.slots), str(host.workers), host.agent, _host_note(host))
        for host in document.hosts
    ]
    return table(("HOST", "STATE", "SLOTS", "WORKERS", "AGENT", "WHY"), rows)


def workers(document: JobDocument) -> str:
    """Return a line for each worker's process, by rank."""
    slow = {s.worker: f"slow in {s.kind}: {s.ratio:.1f} times the usual" for s in document.slow}
    rows = [
        (
            str(worker.rank),
            worker.state,
            worker.host,
            str(worker.slot),
            str(worker.pid or "-"),
            worker.worker,
            f"leaves: {worker.leaving}" if worker.leaving else slow.get(worker.worker, ""),
        )
        for worker in document.members
    ]
    return table(("RANK", "STATE", "HOST", "SLOT", "PID", "WORKER", ""), rows)


def event(found: ShownEvent) -> str:
    """Return an event in one line, in local time."""
    when = time.strftime("%H:%M:%S", time.localtime(found.t))
    about = found.worker or found.host or ""
    name = f"{found.event} {about}".rstrip()
    reason = printable(found.reason)
    return f"{when} {found.n:>5} {name}: {reason}" if reason else f"{when} {found.n:>5} {name}"


def stacks(found: CollectedStacks) -> str:
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


def _host_note(host: HostStatus) -> str:
    if host.cooldown_left > 0:
        return f"{duration(host.cooldown_left)} left: {host.reason}"
    return host.reason


def _of(limit: int | None) -> str:
    return "" if limit is None else f" of {limit}"
