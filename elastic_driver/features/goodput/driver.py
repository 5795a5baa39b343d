"""The goodput ledger of a run as its driver keeps it: fed with each logged line, across drivers.

A resumed driver reads it from the log in the run's folder. If that is too long, or a driver on
another host has none, or only that of an earlier term, the ledger is that of the journal: of the
newest snapshot, and of the events after it.

Used by the driver's thread alone. Times are unix seconds.
"""

import contextlib
from pathlib import Path
from typing import Any

from elastic_driver.features.goodput.ledger import Class, Ledger
from elastic_driver.features.goodput.story import Story, read_story
from elastic_driver.job.decisions import Announce
from elastic_driver.runtime.journal.replay import ResumedRun
from elastic_driver.settings import Settings
from elastic_driver.words import log_events as log
from elastic_driver.words.log_lines import read_line

MOST_BYTES = 16 << 20  # of a log that a driver reads before it goes on: half a second
LOG_LATE_S = 1.0  # the journal may have an event that the log lacks, at a driver's death


class RunLedger:
    """The goodput ledger of the run, and the newest committed step."""

    def __init__(self, log_file: Path | None = None) -> None:
        """Begin a ledger, or go on with that of a log file, if it can be read and is not long."""
        self.story = Story()
        if log_file is not None:
            with contextlib.suppress(OSError), log_file.open("rb") as lines:
                if log_file.stat().st_size <= MOST_BYTES:
                    self.story = read_story(lines)
        self.step = self.ledger.step  # committed steps, the most that workers have reported

    @property
    def ledger(self) -> Ledger:
        """The ledger of the story."""
        return self.story.ledger

    def document(self, now: float) -> dict[str, Any]:
        """Return the key `goodput` of `GET /v1/status`."""
        return self.ledger.document(now)

    def counters(self, now: float) -> dict[Class, float]:
        """Return the seconds of each class as counters, which never go back."""
        return self.ledger.counters(now)

    def logged(self, line: bytes) -> None:
        """Take in a line of the event log."""
        if (read := read_line(line)) is not None:
            self.story.feed(read)

    def progressed(self, step: int, round_step: int) -> Announce | None:
        """Note the newest steps of the job and of its round; announce the end of redone ones."""
        self.step = step
        if not self.ledger.redoing or round_step < self.ledger.step:
            return None
        return Announce(log.StepsRedone(), f"the steps up to {self.ledger.step} were trained again")

    # ---- from one driver to the next -----------------------------------------------------

    def encode(self) -> bytes:
        """Return the ledger as bytes, for a snapshot."""
        return self.ledger.snapshot()

    def resume(self, snapshot: bytes, run: ResumedRun) -> None:
        """Go on with the ledger of the journal, if it knows of later events than the log.

        Raises SnapshotError if the snapshot holds none.
        """
        ledger = Ledger.restored(snapshot)
        if ledger.began is None:  # the first snapshot is made before anything is announced
            began = Announce(job_started(run.settings), "")
            ledger.feed(began.line(run.began))
        for step in run.since:
            for told in step.decisions:
                if isinstance(told, Announce):
                    ledger.feed(told.line(step.at + run.unix_offset))
        if ledger.at > self.ledger.at + LOG_LATE_S:
            self.story = Story(ledger)
            self.step = ledger.step


def job_started(settings: Settings) -> log.JobStarted:
    """Return the event that a log begins with: it has the sizes of the job."""
    wanted = settings.start_np if settings.auto_scale else settings.max_np
    return log.JobStarted(min_np=settings.min_np, max_np=settings.max_np, wanted=wanted)
