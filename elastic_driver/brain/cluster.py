"""The Brain's machine: it owns the slots of its hosts, and decides which job may use which of them.

An algorithm says how many workers each job gets and where (`plans` asks for it). The machine
carries a plan out slot by slot: a slot that a job has to give up goes to another one when the first
is known to have no process there any more (`Job.claims`). So no two jobs ever use one slot. What a
job says of itself counts up to what it was granted, so its word takes no slot from another one.

A machine that comes back from a snapshot (`Cluster.restored`) plans nothing before it has heard of
each job with slots, or the lease of that job would have ended. Pure. Times are unix seconds.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from dataclasses import replace as changed
from itertools import chain
from typing import TypeAlias, TypeVar

from msgspec.structs import replace

from elastic_driver.brain import brain_events as log
from elastic_driver.brain.algorithm import BUILT_IN, HostView, Plan, View, too_small
from elastic_driver.brain.grants import JOB_LEASE_S, Grant, JobOver, JobReport, Proved
from elastic_driver.brain.jobs import STUCK_S, Job, believed
from elastic_driver.brain.messages import (
    AskAlgorithm,
    DriverProbed,
    HostsFound,
    HostsMeasured,
    JobDropped,
    JobEnded,
    JobForgotten,
    JobHeard,
    JobSilent,
    PlanFailed,
    Planned,
    ProbeDriver,
    PublishGrant,
    Tell,
    WithdrawGrant,
)
from elastic_driver.brain.plans import MakeView, Plans, claimed, is_on_its_way, next_slots
from elastic_driver.errors import assert_never
from elastic_driver.job.events import Tick
from elastic_driver.kernel.machine import Declaration
from elastic_driver.kernel.tables import Snapshots, Tables, saved, set_defaults, table
from elastic_driver.words import counted

SILENT_S = JOB_LEASE_S  # a job without a report for so long is silent, whatever its lease says
ENDED_KEPT = 1000  # runs that are over, whose last reports may come late
REASON_LENGTH = 1000

BrainEvent: TypeAlias = (
    JobHeard
    | JobEnded
    | JobSilent
    | JobForgotten
    | JobDropped
    | DriverProbed
    | HostsFound
    | HostsMeasured
    | Planned
    | PlanFailed
    | Tick
)
BrainDecision: TypeAlias = PublishGrant | WithdrawGrant | AskAlgorithm | ProbeDriver | Tell
_Cluster = TypeVar("_Cluster", bound="Cluster")


@dataclass(init=False)
class Cluster(Snapshots):
    """All jobs, all hosts, and who has which slots.

    Args:
        algorithm: the name of the algorithm that makes the plans; "": the built-in one.
    """

    plans: Plans = saved(factory=Plans)
    jobs: dict[str, Job] = saved(factory=dict)  # in order of arrival
    # Runs that were replaced, while they may have processes.
    former: list[Job] = saved(factory=list)
    hosts: dict[str, int] = saved(factory=dict)  # slots, in the order of their source
    figures: dict[str, HostView] = saved(factory=dict)
    number: int = saved(0)  # of the newest grant
    _ended: dict[str, float] = saved(factory=dict, name="ended")  # the newest run of each ended job
    # Slots in use on hosts that have become smaller.
    _overbooked: dict[str, int] = saved(factory=dict, name="excess")
    _out: list[BrainDecision] = field(default_factory=list)

    def __init__(self, algorithm: str = "") -> None:
        set_defaults(self)
        self.use(algorithm)

    def use(self, algorithm: str) -> None:
        """Have this algorithm make the plans; "": the built-in one."""
        self.plans.algorithm = "" if algorithm == BUILT_IN else algorithm

    def tables(self) -> Tables:
        """See `Snapshots.tables`; a plan that is asked for is not part of the state."""
        return {"": {**table(self), "plans": changed(self.plans, asked=None)}}

    @classmethod
    def from_tables(cls: type[_Cluster], found: Tables) -> _Cluster:
        """See `Snapshots.from_tables`; the machine has heard of no job yet."""
        cluster = super().from_tables(found)
        for job in cluster.runs():
            job.unheard, job.silent_at, job.gone_at = True, None, None
            job.is_doubted = job.is_watched = False
        cluster.plans.need("start")
        return cluster

    def runs(self) -> Iterator[Job]:
        """Return all jobs, and the runs that were replaced and may have processes."""
        return chain(self.jobs.values(), self.former)

    # ---- a machine's methods -------------------------------------------------------------

    def handle(self, event: BrainEvent, now: float) -> list[BrainDecision]:
        """Take in one event; return the decisions to carry out, in order."""
        for job in self.runs():
            if job.unheard and job.silent_at is None:
                job.count_as_silent(now)
        self._take_in(event, now)
        self._advance(now)
        out, self._out = self._out, []
        return out

    def _take_in(self, event: BrainEvent, now: float) -> None:
        match event:
            case JobHeard():
                self._on_heard(event.job, event.report, event.proved, now)
            case JobEnded():
                self._on_ended(event.job, event.over)
            case JobSilent():
                self._on_silent(event.job, now)
            case JobForgotten():
                self._on_forgotten(event.job)
            case JobDropped():
                self._on_dropped(event.job)
            case DriverProbed():
                self._on_probed(event, now)
            case HostsFound():
                self._on_hosts(event)
            case HostsMeasured():
                self.figures = {host.name: host for host in event.hosts}
            case Planned() | PlanFailed():
                plan, jobs, decisions = self.plans.take(event, self._viewer(now), now)
                self._out += decisions
                if plan is not None:
                    self._adopt(plan, jobs)
            case Tick():
                self._miss_reports(now)
            case _:
                assert_never(event)

    def deadline(self) -> float | None:
        """See `Machine.deadline`; one that was restored gets its first `Tick` at once."""
        times = [self.plans.deadline]
        for job in self.runs():
            times += [job.gone_at, job.gather_until, job.probe_at]
            if job.is_live:
                times.append(job.heard_at + SILENT_S)
        for job in self.jobs.values():  # of runs that were replaced nothing is planned anyway
            if job.owes_since is not None and not job.is_stuck:
                times.append(job.owes_since + STUCK_S)
        return min((time for time in times if time is not None), default=None)

    def check(self) -> list[str]:
        """See `Machine.check`."""
        found = []
        for host, used in claimed(self.runs()).items():
            if used > (most := max(self.hosts.get(host, 0), self._overbooked.get(host, 0))):
                found.append(f"{host}: {counted(used, 'slot')} may be in use, of {most}")
        for job in self.runs():
            numbers = [grant.number for grant in job.grants]
            if numbers != sorted(set(numbers)) or max(numbers, default=0) > self.number:
                found.append(f"{job.name}: its grants have the numbers {numbers}")
            if job.size and job.size < job.floor:
                found.append(f"{job.name}: {counted(job.size, 'slot')}, it needs {job.floor}")
        return found

    # ---- jobs ----------------------------------------------------------------------------

    def _on_heard(self, name: str, report: JobReport, proved: Proved | None, now: float) -> None:
        job = self.jobs.get(name)
        if job is not None and report.began < job.report.began:
            for former in self.former:
                if (former.name, former.report.began) == (name, report.began):
                    former.hear(self._believed(former, report), now)
                    former.count_as_silent(now)
            return
        if job is None and report.began <= self._ended.get(name, -1.0):
            return  # it was sent before the run ended
        if job is not None and report.began > job.report.began:
            if job.claims():
                self.former.append(job)
                job.count_as_silent(now)
            self._tell(log.JobReplaced(), name)
            job = None
        if proved is not None and proved.known and proved.number <= self.number:
            proved = None  # this Brain knows what became of that grant
        if job is None:
            self._arrive(name, report, proved, now)
        else:
            self._hear(job, report, proved, now)

    def _hear(self, job: Job, report: JobReport, proved: Proved | None, now: float) -> None:
        if not job.is_live:
            self._tell(log.JobBack(), job.name)
        if job.unheard and job.grants:  # the Brain that made the grant may not have published it
            self._publish(job, job.grants[-1].reason)
        carried_out = job.report.carried_out
        if proved is not None and proved.number > job.newest:
            self._take_over(job, proved, now)
        found = self._believed(job, report, proved)
        self.plans.need(*job.hear(found, now))
        if job.grants and not found.carried_out and carried_out:
            # Its next driver has come late, and asks whether these slots are still its own.
            self._grant(job, job.granted, "it has these slots", now)

    def _believed(self, job: Job, report: JobReport, proved: Proved | None = None) -> JobReport:
        """Return what counts of a report, and say it once if the job says that it holds more."""
        granted = dict(job.claims())
        for host, slots in ({} if proved is None else proved.claims).items():
            granted[host] = max(slots, granted.get(host, 0))
        found = believed(report, granted, job.newest, self.hosts.keys())
        more = sum(report.holding.values()) - sum(found.holding.values())
        if more and not job.is_told:
            job.is_told = True
            self._tell(log.JobDisbelieved(more=more), job.name)
        return found

    def _take_over(self, job: Job, proved: Proved, now: float) -> None:
        """Count what a job proves to be granted: its grant is of a Brain whose state is lost."""
        self.number = max(self.number, proved.number)
        job.take_over(proved, now)
        self._note_overbooked_hosts()

    def _arrive(self, name: str, report: JobReport, proved: Proved | None, now: float) -> None:
        self.jobs.pop(name, None)  # of a former run: the new one comes last
        self.jobs[name] = job = Job(name, now, believed(report, {}, 0, frozenset()), heard_at=now)
        if report.liveness:
            job.probe_at = now
        if any(former.name == name for former in self.former):
            job.target, job.reason = {}, "an earlier run of it may have processes"
        if proved is not None:
            self._take_over(job, proved, now)
        job.report = self._believed(job, report, proved)
        self._note_overbooked_hosts()
        self._tell(log.JobArrived(least=report.least, most=report.most), name)
        self.plans.need("job arrived")

    def _on_ended(self, name: str, over: JobOver) -> None:
        if not any((job.name, job.report.began) == (name, over.began) for job in self.runs()):
            return  # nobody knows that run, and it takes no place from those that are known
        self._ended.pop(name, None)
        self._ended[name] = over.began
        if len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
        job = self.jobs.get(name)
        if job is not None and job.report.began == over.began:
            self._remove(job, log.JobEnded(exit_code=over.exit_code))
        else:
            self._drop_former(name, over.began)

    def _remove(self, job: Job, what: log.BrainLogEvent) -> None:
        del self.jobs[job.name]
        self._out.append(WithdrawGrant(job.name, what.text))
        self._tell(what, job.name)
        self.plans.need("slots freed")

    def _drop_former(self, name: str, began: float) -> None:
        left = [job for job in self.former if (job.name, job.report.began) != (name, began)]
        if len(left) < len(self.former):
            self.former = left
            self.plans.need("slots freed")

    # ---- jobs that are not heard ---------------------------------------------------------

    def _on_silent(self, name: str, now: float) -> None:
        job = self.jobs.get(name)
        if job is not None and job.is_live:
            job.fall_silent(now)
            self._tell(log.JobSilentWithSlots() if job.claims() else log.JobSilent(), name)

    def _on_probed(self, event: DriverProbed, now: float) -> None:
        for job in self.runs():
            run = job.name, job.report.began
            if run == (event.job, event.began) and (news := job.take_probe(event, now)) is not None:
                self._tell(news, job.name)

    def _on_forgotten(self, name: str) -> None:
        job = self.jobs.get(name)
        if job is not None and not job.is_live:
            self._remove(job, log.JobForgotten())
        for former in [former for former in self.former if former.name == name]:
            self._drop_former(name, former.report.began)

    def _on_dropped(self, name: str) -> None:
        job = self.jobs.get(name)
        if job is not None and not job.claims():
            self._remove(job, log.JobDropped())

    def _miss_reports(self, now: float) -> None:
        """Note whose reports are overdue, once those that have come were taken in."""
        for job in list(self.jobs.values()):
            if job.is_live and now >= job.heard_at + SILENT_S:
                self._on_silent(job.name, now)

    def _remove_ended_jobs(self, now: float) -> None:
        for job in list(self.jobs.values()):
            if job.gone_at is not None and now >= job.gone_at:
                self._remove(job, log.JobGone())
        for job in list(self.former):
            if job.gone_at is not None and now >= job.gone_at:
                self._drop_former(job.name, job.report.began)
        self._out += [probe for job in self.runs() if (probe := job.probe(now)) is not None]

    def _note_stuck_jobs(self, now: float) -> None:
        for job in self.jobs.values():
            if not job.is_stuck and job.owes_since is not None and now >= job.owes_since + STUCK_S:
                job.is_stuck = True
                self._tell(log.JobStuck(seconds=STUCK_S), job.name)
                self.plans.need("slots lost")

    # ---- hosts ---------------------------------------------------------------------------

    def _on_hosts(self, event: HostsFound) -> None:
        before, first = self.hosts, not self.hosts
        self.hosts = {host.name: host.slots for host in event.hosts if host.slots}
        if first and self.hosts:
            self.plans.need("start")
        elif any(self.hosts.get(host, 0) < slots for host, slots in before.items()):
            self.plans.need("host lost")
        elif self.hosts != before:
            self.plans.need("slots freed")
        self._note_overbooked_hosts()

    def _note_overbooked_hosts(self) -> None:
        """Note which hosts have more in use than slots: they got smaller, or state was lost."""
        used = claimed(self.runs())
        self._overbooked = {h: n for h, n in used.items() if n > self.hosts.get(h, 0)}

    def _update_overbooked_hosts(self) -> None:
        if not self._overbooked:
            return
        used = claimed(self.runs())
        self._overbooked = {
            host: min(most, used[host])
            for host, most in self._overbooked.items()
            if used.get(host, 0) > self.hosts.get(host, 0)
        }

    # ---- plans ---------------------------------------------------------------------------

    def _viewer(self, now: float) -> MakeView:
        return lambda triggers: self.view(triggers, now)

    def view(self, triggers: tuple[str, ...], now: float) -> View:
        """Return what an algorithm is to know: the slots of silent jobs are not there for it.

        Neither are those of a job that does not give up what it is to give up: else another one
        would wait for slots that never come, and have fewer than its share meanwhile.

        A job waits while an earlier run of it has slots: beginning anew brings it no more of them.
        """
        live = [job for job in self.jobs.values() if job.is_planned]
        taken = claimed(job for job in self.runs() if not job.is_planned)
        free = {name: slots - taken.get(name, 0) for name, slots in self.hosts.items()}
        earlier = {former.name for former in self.former}
        views = tuple(job.view(now) for job in live if job.name not in earlier)
        return View(now=now, triggers=triggers, jobs=views, hosts=self._measured(free))

    def _measured(self, slots: Mapping[str, int]) -> tuple[HostView, ...]:
        """Return the hosts with these slots, if there are any, and the figures that are known."""
        return tuple(
            replace(self.figures.get(name) or HostView(name=name, slots=n), slots=n)
            for name, n in slots.items()
            if n > 0
        )

    def _adopt(self, plan: Plan, jobs: Set[str]) -> None:
        """Have these jobs go where the plan says."""
        changed = False
        for job in self.jobs.values():
            if job.is_planned and job.name in jobs:
                target = {h: n for h, n in plan.workers.get(job.name, {}).items() if n}
                changed = changed or target != job.granted
                job.target, job.gather_until = target, None
                job.reason = (plan.reasons.get(job.name) or plan.reason)[:REASON_LENGTH]
        if changed:
            self._tell(log.PlanAdopted(why=plan.reason[:REASON_LENGTH]), "")

    # ---- consequences --------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        self._remove_ended_jobs(now)
        self._note_stuck_jobs(now)
        self._update_overbooked_hosts()
        self._carry_out(now)
        self._out += self.plans.check_times(self._viewer(now), now)
        self._plan_if_needed(now)

    def _plan_if_needed(self, now: float) -> None:
        # A restarted Brain first hears of everybody who has slots.
        if not self.hosts or any(j.is_awaited(now) and j.claims() for j in self.jobs.values()):
            return
        if any(job.is_planned for job in self.jobs.values()):
            self._out += self.plans.ask_if_needed(self._viewer(now), now)
        elif self.plans.asked is None:
            self.plans.forget_triggers()

    def _carry_out(self, now: float) -> None:
        """Give jobs what their targets say, as far as others have let go of it."""
        live = [job for job in self.jobs.values() if job.is_planned]
        used = claimed(self.runs()) if any(map(is_on_its_way, live)) else {}
        for job in live:
            before = job.claims() if is_on_its_way(job) else {}
            hosts, job.gather_until = next_slots(job, self.hosts, used, now)
            if hosts is not None:
                waits = job.target and not hosts
                reason = "other jobs have to give up its slots first" if waits else job.reason
                self._grant(job, hosts, reason, now)
                for host, slots in job.claims().items():
                    used[host] = used.get(host, 0) + slots - before.get(host, 0)

    def _grant(self, job: Job, hosts: dict[str, int], reason: str, now: float) -> None:
        self.number += 1
        lacks = bool(job.report.room)  # of memory; only then it matters what others use
        others = claimed(other for other in self.runs() if lacks and other is not job)
        grant = Grant(
            began=job.report.began,
            number=self.number,
            hosts=hosts,
            reason=reason,
            too_small=too_small(job.view(now), self._measured(self.hosts), others),
        )
        job.grant(grant, now)
        self._publish(job, reason)

    def _publish(self, job: Job, reason: str) -> None:
        self._out.append(PublishGrant(job.name, job.grants[-1], job.claims(), reason))

    def _tell(self, what: log.BrainLogEvent, job: str) -> None:
        self._out.append(Tell(what, job, what.text))


NAME = "brain"
DECLARATION = Declaration(name=NAME, events=BrainEvent, decisions=BrainDecision)
