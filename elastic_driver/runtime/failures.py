"""Tracebacks of failed workers, held for a moment until it is known what they mean for the job.

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
from dataclasses import dataclass, field

from elastic_driver.words.findings import Failure
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
