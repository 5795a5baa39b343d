"""What jobs send to the Brain, bounded before the Brain's loop sees it.

All who may start jobs share one token, so bounds are by job and for all new names together. Of each
job one report waits for the loop, the newest. The loop takes so many reports of a job at once and
each second, and new names come so fast. Times are seconds of a monotonic clock.
"""

import threading
from collections.abc import Callable, Iterable
from time import monotonic

from elastic_driver.brain.messages import JobEnded, JobHeard

REPORTS, REPORTS_S = 20.0, 10.0  # of one job at once, and each second
NAMES, NAMES_S = 50.0, 5.0  # of jobs that the Brain does not know
MOST_JOBS = 1000  # that the Brain knows, or will soon


class Bucket:
    """Lets so many things pass at once, and so many more each second."""

    def __init__(self, most: float, each_s: float, now: float) -> None:
        self._most, self._each_s = most, each_s
        self._left, self._at = most, now

    def take(self, now: float) -> bool:
        """Return whether one more may pass now."""
        self._left = min(self._most, self._left + (now - self._at) * self._each_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Intake:
    """The reports that wait. `take` is called by the server's thread, all else by the loop.

    Args:
        post: puts a message into the loop's mailbox; a `str` stands for the report of that job.
        most: jobs that may be known at a time.
    """

    def __init__(
        self,
        post: Callable[[str | JobEnded], None],
        *,
        most: int = MOST_JOBS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._post, self._most, self._clock = post, most, clock
        self._lock = threading.Lock()  # guards all below
        self._waiting: dict[str, JobHeard] = {}
        self._late: dict[str, None] = {}  # jobs whose reports wait until their time has come
        self._jobs: dict[str, Bucket] = {}  # of the jobs that are known
        self._new = Bucket(NAMES, NAMES_S, clock())

    def know(self, jobs: Iterable[str]) -> None:
        """Note that the Brain knows these jobs."""
        with self._lock:
            for job in jobs:
                self._jobs.setdefault(job, Bucket(REPORTS, REPORTS_S, self._clock()))

    def forget(self, job: str) -> None:
        """Note that the Brain knows a job no more, unless a report of it waits."""
        with self._lock:
            if job not in self._waiting:
                self._jobs.pop(job, None)

    def knows(self, job: str) -> bool:
        """Return whether the Brain knows a job, or will soon."""
        with self._lock:
            return job in self._jobs

    def take(self, said: JobHeard | JobEnded) -> str:
        """Take in what a job says; return why not: "", or a phrase."""
        now = self._clock()
        with self._lock:
            known = self._jobs.get(said.job)
            if known is None:
                if len(self._jobs) >= self._most:
                    return f"the Brain has {self._most} jobs already"
                if not self._new.take(now):
                    return "too many new jobs come at once"
                if isinstance(said, JobHeard):
                    known = self._jobs[said.job] = Bucket(REPORTS, REPORTS_S, now)
            if isinstance(said, JobEnded):
                if known is not None and not known.take(now):
                    return f"{said.job} says too much"
                self._post(said)
                return ""
            first = said.job not in self._waiting
            self._waiting[said.job] = said
            if first and known is not None and not known.take(now):
                self._late[said.job] = None
            elif first:
                self._post(said.job)
        return ""

    def release(self) -> None:
        """Put the reports into the mailbox whose time has come."""
        if not self._late:
            return
        now = self._clock()
        with self._lock:
            ready = [
                job for job in self._late if job not in self._jobs or self._jobs[job].take(now)
            ]
            for job in ready:
                del self._late[job]
                self._post(job)

    def report_of(self, job: str) -> JobHeard:
        """Return the newest report of a job, which waits no more."""
        with self._lock:
            return self._waiting.pop(job)
