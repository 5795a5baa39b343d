"""The result of a job and of each of its workers: exit status, times and last words.

The executor notes the ends of workers in `WorkerResults`. When the job is over, each result is a
`worker_result` line of the event log, before the line of the job's end, and `ElasticDriver.run`
returns all of them. `read_result` reads them from the log of a finished run.

A job has one result for each slot that took part in its last round: of the worker that ended there
last. Times are unix seconds.

Tracebacks of failed workers, held for a moment until it is known what they mean for the job.

Agents send a worker's traceback together with its exit. While the job may still fail from the same
error (every worker may be about to raise it), nothing is shown for `HOLD_S`. Then, or as soon as
the job goes on, each different traceback is shown once; later equal ones are counted. When the job
fails, the first failure's traceback is shown last.

Called by the driver's thread only. Nothing here prints. Times are monotonic seconds.
"""

import contextlib
import math
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from elastic_driver.job.decisions import Announce, EndJob
from elastic_driver.words import host_log_events as host_log
from elastic_driver.words import log_events as log
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.findings import Failure
from elastic_driver.words.log_lines import LogLine, read_line
from elastic_driver.words.orders import World
from elastic_driver.words.wire_events import WorkerExited

HOLD_S = 1.0  # the longest time that a traceback waits
REPEATS_S = 10.0  # the least time between two lines that count equal tracebacks
MAX_HELD = 64  # different tracebacks; a thousand workers that all fail differently need no more
MAX_TAIL_LINES = 30

# torch.distributed puts the rank before every line of an uncaught exception.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
# The two beginnings that agents look for too: of an exception, and of a syntax error.
_TRACEBACK = re.compile(
    r"^(?:\[rank\d+\]: )?(?:Traceback \(most recent call last\):|  File \".*\", line \d+$)",
    re.MULTILINE,
)
# An address in a text (`<object at 0x7f…>`) makes no difference between two tracebacks.
_ADDRESS = re.compile(r"0x[0-9a-f]+")


_NO_HOROVOD = re.compile(r"^ModuleNotFoundError: No module named 'horovod['.]")


def advice_on(words: list[str]) -> str:
    """Return what to try after a failure with these last words; "" where nothing is known."""
    if any(_NO_HOROVOD.match(_RANK_PREFIX.sub("", line)) for line in words):
        return "the script imports horovod, which is not installed: start it with --horovod"
    return ""


@dataclass
class HeldTails:
    """Tracebacks of failed workers that were not shown yet."""

    elastic: bool = False  # a worker has reported READY: the job is an elastic one
    stepped: bool = False  # a step was finished in this job
    deadline: float | None = None  # when `overdue` has something to show
    _held: dict[str, tuple[str, int]] = field(default_factory=dict)  # text → worker, round
    _shown: dict[int, str] = field(default_factory=dict)  # hash of a text → worker
    _repeats: int = 0  # failures whose tracebacks were shown before, not counted in a line yet
    _counted_at: float = -math.inf

    def add(self, event: WorkerExited, round_id: int, now: float) -> None:
        """Note a failed worker of this round; a victim's traceback only repeats its peer's loss."""
        text = traceback_in(event.log_tail)
        if event.exit_code == 0 or event.victim or not text:
            return
        due = now + HOLD_S
        if _same(text) in self._shown or len(self._held) + len(self._shown) >= MAX_HELD:
            self._repeats += 1
            due = max(due, self._counted_at + REPEATS_S)
        else:
            self._held.setdefault(text, (event.worker, round_id))
        self.deadline = due if self.deadline is None else min(self.deadline, due)

    def world_published(self, round_id: int) -> list[tuple[str, str]]:
        """Return the (worker, traceback) pairs to show now that a later round exists.

        None before the first step of an elastic job: the survivors may soon raise the same error.
        """
        return self._release(round_id) if self.stepped or not self.elastic else []

    def step_finished(self, round_id: int) -> list[tuple[str, str]]:
        """Return the pairs to show now that a later round has finished a step."""
        self.stepped = True
        return self._release(round_id)

    def job_succeeded(self) -> list[tuple[str, str]]:
        """Return the pairs to show of failures that the job has survived."""
        return self._release(None)

    def overdue(self, now: float) -> tuple[list[tuple[str, str]], int]:
        """Return the pairs that have waited long enough, and the number of equal ones since."""
        if self.deadline is None or now < self.deadline:
            return [], 0
        self.deadline = None
        ready, repeats = self._release(None), 0
        if self._repeats and now >= self._counted_at + REPEATS_S:
            repeats, self._repeats, self._counted_at = self._repeats, 0, now
        elif self._repeats:
            self.deadline = self._counted_at + REPEATS_S
        return ready, repeats

    def was_shown(self, failure: Failure) -> bool:
        """Return whether the traceback of this worker itself is on the screen."""
        text = traceback_in(failure.log_tail)
        return bool(text) and self._shown.get(_same(text)) == failure.worker

    def _release(self, round_id: int | None) -> list[tuple[str, str]]:
        ready = [
            (worker, text)
            for text, (worker, failed_in) in self._held.items()
            if round_id is None or round_id > failed_in
        ]
        new = []
        for worker, text in ready:
            del self._held[text]
            if self._shown.setdefault(_same(text), worker) == worker:
                new.append((worker, text))
        return new


