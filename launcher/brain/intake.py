"""What jobs send to the Brain, bounded before the Brain's loop sees it.

All who may start jobs share one token, so bounds are by job, and for new names by peer
(`rendezvous.fairness`). Of each job one report waits for the loop, the newest. The loop takes so
many reports of a job at once and each second, and new names come so fast; who brings few of them
has a reserve. When the Brain is full, a job without slots gives way to a new one: one that nobody
speaks for, else one of the peer with the most. Times are seconds of a monotonic clock.
"""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from elastic_driver.brain.cluster import SILENT_S
from elastic_driver.brain.messages import JobDropped, JobEnded, JobHeard

REPORTS, REPORTS_S = 20.0, 10.0  # of one job at once, and each second
NAMES, NAMES_S = 50.0, 5.0  # of jobs that the Brain does not know
RESERVE, RESERVE_S = 20.0, 2.0  # more of them
OWN, OWN_S = 5.0, 0.2  # of that for one peer
MOST_JOBS = 1000  # that the Brain knows, or will soon
_PEERS = 1000  # of which it is known how much of the reserve they have had


class Bucket:
    """Lets so many things pass at once, and so many more each second."""

    def __init__(self, most: float, each_s: float, now: float) -> None:
        self._most, self._each_s = most, each_s
        self._left, self._at = most, now

    def has_any(self, now: float) -> bool:
        """Return whether one more may pass now."""
        self._left = min(self._most, self._left + (now - self._at) * self._each_s)
        self._at = now
        return self._left >= 1.0

    def take(self, now: float) -> bool:
        """Let one more pass now; return whether it may."""
        if not self.has_any(now):
            return False
        self._left -= 1.0
        return True


@dataclass
class _Known:
    """A job that the Brain knows; `holds`: it may have slots."""

    bucket: Bucket
    peer: str
    heard_at: float
    holds: bool


class _Names:
    """How fast names come that the Brain does not know."""

    def __init__(self, now: float) -> None:
        self._all, self._reserve = Bucket(NAMES, NAMES_S, now), Bucket(RESERVE, RESERVE_S, now)
        self._own: dict[str, Bucket] = {}  # of peers that have needed the reserve

    def take(self, peer: str, now: float) -> bool:
        """Return whether one more name of a peer may come now."""
        if self._all.take(now):
            return True
        if peer not in self._own:
            if len(self._own) >= _PEERS:
                del self._own[next(iter(self._own))]
            self._own[peer] = Bucket(OWN, OWN_S, now)
        own = self._own[peer]
        return own.has_any(now) and self._reserve.take(now) and own.take(now)


class Intake:
    """The reports that wait. `take` is called by the server's thread, all else by the loop.

    Args:
        post: puts a message into the loop's mailbox; a `str` stands for the report of that job.
        most: jobs that may be known at a time.
    """

    def __init__(
        self,
        post: Callable[[str | JobEnded | JobDropped], None],
        *,
        most: int = MOST_JOBS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._post, self._most, self._clock = post, most, clock
        self._lock = threading.Lock()  # guards all below
        self._waiting: dict[str, JobHeard] = {}
        self._late: dict[str, None] = {}  # jobs whose reports wait until their time has come
        self._jobs: dict[str, _Known] = {}  # the jobs that are known, the newest last
        self._names = _Names(clock())

    def know(self, job: str, *, holds: bool = True) -> None:
        """Note that the Brain knows a job; `holds`: it may have slots."""
        with self._lock:
            if job not in self._jobs:
                self._add(job, "", self._clock(), holds=holds)

    def note(self, job: str, *, holds: bool) -> None:
        """Note whether a job may have slots."""
        with self._lock:
            if (known := self._jobs.get(job)) is not None:
                known.holds = holds

    def forget(self, job: str) -> None:
        """Note that the Brain knows a job no more, unless a report of it waits."""
        with self._lock:
            if job not in self._waiting:
                self._jobs.pop(job, None)

    def knows(self, job: str) -> bool:
        """Return whether the Brain knows a job, or will soon."""
        with self._lock:
            return job in self._jobs

    def take(self, said: JobHeard | JobEnded, peer: str | None = None) -> str:
        """Take in what a job says; return why not: "", or a phrase.

        `peer`: who has connected; None: that is not known here, and a new name has to come again.
        """
        now = self._clock()
        with self._lock:
            known = self._jobs.get(said.job)
            if known is None:
                if peer is None:
                    return "the job is new"
                if not self._names.take(peer, now):
                    return "too many new jobs come at once"
                if isinstance(said, JobHeard):
                    if len(self._jobs) >= self._most and not self._make_room(peer, now):
                        return f"the Brain has {self._most} jobs already"
                    known = self._add(said.job, peer, now, holds=False)
            else:
                known.peer, known.heard_at = peer or known.peer, now
            if isinstance(said, JobEnded):
                if known is not None and not known.bucket.take(now):
                    return f"{said.job} says too much"
                self._post(said)
                return ""
            first = said.job not in self._waiting
            self._waiting[said.job] = said
            if first and known is not None and not known.bucket.take(now):
                self._late[said.job] = None
            elif first:
                self._post(said.job)
        return ""

    def _add(self, job: str, peer: str, now: float, *, holds: bool) -> _Known:
        known = self._jobs[job] = _Known(Bucket(REPORTS, REPORTS_S, now), peer, now, holds)
        return known

    def _make_room(self, peer: str, now: float) -> bool:
        """Have a job without slots give way to a new one of a peer; return whether there is one."""
        idle = {
            job: known
            for job, known in self._jobs.items()
            if not known.holds and job not in self._waiting
        }
        silent = [job for job, known in idle.items() if now - known.heard_at > SILENT_S]
        if silent:
            victim = min(silent, key=lambda job: idle[job].heard_at)
        else:
            counts = Counter(known.peer for known in self._jobs.values())
            most = max((counts[known.peer] for known in idle.values()), default=0)
            if most <= counts[peer] + 1:
                return False
            victim = [job for job, known in idle.items() if counts[known.peer] == most][-1]
        del self._jobs[victim]
        self._post(JobDropped(victim))
        return True

    def release(self) -> None:
        """Put the reports into the mailbox whose time has come."""
        if not self._late:
            return
        now = self._clock()
        with self._lock:
            ready = [
                job
                for job in self._late
                if job not in self._jobs or self._jobs[job].bucket.take(now)
            ]
            for job in ready:
                del self._late[job]
                self._post(job)

    def report_of(self, job: str) -> JobHeard:
        """Return the newest report of a job, which waits no more."""
        with self._lock:
            return self._waiting.pop(job)
