"""Reads the journal of a run whose driver has died, so that another driver can go on with it.

The replay begins at the newest snapshot, so it is short however old the job is.
"""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from elastic_driver.job.decisions import EndJob
from elastic_driver.job.job import Job
from elastic_driver.runtime.journal.replay import JournalError, Replay, Step, refuse_damage
from elastic_driver.runtime.machines import PASSING
from elastic_driver.runtime.mailbox import collector_paused
from elastic_driver.settings import Settings


@dataclass(frozen=True, kw_only=True)
class ResumedRun:
    """A run as its journal knows it, after the last event."""

    run_id: str
    argv: tuple[str, ...]  # the command line of `elasticrun`
    cwd: str  # its folder
    term: int  # of the last driver; the next one has the next number
    url: str  # of the last driver that was reachable; "": the next one may listen anywhere
    began: float  # unix seconds of the job's beginning
    unix_offset: float  # of the last driver: unix seconds minus machine time
    n: int  # the number of the last event
    at: float  # its machine time
    machines: dict[str, Any]  # by their names; without a node check, which does not go on
    memory: bytes = b""  # of the executor, at the newest snapshot
    keys: dict[str, bytes] = field(default_factory=dict)  # of users, in the driver's store
    since: tuple[Step, ...] = ()  # the events after that snapshot, with what was decided

    @property
    def job(self) -> Job:
        """The job after the last event."""
        job: Job = self.machines["job"]
        return job

    @property
    def settings(self) -> Settings:
        """The settings that the job has had from its beginning."""
        return self.job.settings

    @property
    def end(self) -> EndJob | None:
        """The job's end, if it was decided."""
        return self.job.outcome.end

    @property
    def port(self) -> int:
        """The port at which agents and workers look for their driver; 0: any."""
        return urlsplit(self.url).port or 0


def load_run(path: Path, *, may_be_torn: bool = False, alone: bool = False) -> ResumedRun:
    """Return the run of this journal; raises `JournalError` for one that cannot go on.

    `may_be_torn`: the machine has lost power since, so the end of the journal may be missing.
    `alone`: this process has the file open nowhere else, so its log is checked faster.
    """
    with collector_paused():
        run = _load(path, may_be_torn)
    if not may_be_torn:
        refuse_damage(path, indexed=alone)
    return run


def _load(path: Path, may_be_torn: bool) -> ResumedRun:
    with contextlib.closing(Replay(path, may_be_torn=may_be_torn)) as replay:
        try:
            return _newest(replay)
        except (JournalError, MemoryError):
            raise
        except Exception as error:  # a state that it does not know may break any machine
            if not may_be_torn:
                refuse_damage(path)  # events may be missing
            problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise JournalError(replay.refusal("the journal", problem)) from error


def _newest(replay: Replay) -> ResumedRun:
    since = tuple(replay.steps(from_newest=True))
    if "job" not in replay.machines:
        raise JournalError(f"{replay.path}: the job has not begun")
    last = replay.terms[-1]
    return ResumedRun(
        run_id=replay.run_id,
        argv=replay.argv,
        cwd=replay.cwd,
        term=last.term,
        url=next((term.url for term in reversed(replay.terms) if term.url), ""),
        began=replay.unix(replay.began),
        unix_offset=last.unix_offset,
        n=max(last.n, since[-1].n if since else replay.first),
        at=max(last.at, replay.now),
        machines={name: found for name, found in replay.machines.items() if name not in PASSING},
        memory=replay.memory,
        keys=replay.keys(),
        since=since,
    )
