"""Shows a job to people: from the driver's documents to lines of text. Pure."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from elastic_driver import words
from elastic_driver.errors import ClusterError, ExitCode, UsageError
from elastic_driver.features import chapters
from elastic_driver.job.status import HostStatus, MemberStatus
from elastic_driver.kernel.log import name_of
from elastic_driver.runtime.results import JobResult, describe_failure
from elastic_driver.runtime.status_document import (
    GoodputStatus,
    JobDocument,
    ServiceDocument,
    StartingDocument,
    read_status,
)
from elastic_driver.words import counted
from elastic_driver.words.findings import Failure, StackGroup
from elastic_driver.words.log_lines import sentence
from elastic_driver.words.progress import Measured
from elastic_driver.words.worker_log_events import StacksCollected
from launcher import readable
from launcher.readable import UNKNOWN, duration


class ShownEvent(Struct, frozen=True):
    """The fields of an event of the log that are shown."""

    n: int
    t: float  # unix seconds
    event: str
    reason: str = ""
    worker: str | None = None
    host: str | None = None
    stacks: tuple[StackGroup, ...] = ()


MOST_ROWS = 50  # of hosts, and of workers; more are shown in groups
MOST_ODD = 20  # of those in trouble that are shown beside the groups
STACKS_COLLECTED = name_of(StacksCollected)
_PLACES = {"collective": "in a collective", "elsewhere": "outside of collectives"}
read_event = msgspec.json.Decoder(ShownEvent).decode


def read_job(document: bytes) -> JobDocument:
    """Return the status of a job; raises UsageError if there is none, ClusterError if not yet."""
    found = read_status(document)
    if isinstance(found, StartingDocument):
        raise ClusterError(f"run {found.run_id} is {found.state}; try again when it has begun")
    if isinstance(found, ServiceDocument):
        raise UsageError(f"run {found.run_id} serves TensorFlow nodes and has no job")
    return found


def status(document: bytes, now: float, *, every: bool = False) -> str:
    """Return the job, or the service that has none, in some lines; `now`: unix seconds.

    `every`: a row for each host and worker, however many there are.
    """
    found = read_status(document)
    if isinstance(found, JobDocument):
        return job(found, now, every=every) + features(document)
    since = duration(now - found.started)
    if isinstance(found, StartingDocument):
        what = "its hosts are checked" if found.state == "checking" else "it is starting"
        return f"run {found.run_id}: {what}, for {since}"
    head = f"run {found.run_id} serves TensorFlow nodes for {since} at {found.endpoint}"
    return head + features(document)


def features(document: bytes) -> str:
    """Return what the features show of themselves, each below an empty line."""
    decoded = msgspec.json.decode(document)
    shown = [chapter.SENTENCES.status(decoded) for chapter in chapters("sentences")]
    return "".join(f"\n\n{table(head, rows)}" for head, *rows in filter(None, shown))


def job(document: JobDocument, now: float, *, every: bool = False) -> str:
    """Return the whole job in some lines; `now`: unix seconds. `every`: see `status`."""
    many_hosts = not every and len(document.hosts) > MOST_ROWS
    shown = hosts_by_state(document) if many_hosts else hosts(document)
    many = not every and len(document.members) > MOST_ROWS
    return "\n".join(
        [
            *heading(document, now),
            "",
            shown,
            "",
            workers_by_host(document) if many else workers(document),
        ]
    )


def heading(document: JobDocument, now: float) -> list[str]:
    """Return the lines above the tables; `now`: unix seconds."""
    counters = document.counters
    most = "any" if document.max_np is None else document.max_np
    wanted = "any" if document.wanted is None else document.wanted
    ending = sum(member.state == "ending" for member in document.members)
    size = counted(document.size, "worker") + f" and {ending} ending" * bool(ending)
    head = [
        f"run {document.run_id} at {document.endpoint}",
        f"{document.state} for {duration(now - document.started)}, round {document.round}: "
        f"{size} ({wanted} wanted, {document.min_np} to {most}) "
        f"for {duration(document.round_age)}",
        *progress(document.measured),
        *goodput(document.goodput),
        f"failures {counters.failures}{_limit(counters.max_restarts)}, "
        f"changes {counters.resets}{_limit(counters.reset_limit)}",
    ]
    if document.reason:
        head.append(f"now: {printable(document.reason)}")
    return head


def progress(measured: Measured) -> list[str]:
    """Return a line about step, speed and reported numbers; none if nothing is known."""
    if not measured.step and not measured.workers:
        return []
    of_all = "" if measured.total is None else f" of {measured.total:,}"
    parts = [f"step {measured.step:,}{of_all}"]
    if measured.steps_per_s is not None:
        parts.append(f"{readable.rate(measured.steps_per_s)} steps/s")
    if measured.samples_per_s is not None:
        parts.append(f"{readable.rate(measured.samples_per_s)} samples/s")
    if measured.samples:
        parts.append(counted(measured.samples, "sample"))
    parts += [f"{printable(name)} {value:.4g}" for name, value in measured.numbers.items()]
    if measured.total is not None and measured.steps_per_s:
        left = max(0, measured.total - measured.step) / measured.steps_per_s
        parts.append(f"about {duration(left)} left")
    return [", ".join(parts)]


def goodput(found: GoodputStatus | None) -> list[str]:
    """Return a line about the part of the slots' time that trained; none if it is not known."""
    if found is None or found.goodput is None:
        return []
    total = sum(found.seconds.values()) or 1.0
    rest = sorted(found.seconds.items(), key=lambda pair: -pair[1])
    lost = [
        f"{name} {s / total:.1%}" for name, s in rest if name != "training" and s / total >= 5e-4
    ]
    return [f"goodput {found.goodput:.1%}" + (f" ({', '.join(lost)})" if lost else "")]


