"""The job as the Brain of its cluster wants to know it. Runs in the driver's thread.

A slot counts as held while a process there is not known to be gone. The workers of a host that
cannot be reached are written off by the job, but they may live on there: they count until they have
ended by themselves. Times are seconds.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from elastic_driver.brain.grants import MOST_WORKERS, Grant, JobOver, JobReport, Kind
from elastic_driver.job.events import HostsGranted
from elastic_driver.job.job import Job
from elastic_driver.job.workers import OCCUPYING
from elastic_driver.runtime.brain_link import BrainLink
from elastic_driver.runtime.watch import Watch, progress_of, speed_of
from elastic_driver.words.orders import JobSpec

LOOK_S = 0.1  # between two looks at the job


@dataclass(kw_only=True)
class BrainReports:
    """Looks at the job now and then, and hands each report to the link."""

    link: BrainLink
    began: float  # unix seconds; tells this run from others of its name
    weight: float
    kind: Kind
    lives_on: float  # for so long workers live without a driver or a network
    _looked: float = float("-inf")
    _seen: dict[str, int] = field(default_factory=dict)  # slots with a process, when last looked
    _doubtful: dict[str, tuple[int, float]] = field(default_factory=dict)  # slots, until when

    def first(self, least: int, most: int | None, held: int | None = None) -> JobReport:
        """Return the report of a job without workers: it asks for slots."""
        return JobReport(
            began=self.began,
            least=least,
            most=most,
            held=held,
            weight=self.weight,
            lives_on=self.lives_on,
            kind=self.kind,
        )

    def look(self, job: Job, watch: Watch, now: float) -> None:
        """Report how the job is now, unless that was done a moment ago."""
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        self.kind = kind_seen(self.kind, job, watch)
        capacity = job.capacity
        report = JobReport(
            began=self.began,
            least=capacity.least,
            most=capacity.most,
            weight=self.weight,
            held=capacity.target,
            carried_out=job.limits.newest_grant,
            receipt=job.limits.receipt,
            holding=self._holding(job, now),
            lives_on=self.lives_on,
            memory_need=job.limits.memory_need,
            room=_bounded(job.limits.memory_room()),
            starved=dict(job.limits.fewer),
            planned=_bounded(job.limits.planned()),
            kind=self.kind,
            speed=speed_of(job, watch),
        )
        self.link.update(report)

    def event_of(self, grant: Grant) -> HostsGranted:
        """Return the event of a grant for the job's machine."""
        hosts = tuple(grant.hosts.items())
        return HostsGranted(
            grant.number, hosts, grant.reason, self.began, grant.too_small, grant.receipt
        )

    def end(self, exit_code: int | None) -> None:
        """End the link; tell the Brain that the job is over, if its processes are gone.

        None: another driver goes on with the job.
        """
        over = (
            None
            if exit_code is None or self._doubtful
            else JobOver(began=self.began, exit_code=exit_code)
        )
        self.link.end(over)

    def _holding(self, job: Job, now: float) -> dict[str, int]:
        """Return the slots with a process that is not known to be gone, by host."""
        holding = dict(Counter(worker.host for worker in job.workers.having(*OCCUPYING)))
        for host, slots in self._seen.items():
            if job.hosts.is_lost(host) and host not in self._doubtful:
                self._doubtful[host] = slots, now + self.lives_on
        self._seen = dict(holding)
        for host, (slots, until) in list(self._doubtful.items()):
            if until <= now:
                del self._doubtful[host]
            else:
                holding[host] = max(slots, holding.get(host, 0))
        return holding


def _bounded(workers: dict[str, int]) -> dict[str, int]:
    """Return the numbers of workers as a report may have them: a worker may need very little."""
    return {host: min(most, MOST_WORKERS) for host, most in workers.items()}


def kind_of(spec: JobSpec) -> Kind:
    """Return what a job trains, as far as its command says it."""
    digest = hashlib.sha256(msgspec.json.encode(spec.command)).hexdigest()
    return Kind(name=spec.run_id[:255], command=digest)


def kind_seen(kind: Kind, job: Job, watch: Watch) -> Kind:
    """Return what a job trains, with what its workers have said of the model and the batch."""
    progress = progress_of(job, watch)
    if progress is None or progress.parameters is None:
        return kind
    return replace(kind, parameters=progress.parameters, batch=progress.batch)