def _same(text: str) -> int:
    return hash(_ADDRESS.sub("0x", text))


def traceback_in(tail: str) -> str:
    """Return a log's end from its first traceback on, or "".

    torch's rank prefixes are removed, so that equal tracebacks of several ranks are equal."""
    match = _TRACEBACK.search(tail)
    return _RANK_PREFIX.sub("", tail[match.start() :]).rstrip() if match else ""


def describe_exit(exit_code: int) -> str:
    """Return `exit code 3`, or `exit code -9 (SIGKILL)` for a signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    return f"exit code {exit_code} ({signal_name(-exit_code)})"


def signal_name(number: int) -> str:
    """Return `SIGKILL`, or `signal 40` for one without a name."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def last_words(tail: str) -> list[str]:
    """Return the last lines of a log's end: its traceback if there is one."""
    text = traceback_in(tail) or tail.strip("\n")
    return text.split("\n")[-MAX_TAIL_LINES:] if text else []


def describe_failure(failure: Failure) -> str:
    """Describe a failed worker in one line: rank, host, worker, pid, exit code."""
    process = f"pid {failure.pid}" if failure.pid else "never started"
    which = f"rank {failure.rank} on host {failure.host} (worker {failure.worker}, {process})"
    return f"{which}: {failure.lost or describe_exit(failure.exit_code)}"


WORDS_CHARS = 2048  # kept of one worker's last words, from their end
ALL_WORDS_CHARS = 1 << 20  # kept of all together; beyond that, the last line of each
LINE_CHARS = 200


class WorkerResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one worker."""

    worker: str
    host: str
    slot: int
    rank: int | None  # in its last round
    pid: int | None
    exit_code: int | None  # as subprocess gives it; None: lost with its host
    reason: str
    ended: float
    seconds: float | None  # from the start of its process; None: it was never started
    last_words: str = ""  # its traceback, or else the last lines of its stderr
    hung: bool = False  # it made no progress any more, and was killed


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a job; `exit_code` is the status of `elasticrun`."""

    exit_code: int
    reason: str
    ended: float = msgspec.field(name="t")
    failure: Failure | None = msgspec.field(default=None, name="first_failure")
    workers: tuple[WorkerResult, ...] = ()  # by rank


# The workers that live, with the times of their starts; the results, and if they have finished.
_Kept: TypeAlias = tuple[dict[str, float], list[tuple[WorkerResult, bool]]]