def how_it_ended(exit_code: int | None, failure: Failure | None) -> str:
    """Return how a job has ended: one that was told to stop, and not by a failure, is stopped."""
    if failure is None and exit_code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
        return "stopped"
    return "failed" if exit_code else "succeeded"


def ended(result: JobResult, now: float) -> str:
    """Return the end of a job and of each of its workers; `now`: unix seconds."""
    word = how_it_ended(result.exit_code, result.failure)
    when = duration(now - result.ended)
    head = f"{word} {when} ago (status {result.exit_code})"
    rows = []
    for w in result.workers:
        code = "lost" if w.exit_code is None else str(w.exit_code)
        code = "hung" if w.hung else code
        took = "-" if w.seconds is None else duration(w.seconds)
        last = "" if w.exit_code == 0 else w.last_words.rpartition("\n")[2]
        rank = "-" if w.rank is None else str(w.rank)
        rows.append((rank, w.host, str(w.slot), str(w.pid or "-"), w.worker, code, took, last))
    names = ("RANK", "HOST", "SLOT", "PID", "WORKER", "EXIT", "TIME", "LAST WORDS")
    text = f"{head}: {printable(result.reason)}\n\n{table(names, rows)}"
    failure = result.failure
    if failure is None or not failure.log_tail:
        return text
    said = [f"  {cleaned(line)}" for line in failure.log_tail.splitlines()]
    return "\n".join([text, "", f"last words of {describe_failure(failure)}", *said])


def hosts(document: JobDocument) -> str:
    """Return a line for each host."""
    return _hosts(document, document.hosts)


def _hosts(document: JobDocument, chosen: Sequence[HostStatus]) -> str:
    """Return a line for each of these hosts; with CPU, memory and GPUs if any are measured."""
    measured = document.measured.hosts
    gpus = any(found.gpus for found in measured.values())
    columns = 3 if gpus else 2 if measured else 0
    rows = []
    for h in chosen:
        left = f"{duration(h.cooldown_left)} left: " if h.cooldown_left > 0 else ""
        doubt = f"may be lost, for {h.suspected_for:.1f} s: {', '.join(h.evidence)}"
        why = doubt if h.evidence else left + h.reason
        known = readable.of_host(measured.get(h.host))[:columns]
        rows.append((h.host, h.state, str(h.slots), str(h.workers), h.agent, *known, why))
    names = readable.HOST_NUMBERS[:columns]
    return table(("HOST", "STATE", "SLOTS", "WORKERS", "AGENT", *names, "WHY"), rows)


def hosts_by_state(document: JobDocument) -> str:
    """Return a line for each state of hosts, then those that are in trouble."""
    measured = document.measured.hosts
    states = Counter(h.state for h in document.hosts)
    rows = []
    for state, number in states.most_common():
        there = [h for h in document.hosts if h.state == state]
        found = [measured[h.host] for h in there if h.host in measured]
        cpu = readable.percent(readable.over((h.cpu for h in found), readable.mean))
        used = readable.size(readable.over((h.memory_used for h in found), sum))
        slots = sum(h.slots for h in there)
        busy = sum(h.workers for h in there)
        rows.append((state, str(number), str(slots), str(busy), cpu, used))
    text = table(("STATE", "HOSTS", "SLOTS", "WORKERS", "CPU", "MEMORY"), rows)
    odd = [h for h in document.hosts if h.state != "usable" or h.evidence]
    if not odd:
        return text
    return f"{text}\n\n{_hosts(document, odd[:MOST_ODD])}{_more(len(odd), 'host')}"


def workers(document: JobDocument) -> str:
    """Return a line for each worker's process, by rank."""
    return _workers(document, document.members)


