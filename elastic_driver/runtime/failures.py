"""Tracebacks of failed workers, held until it is known what they mean for the job.

Agents send a worker's traceback together with its exit. While the job may still fail from the same
error (every worker may be about to raise it), nothing is shown. When the job goes on, each
different traceback is shown once; when it fails, the first failure's traceback is shown last.

Called by the driver's thread only. Nothing here prints.
"""

import contextlib
import re
import signal
from dataclasses import dataclass, field

from elastic_driver.core.documents import Failure
from elastic_driver.core.events import WorkerExited

MAX_HELD = 64  # different tracebacks; a thousand workers that all fail differently need no more
MAX_TAIL_LINES = 30

# torch.distributed puts the rank before every line of an uncaught exception.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
# The two beginnings that agents look for too: of an exception, and of a syntax error.
_TRACEBACK = re.compile(
    r"^(?:\[rank\d+\]: )?(?:Traceback \(most recent call last\):|  File \".*\", line \d+$)",
    re.MULTILINE,
)


@dataclass
class HeldTails:
    """Tracebacks of failed workers that were not shown yet."""

    elastic: bool = False  # a worker has reported READY: the job is an elastic one
    stepped: bool = False  # a step was finished in this job
    _held: dict[str, tuple[str, int]] = field(default_factory=dict)  # text → worker, round
    _shown: set[int] = field(default_factory=set)  # hashes of what was released before

    def add(self, event: WorkerExited, round_id: int) -> None:
        """Note a failed worker of this round; a victim's traceback only repeats its peer's loss."""
        text = traceback_in(event.log_tail)
        if event.exit_code == 0 or event.victim or not text:
            return
        if hash(text) not in self._shown and len(self._held) < MAX_HELD:
            self._held.setdefault(text, (event.worker, round_id))

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

    def _release(self, round_id: int | None) -> list[tuple[str, str]]:
        ready = [
            (text, worker)
            for text, (worker, failed_in) in self._held.items()
            if round_id is None or round_id > failed_in
        ]
        for text, _ in ready:
            del self._held[text]
            if len(self._shown) < MAX_HELD:
                self._shown.add(hash(text))
        return [(worker, text) for text, worker in ready]


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


def last_words(failure: Failure) -> list[str]:
    """Return the last lines of a failed worker's stderr: its traceback if there is one."""
    text = traceback_in(failure.log_tail) or failure.log_tail.strip("\n")
    return text.split("\n")[-MAX_TAIL_LINES:] if text else []


def describe_failure(failure: Failure) -> str:
    """Describe a failed worker in one line: rank, host, worker, pid, exit code."""
    process = f"pid {failure.pid}" if failure.pid else "never started"
    which = f"rank {failure.rank} on host {failure.host} (worker {failure.worker}, {process})"
    return f"{which}: {describe_exit(failure.exit_code)}"