@dataclass
class WorkerResults:
    """The newest result of each slot; bounded, for jobs of many workers and many restarts."""

    _started: dict[str, float] = field(default_factory=dict)  # workers that live
    # Of each host and slot; True: it has finished its script.
    _of_slot: dict[tuple[str, int], tuple[WorkerResult, bool]] = field(default_factory=dict)
    _world: World | None = None  # the newest
    _chars: int = 0  # of all last words

    def world_published(self, world: World) -> None:
        """Forget the workers that the job goes on without, but not those that have finished."""
        self._world = world
        for slot, (result, finished) in list(self._of_slot.items()):
            if not finished and world.member(result.worker) is None:
                self._drop(slot)

    def note(self, event: Announce, exited: WorkerExited | None, now: float) -> None:
        """Note the start or the end of a worker; `exited`: the report of its exit, if one came."""
        worker, host, slot = event.worker, event.host, event.slot
        if worker is None or host is None:
            return
        what = event.what
        if isinstance(what, worker_log.WorkerStarted):
            self._started[worker] = now
        if not isinstance(what, worker_log.END_OF_PROCESS):
            return
        hung = isinstance(what, worker_log.WorkerHung)
        expected = isinstance(what, worker_log.WorkerExited) and what.expected
        began = self._started.get(worker) if hung else self._started.pop(worker, None)
        if slot is None:
            return  # a spare
        if expected and self._world is not None and self._world.member(worker) is None:
            return  # it was stopped before it took part, or after the others had gone on
        report = exited if isinstance(what, worker_log.WorkerExited) else None
        before, _ = self._of_slot.get((host, slot), (None, False))
        hung = hung or (before is not None and before.worker == worker and before.hung)
        self._drop((host, slot))
        result = WorkerResult(
            worker=worker,
            host=host,
            slot=slot,
            rank=event.rank,
            pid=event.pid,
            exit_code=None if report is None else report.exit_code,
            reason=event.reason,
            ended=now,
            seconds=None if began is None else now - began,
            last_words="" if report is None else self._words(report.log_tail),
            hung=hung,
        )
        self._chars += len(result.last_words)
        self._of_slot[host, slot] = result, result.exit_code == 0 and not expected

    def of_job(self, end: EndJob, now: float) -> JobResult:
        """Return the result of a job with this end."""
        found = [result for result, _ in self._of_slot.values()]
        failure = end.failure
        if failure is not None:
            tail = "\n".join(last_words(failure.log_tail))[-WORDS_CHARS:]
            failure = msgspec.structs.replace(failure, log_tail=tail)
        return JobResult(
            exit_code=end.exit_code,
            reason=end.reason,
            ended=now,
            failure=failure,
            workers=tuple(sorted(found, key=lambda r: (r.rank is None, r.rank, r.host, r.slot))),
        )

    def encode(self) -> bytes:
        """Return the results so far as bytes; the newest world is not among them."""
        return msgspec.msgpack.encode((self._started, list(self._of_slot.values())))

    def decode(self, data: bytes) -> None:
        """Take the results so far from bytes; raises ValueError if they hold none."""
        self._started, kept = msgspec.msgpack.decode(data, type=_Kept)
        self._of_slot = {(result.host, result.slot): (result, done) for result, done in kept}
        self._chars = sum(len(result.last_words) for result, _ in kept)

    def _drop(self, slot: tuple[str, int]) -> None:
        if slot in self._of_slot:
            self._chars -= len(self._of_slot.pop(slot)[0].last_words)

    def _words(self, tail: str) -> str:
        lines = last_words(tail)
        if self._chars >= ALL_WORDS_CHARS:
            return lines[-1][:LINE_CHARS] if lines else ""
        return "\n".join(lines)[-WORDS_CHARS:]


# The fields of a result that every line of the log has, and those of its own event.
_OF_LINE = ("worker", "host", "slot", "rank", "pid", "reason")
_OF_EVENT = ("exit_code", "ended", "seconds", "last_words", "hung")


def as_event(result: WorkerResult) -> Announce:
    """Return a worker's result as an event of the log."""
    what = worker_log.WorkerResult(**{name: getattr(result, name) for name in _OF_EVENT})
    place = (result.host, result.slot, result.rank, result.pid, result.worker)
    return Announce(what, result.reason, None, *place)


def _as_result(line: LogLine, what: worker_log.WorkerResult) -> WorkerResult | None:
    """Return the result of a worker that `as_event` has written; None if a field is missing."""
    if line.worker is None or line.host is None or line.slot is None:
        return None
    known = {name: getattr(line, name) for name in _OF_LINE}
    return WorkerResult(**known, **{name: getattr(what, name) for name in _OF_EVENT})


def read_result(events_file: Path) -> JobResult | None:
    """Return the result of the last run in this event log; None without a log that has its end."""
    workers: list[WorkerResult] = []
    ended: JobResult | None = None
    for line in _lines(events_file):
        match line.what:
            case log.JobStarted():  # the run id was used again
                workers.clear()
                ended = None
            case worker_log.WorkerResult() as what:
                result = _as_result(line, what)
                workers += [] if result is None else [result]
            case log.JobEnd(exit_code=int(code), first_failure=failure):
                ended = JobResult(exit_code=code, reason=line.reason, ended=line.t, failure=failure)
    return None if ended is None else msgspec.structs.replace(ended, workers=tuple(workers))


def agents_started(events_file: Path) -> set[str]:
    """Return the hosts on which the last run in this event log has started agents.

    None if the run has an end.
    """
    hosts: set[str] = set()
    for line in _lines(events_file):
        match line.what:
            case host_log.AgentStarted():
                hosts.add(line.host or "")
            case log.JobStarted() | log.JobEnd():
                hosts.clear()
    return hosts


def _lines(events_file: Path) -> Iterator[LogLine]:
    """Yield the lines of an event log, without one that was cut off; none if there is no file."""
    if events_file.is_file():
        with events_file.open("rb") as file:
            for line in file:
                if (read := read_line(line)) is not None:
                    yield read