def notes(document: JobDocument) -> dict[str, str]:
    """Return what there is to say about workers, by worker."""
    slow = {s.worker: f"slow in {s.kind}: {s.ratio:.1f} times the usual" for s in document.slow}
    bound = {w.worker: f"bound to CPUs {w.cpus}" for w in document.members if w.cpus}
    return bound | slow | {w.worker: f"leaves: {w.leaving}" for w in document.members if w.leaving}


def _workers(document: JobDocument, chosen: Sequence[MemberStatus]) -> str:
    measured = document.measured.workers
    said = notes(document)
    columns = 4 if measured else 0
    rows = []
    for w in chosen:
        rank = "-" if w.rank < 0 else str(w.rank)
        known = readable.of_worker(measured.get(w.worker))[:columns]
        place = (rank, w.state, w.host, str(w.slot), str(w.pid or UNKNOWN), w.worker)
        rows.append((*place, *known, said.get(w.worker, "")))
    names = readable.WORKER_NUMBERS[:columns]
    return table(("RANK", "STATE", "HOST", "SLOT", "PID", "WORKER", *names, ""), rows)


def workers_by_host(document: JobDocument) -> str:
    """Return a line for each host's workers, or state of workers, then those to be looked at."""
    placed = len({w.host for w in document.members}) <= MOST_ROWS
    groups: dict[str, list[MemberStatus]] = {}
    for w in document.members:
        groups.setdefault(w.host if placed else w.state, []).append(w)
    rows = [(name, *_summary(document, group)) for name, group in groups.items()]
    head = (
        "HOST" if placed else "STATE",
        "WORKERS",
        "RANKS",
        "STATES",
        *readable.WORKER_NUMBERS[:4],
    )
    said = notes(document)
    odd = [w for w in document.members if w.state != "running" or w.worker in said]
    text = table(head, rows)
    if not odd:
        return text
    return f"{text}\n\n{_workers(document, odd[:MOST_ODD])}{_more(len(odd), 'worker')}"


def _summary(document: JobDocument, group: Sequence[MemberStatus]) -> tuple[str, ...]:
    """Return number, ranks, states and figures of some workers: sums, and the mean of steps/s."""
    measured = document.measured.workers
    found = [measured[w.worker] for w in group if w.worker in measured]
    ranks = [w.rank for w in group if w.rank >= 0]
    span = UNKNOWN if not ranks else f"{min(ranks)}-{max(ranks)}"
    span = str(ranks[0]) if len(ranks) == 1 else span
    states = Counter(w.state for w in group).most_common()
    step = readable.over((w.step for w in found), max)
    return (
        str(len(group)),
        span,
        ", ".join(f"{number} {state}" for state, number in states),
        readable.count(None if step is None else int(step)),
        readable.rate(readable.over((w.steps_per_s for w in found), readable.mean)),
        readable.rate(readable.over((w.samples_per_s for w in found), sum)),
        readable.size(readable.over((w.memory for w in found), sum)),
    )


def _more(number: int, what: str) -> str:
    hidden = number - MOST_ODD
    return f"\n… and {counted(hidden, f'more {what}')}; --all shows every one" if hidden > 0 else ""


def event(line: bytes) -> str:
    """Return an event of the log as a sentence in one line: local time, number, sentence, name."""
    facts: dict[str, Any] = msgspec.json.decode(line)
    found = msgspec.convert(facts, ShownEvent)
    when = time.strftime("%H:%M:%S", time.localtime(found.t))
    said = printable(sentence(found.event, found.reason, facts))
    return f"{when} {found.n:>5} {said} [{printable(found.event)}]"


def stacks(found: ShownEvent) -> str:
    """Return each group of ranks with its stack, the odd ones first."""
    parts = [printable(found.reason)]
    for group in sorted(found.stacks, key=lambda g: not g.odd):
        ranks = ", ".join(map(str, group.ranks))
        place = _PLACES.get(group.where, group.where)
        apart = ", apart from the others" if group.odd else ""
        head = f"rank{'s' if len(group.ranks) > 1 else ''} {ranks}: {printable(place)}{apart}"
        parts.append("\n".join([head, *(f"  {cleaned(x)}" for x in group.stack.splitlines())]))
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return aligned columns; only the head if there are no rows."""
    return "\n".join(words.aligned([head, *(tuple(map(printable, row)) for row in rows)]))


def printable(text: str) -> str:
    """Return text from a script or a host as one line without control characters."""
    return cleaned(" ".join(text.split()))


def cleaned(line: str) -> str:
    """Return a line with its control characters, other than tabs, replaced."""
    return words.printable(line).replace("\n", "?")


def _limit(limit: int | None) -> str:
    return "" if limit is None else f" of {limit}"


def clock(unix: float) -> str:
    """Return a time of the day, to the millisecond, in local time."""
    return f"{time.strftime('%H:%M:%S', time.localtime(unix))}.{int(unix % 1 * 1000):03}"
