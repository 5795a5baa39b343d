"""The thread of a driver that writes the statistics of its job.

The driver hands in samples and never waits. The thread gathers them into rows and writes these
every few seconds. A database that is locked, full, corrupt or away costs a sentence for the user,
and is tried again each time; what waits meanwhile is bounded, and the oldest of it is dropped.
SQLAlchemy is loaded by this thread only, when the job has run for some seconds. Times are seconds.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

from elastic_driver.brain.grants import Kind
from elastic_driver.brain.store.address import Address
from elastic_driver.brain.store.records import (
    JOBS,
    MINUTE,
    Buckets,
    JobKey,
    Prior,
    Record,
    Row,
    Sample,
    Trained,
    figures_of,
    prior_of,
)

if TYPE_CHECKING:
    from elastic_driver.brain.store.database import Database

PAUSE_S = 5.0  # between two writes; a job that is over sooner leaves no statistics
EXPIRE_S = 3600.0  # between two looks for what is too old
SILENT_S = 15.0  # after which a database that does not answer is told
LAST_S = 5.0  # for the database to take what is left when the job is over
MOST_SAMPLES = 300  # that wait for the thread
MOST_ROWS = 100_000  # that wait for the database
TOGETHER = 5_000  # rows of one transaction


class StatisticsWriter:
    """The statistics of one job; `start`, `take` and `close` are the driver's.

    Args:
        record: what is known of the job before it trains.
        say: shows a line to the user; any thread may call it.
        on_prior: takes what similar jobs have measured, if there are any; called by the thread, at
            once and, if there are none of the name, when the model is known. None: nobody asks.
    """

    def __init__(
        self,
        address: Address,
        job: JobKey,
        record: Record,
        say: Callable[[str], None],
        *,
        on_prior: Callable[[Prior], None] | None = None,
        pause: float = PAUSE_S,
        most_rows: int = MOST_ROWS,
    ) -> None:
        self._address, self._job, self._say, self._pause = address, job, say, pause
        self._samples: queue.Queue[Sample] = queue.Queue(MOST_SAMPLES)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="statistics", daemon=True)
        self._lost_samples = 0  # by the driver's thread
        self._end: tuple[float, int] | None = None  # when the job has ended, and its exit code
        # Of the thread; the first one is also set by the driver's thread, see `take`:
        self._failing = False  # the last try has failed, and that was said
        self._asked_at: float | None = None  # monotonic; since then a try is under way
        self._trained = Trained(record)
        self._on_prior = on_prior
        self._asked_for: Kind | None = None  # whose prior was looked for last
        self._buckets = Buckets()
        self._rows: deque[Row] = deque()
        self._most_rows = most_rows
        self._lost_rows = 0
        self._refused = False  # no try will succeed
        self._roll_up_from = 0  # the newest minute whose rows are made
        self._expire_at = 0.0  # monotonic

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def take(self, sample: Sample) -> None:
        """Take in a sample; drop it if the thread has far too much to do. Never waits."""
        asked = self._asked_at
        if asked is not None and time.monotonic() - asked > SILENT_S and not self._failing:
            self._failing = True  # the thread cannot say it: it waits for the answer
            self._say(f"statistics: {self._address} does not answer; the job goes on")
        try:
            self._samples.put_nowait(sample)
        except queue.Full:
            self._lost_samples += 1

    @property
    def waiting(self) -> int:
        """The number of samples and rows not written yet, but for the newest row of each figure."""
        return self._samples.qsize() + len(self._rows)

    def close(self, exit_code: int | None = None) -> None:
        """Write what is left; wait for at most `LAST_S`, and not for a database that fails.

        Without an exit code the job goes on, with another driver.
        """
        self._end = None if exit_code is None else (time.time(), exit_code)
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(0.0 if self._failing else LAST_S)

    # ---- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        if self._on_prior is None and self._over.wait(self._pause):
            return
        try:
            from elastic_driver.brain.store.database import Database  # noqa: PLC0415 - the extra
        except ImportError:  # the launcher tells those who have asked for statistics
            return
        database, over = Database(self._address), False
        while True:
            self._gather(all_rows=over)
            self._try(database, over=over)
            if over or self._refused:
                break
            over = self._over.wait(self._pause)
        database.close()

    def _gather(self, *, all_rows: bool) -> None:
        """Make rows of the samples."""
        while not self._samples.empty():
            sample = self._samples.get_nowait()
            self._trained.take(sample)
            for series, value in figures_of(sample):
                self._buckets.add(sample.t, series, value)
        self._rows.extend(self._buckets.take(all_rows=all_rows))
        while len(self._rows) > self._most_rows:
            self._rows.popleft()
            self._lost_rows += 1

    def _try(self, database: "Database", *, over: bool) -> None:
        """Write the rows, or say why that fails."""
        from elastic_driver.brain.store import database as failures  # noqa: PLC0415 - loads SQLAlchemy

        self._asked_at = time.monotonic()
        try:
            self._write(database, over=over)
        except Exception as error:  # whatever fails here, the job goes on
            self._refused = failures.is_final(error)
            if failures.is_corrupt(error):
                self._begin_anew()
            elif not self._failing:
                later = "" if self._refused else ", and this is tried again"
                why = failures.described(error)
                self._say(f"statistics: {self._address} cannot be written: {why}; "
                          f"the job goes on{later}")  # fmt: skip
                self._failing = True
            if failures.is_bad_row(error):
                self._lost_rows += len(self._rows)
                self._rows.clear()
            return
        finally:
            self._asked_at = None
        if self._failing:
            self._say(f"statistics: {self._address} is written again; {self._losses()}")
        elif database.file_removed:
            self._say(f"statistics: {self._address} was removed, with what was written; "
                      "a new one is begun")  # fmt: skip
        self._failing = database.file_removed = False

    def _losses(self) -> str:
        rows, samples = self._lost_rows, self._lost_samples
        return (
            f"{rows} rows and {samples} samples were lost"
            if rows or samples
            else "no row was lost meanwhile"
        )

    def _look_for_prior(self, database: "Database") -> None:
        kind = self._trained.record.kind
        if self._on_prior is not None and kind != self._asked_for:
            if prior := prior_of(database.similar(kind, JOBS)):
                self._on_prior(prior)
                self._on_prior = None
            self._asked_for = kind

    def _write(self, database: "Database", *, over: bool) -> None:
        self._look_for_prior(database)
        while self._rows:
            some = list(islice(self._rows, TOGETHER))
            database.write(self._job, some)
            for _ in some:
                self._rows.popleft()
        written = self._buckets.newest  # all rows before that
        if over or written >= self._roll_up_from + MINUTE:
            database.roll_up(self._job, None if over else written)
            database.remember(self._job, self._record())
            self._roll_up_from = written - written % MINUTE
        if time.monotonic() >= self._expire_at:
            database.expire(time.time())
            self._expire_at = time.monotonic() + EXPIRE_S

    def _record(self) -> Record:
        record, end = self._trained.record, self._end
        return record if end is None else record._replace(ended=end[0], exit_code=end[1])

    def _begin_anew(self) -> None:
        """Put a corrupt file aside, so that the next try makes a new one."""
        from elastic_driver.brain.store.database import set_aside  # noqa: PLC0415

        try:
            new = set_aside(self._address.file)
        except OSError as error:
            new = f"still there ({error.strerror})"
        if not self._failing:
            self._say(f"statistics: {self._address.file} was no whole database and is now {new}; "
                      "the job goes on, with a new database")  # fmt: skip
            self._failing = True
