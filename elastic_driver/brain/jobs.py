"""What the Brain knows of one job: its newest report, its grants, and the slots it may occupy.

Pure. Times are unix seconds, durations seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_driver.brain.algorithm import JobView, View
from elastic_driver.brain.documents import JOB_LEASE_S, Grant, JobReport
from elastic_driver.brain.speeds import Speeds


@dataclass
class Job:
    """One run of a job.

    `grants`: from the one that the job has carried out to the newest; none: it waits for its first.
    `target`: where the newest plan wants its workers, None before the first plan. `gone_at`: when
    the processes of a silent job have ended by themselves. `unheard`: not heard by this Brain since
    it was started; `gone_at` None then means that it has only just started.
    """

    name: str
    arrived: float
    report: JobReport
    grants: list[Grant] = field(default_factory=list)
    target: dict[str, int] | None = None
    reason: str = ""
    heard_at: float = 0.0  # the newest report
    gone_at: float | None = None
    unheard: bool = False
    speeds: Speeds = field(default_factory=Speeds)
    started: float | None = None  # when it got its first slots
    changed: float | None = None  # when its size was last changed
    changes: int = 0
    floor: int = 0  # the fewest workers allowed when the newest grant was made
    gather_until: float | None = None  # it waits so long for all the slots of its target

    @property
    def is_live(self) -> bool:
        """Whether its driver is heard, so that it can be told about a change."""
        return self.gone_at is None and not self.unheard

    @property
    def granted(self) -> dict[str, int]:
        """The slots of its newest grant, by host."""
        return self.grants[-1].hosts if self.grants else {}

    @property
    def size(self) -> int:
        """The slots of its newest grant."""
        return sum(self.granted.values())

    def claims(self) -> dict[str, int]:
        """Return the most slots of each host that may have a process of this job."""
        found = {host: slots for host, slots in self.report.holding.items() if slots}
        for grant in self.grants:
            for host, slots in grant.hosts.items():
                found[host] = max(found.get(host, 0), slots)
        return found

    # ---- what happens to it --------------------------------------------------------------

    def hear(self, report: JobReport, now: float) -> list[str]:
        """Take in a report; return why a plan is needed."""
        why = []
        if _limits(report) != _limits(self.report):
            why.append("limits changed")
        if not self.is_live:
            why.append("job back")
        self.report, self.heard_at = report, now
        self.gone_at, self.unheard = None, False
        while len(self.grants) > 1 and self.grants[0].number < report.carried_out:
            del self.grants[0]
        if report.speed is not None and (event := self.speeds.take(report.speed)):
            why.append(event)
        return why

    def fall_silent(self, at: float) -> None:
        """Its lease ended at this time; its processes end by themselves some time later."""
        self.gone_at = at + self.report.lives_on
        self.gather_until = None

    def fall_silent_unseen(self, now: float) -> None:
        """Nothing is known of its lease, which may have been renewed just now."""
        self.fall_silent(now + JOB_LEASE_S)

    def grant(self, grant: Grant, now: float) -> None:
        """Note the newest grant."""
        size = sum(grant.hosts.values())
        if self.size != size:
            self.changed = now
            self.changes += bool(self.size)
        if size and self.started is None:
            self.started = now
        self.grants.append(grant)
        self.floor, self.gather_until = self.report.least, None

    # ---- for algorithms ------------------------------------------------------------------

    def view(self, now: float) -> JobView:
        """Return what an algorithm is told."""
        report, speed = self.report, self.report.speed or self.speeds.last
        return JobView(
            name=self.name,
            arrived=self.arrived,
            least=report.least,
            most=report.most,
            weight=report.weight,
            held=report.held,
            size=self.size,
            at=dict(self.granted),
            age=0.0 if self.started is None else max(0.0, now - self.started),
            unchanged_for=0.0 if self.changed is None else max(0.0, now - self.changed),
            changes=self.changes,
            change_cost=self.speeds.change_cost,
            speeds=tuple(self.speeds.at[key] for key in sorted(self.speeds.at)),
            measured=bool(self.speeds.found),
            micro_batches=None if speed is None else speed.micro_batches,
            noise=None if speed is None else speed.noise,
        )


def _limits(report: JobReport) -> tuple[object, ...]:
    return report.least, report.most, report.held, report.weight


def claimed(jobs: Mapping[str, Job] | list[Job]) -> dict[str, int]:
    """Return the slots of each host that processes of these jobs may occupy."""
    found: dict[str, int] = {}
    for job in jobs.values() if isinstance(jobs, Mapping) else jobs:
        for host, slots in job.claims().items():
            found[host] = found.get(host, 0) + slots
    return found


def grows(now: Mapping[str, int], then: Mapping[str, int]) -> bool:
    """Return whether there are more slots on any host than now."""
    return any(slots > now.get(host, 0) for host, slots in then.items())


def shape(view: View) -> tuple[object, ...]:
    """Return what a plan must not be older than: who is there, their limits, and the slots."""
    jobs = [(job.name, job.arrived, job.least, job.most, job.held) for job in view.jobs]
    return jobs, [(host.name, host.slots) for host in view.hosts]
