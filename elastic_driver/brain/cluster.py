"""The Brain's machine: it owns the slots of its hosts, and decides which job may use which of them.

An algorithm says how many workers each job gets and where; the machine asks for a plan when
something has changed, and refuses one that is out of bounds or was made for a state that is over.
It carries a plan out slot by slot: a slot that a job has to give up goes to another one when the
first is known to have no process there any more (`Job.claims`). So no two jobs ever use one slot.

A machine that comes back from a snapshot (`Cluster.restored`) plans nothing before each job with
slots was heard, or has certainly ended. Pure. Times are unix seconds.
"""

from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from msgspec.structs import replace

from elastic_driver.brain.algorithm import BUILT_IN, HostView, Plan, View, faults
from elastic_driver.brain.documents import Grant, JobOver, JobReport
from elastic_driver.brain.jobs import Job, claimed, grows, shape
from elastic_driver.brain.messages import (
    AskAlgorithm,
    HostsFound,
    HostsMeasured,
    JobEnded,
    JobHeard,
    JobSilent,
    PlanFailed,
    Planned,
    PublishGrant,
    Tell,
)
from elastic_driver.core.driver_events import Tick
from elastic_driver.core.snapshots import Restorable
from elastic_driver.errors import assert_never

GATHER_S = 1.0  # slots that become free one after the other within this time are given together
ANSWER_S = 30.0  # an algorithm that has not answered by then is taken to have failed
SILENT_S = 60.0  # a job without a report for so long is silent, whatever its lease says
ENDED_KEPT = 1000  # runs that are over, whose last reports may come late
RETRY_S = 10.0  # after which a plan is asked for again, if the built-in algorithm has failed
REPLAN_S = 60.0  # a change that did not repay itself may do so later
REASON_LENGTH = 1000

BrainEvent: TypeAlias = (
    JobHeard | JobEnded | JobSilent | HostsFound | HostsMeasured | Planned | PlanFailed | Tick
)
BrainDecision: TypeAlias = PublishGrant | AskAlgorithm | Tell
_Cluster = TypeVar("_Cluster", bound="Cluster")


@dataclass
class Asked:
    """A plan that was asked for. `algorithm` "": the built-in one."""

    request: int
    algorithm: str
    view: View
    until: float


class Cluster(Restorable):
    """All jobs, all hosts, and who has which slots.

    Args:
        algorithm: the name of the algorithm that makes the plans; "": the built-in one.
    """

    def __init__(self, algorithm: str = "") -> None:
        self.algorithm = "" if algorithm == BUILT_IN else algorithm
        self.jobs: dict[str, Job] = {}  # in order of arrival
        self.former: list[Job] = []  # runs that were replaced, while they may have processes
        self.hosts: dict[str, int] = {}  # slots, in the order of their source
        self.figures: dict[str, HostView] = {}
        self.number = 0  # of the newest grant
        self._ended: dict[str, float] = {}  # the newest run of each job that is over
        self._excess: dict[str, int] = {}  # slots in use on hosts that have become smaller
        self._triggers: list[str] = []  # why a plan is needed
        self._plan_at: float | None = None  # when one is asked for in any case
        self._asked: Asked | None = None
        self._request = 0
        self._out: list[BrainDecision] = []

    @classmethod
    def restored(cls: type[_Cluster], snapshot: bytes) -> _Cluster:
        """Return the machine of a snapshot; it has heard of no job yet."""
        cluster = super().restored(snapshot)
        for job in (*cluster.jobs.values(), *cluster.former):
            job.unheard, job.gone_at = True, None
        cluster._asked = None
        cluster._because("start")
        return cluster

    # ---- a machine's methods -------------------------------------------------------------

    def handle(self, event: BrainEvent, now: float) -> list[BrainDecision]:
        """Take in one event; return the decisions to carry out, in order."""
        for job in (*self.jobs.values(), *self.former):
            if job.unheard and job.gone_at is None:
                job.fall_silent_unseen(now)
        match event:
            case JobHeard():
                self._on_heard(event.job, event.report, now)
            case JobEnded():
                self._on_ended(event.job, event.over)
            case JobSilent():
                self._on_silent(event.job, now)
            case HostsFound():
                self._on_hosts(event)
            case HostsMeasured():
                self.figures = {host.name: host for host in event.hosts}
            case Planned():
                self._on_plan(event, now)
            case PlanFailed():
                if self._asked is not None and event.request == self._asked.request:
                    self._refuse(self._asked, event.reason, now)
            case Tick():
                pass
            case _:
                assert_never(event)
        self._advance(now)
        out, self._out = self._out, []
        return out

    def deadline(self) -> float | None:
        """See `Machine.deadline`."""
        every = (*self.jobs.values(), *self.former)
        if any(job.unheard and job.gone_at is None for job in every):
            return 0.0
        times = [time for job in every for time in (job.gone_at, job.gather_until)]
        times += [job.heard_at + SILENT_S for job in self.jobs.values() if job.is_live]
        times += [self._asked.until if self._asked else self._plan_at]
        return min((time for time in times if time is not None), default=None)

    def check(self) -> list[str]:
        """See `Machine.check`."""
        found = []
        for host, used in self._in_use().items():
            if used > (most := max(self.hosts.get(host, 0), self._excess.get(host, 0))):
                found.append(f"{host}: {used} slots may be in use, of {most}")
        for job in (*self.jobs.values(), *self.former):
            numbers = [grant.number for grant in job.grants]
            if numbers != sorted(set(numbers)) or max(numbers, default=0) > self.number:
                found.append(f"{job.name}: its grants have the numbers {numbers}")
            if job.size and job.size < job.floor:
                found.append(f"{job.name}: {job.size} slots, it needs {job.floor}")
        return found

    # ---- jobs ----------------------------------------------------------------------------

    def _on_heard(self, name: str, report: JobReport, now: float) -> None:
        job = self.jobs.get(name)
        if job is not None and report.began < job.report.began:
            for former in self.former:
                if (former.name, former.report.began) == (name, report.began):
                    former.hear(report, now)
                    former.fall_silent_unseen(now)
            return
        if job is None and report.began <= self._ended.get(name, -1.0):
            return  # it was sent before the run ended
        if job is not None and report.began > job.report.began:
            if job.claims():
                self.former.append(job)
                job.fall_silent_unseen(now)
            self._tell("job_replaced", name, "another run of it has begun")
            job = None
        if job is None:
            self._arrive(name, report, now)
        else:
            self._hear(job, report, now)

    def _hear(self, job: Job, report: JobReport, now: float) -> None:
        if not job.is_live:
            self._tell("job_back", job.name, "its driver is heard again")
        if job.unheard and job.grants:  # the Brain that made the grant may not have published it
            self._out.append(PublishGrant(job.name, job.grants[-1], job.grants[-1].reason))
        before = job.claims()
        self._because(*job.hear(report, now))
        if report.carried_out > (job.grants[-1].number if job.grants else 0):
            self._take_over(job, now)
        if job.claims() != before:
            self._excuse_what_is()

    def _take_over(self, job: Job, now: float) -> None:
        """Count what a job holds as granted: its grant is of a Brain whose state is lost."""
        number, began = job.report.carried_out, job.report.began
        self.number = max(self.number, number)
        hosts = {host: slots for host, slots in job.report.holding.items() if slots}
        reason = "it had these slots already"
        job.grant(Grant(began=began, number=number, hosts=hosts, reason=reason), now)

    def _arrive(self, name: str, report: JobReport, now: float) -> None:
        self.jobs.pop(name, None)  # of a former run: the new one comes last
        self.jobs[name] = job = Job(name, now, report, heard_at=now)
        if report.carried_out:
            self._take_over(job, now)
        self._excuse_what_is()
        self._tell("job_arrived", name, f"wants {report.least} to {report.most or 'all'} workers")
        self._because("job arrived")

    def _on_ended(self, name: str, over: JobOver) -> None:
        self._ended.pop(name, None)
        self._ended[name] = over.began
        if len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
        job = self.jobs.get(name)
        if job is not None and job.report.began == over.began:
            del self.jobs[name]
            self._tell("job_ended", name, f"over, with exit status {over.exit_code}")
            self._because("slots freed")
        else:
            self._drop_former(name, over.began)

    def _drop_former(self, name: str, began: float) -> None:
        left = [job for job in self.former if (job.name, job.report.began) != (name, began)]
        if len(left) < len(self.former):
            self.former = left
            self._because("slots freed")

    def _on_silent(self, name: str, now: float) -> None:
        job = self.jobs.get(name)
        if job is not None and job.is_live:
            job.fall_silent(now)
            line = f"its driver is silent; its slots stay its own for {job.report.lives_on:g} s"
            self._tell("job_silent", name, line)

    # ---- hosts ---------------------------------------------------------------------------

    def _on_hosts(self, event: HostsFound) -> None:
        before, first = self.hosts, not self.hosts
        self.hosts = {host.name: host.slots for host in event.hosts if host.slots}
        if first and self.hosts:
            self._because("start")
        elif any(self.hosts.get(host, 0) < slots for host, slots in before.items()):
            self._because("host lost")
        elif self.hosts != before:
            self._because("slots freed")
        self._excuse_what_is()

    def _in_use(self) -> dict[str, int]:
        return claimed([*self.jobs.values(), *self.former])

    def _excuse_what_is(self) -> None:
        """Note which hosts have more in use than slots: they got smaller, or state was lost."""
        used = self._in_use()
        self._excess = {h: n for h, n in used.items() if n > self.hosts.get(h, 0)}

    # ---- plans ---------------------------------------------------------------------------

    def _because(self, *triggers: str) -> None:
        self._triggers += [each for each in triggers if each not in self._triggers]

    def _view(self, now: float) -> View:
        """Return what an algorithm is to know: the slots of silent jobs are not there for it."""
        live = [job for job in self.jobs.values() if job.is_live]
        silent = [job for job in self.jobs.values() if not job.is_live]
        taken = claimed([*silent, *self.former])
        hosts = []
        for name, slots in self.hosts.items():
            figures = self.figures.get(name) or HostView(name=name, slots=slots)
            if (left := slots - taken.get(name, 0)) > 0:
                hosts.append(replace(figures, slots=left))
        return View(
            now=now,
            event=", ".join(self._triggers),
            jobs=tuple(job.view(now) for job in live),
            hosts=tuple(hosts),
        )

    def _ask(self, algorithm: str, now: float) -> None:
        view = self._view(now)
        self._request += 1
        self._asked = Asked(self._request, algorithm, view, now + ANSWER_S)
        self._triggers, self._plan_at = [], None
        reason = view.event or "the plan before it was refused"
        self._out.append(AskAlgorithm(self._request, algorithm, view, reason))

    def _on_plan(self, event: Planned, now: float) -> None:
        asked = self._asked
        if asked is None or event.request != asked.request:
            return
        if shape(self._view(now)) != shape(asked.view):
            self._because(*asked.view.event.split(", "))
            self._ask(asked.algorithm, now)
        elif wrong := faults(asked.view, event.plan):
            self._refuse(asked, f"its plan is out of bounds: {wrong[0]}", now)
        else:
            self._adopt(event.plan, now)

    def _refuse(self, asked: Asked, why: str, now: float) -> None:
        """Say by name whose plan is not carried out, and ask the built-in algorithm."""
        name = asked.algorithm or BUILT_IN
        self._asked = None
        if asked.algorithm:
            self._because(*asked.view.event.split(", "))
            line = f"algorithm {name}: {why}; the built-in one is asked instead"
            self._ask("", now)
        else:
            line = f"algorithm {name}: {why}; it is asked again in {RETRY_S:g} s"
            self._plan_at = now + RETRY_S
        self._tell("plan_refused", "", line)

    def _adopt(self, plan: Plan, now: float) -> None:
        self._asked, self._plan_at = None, now + REPLAN_S
        changed = False
        for job in self.jobs.values():
            if job.is_live:
                target = {h: n for h, n in plan.workers.get(job.name, {}).items() if n}
                changed = changed or target != job.granted
                job.target, job.gather_until = target, None
                job.reason = (plan.reasons.get(job.name) or plan.reason)[:REASON_LENGTH]
        if changed:
            self._tell("brain_plan", "", plan.reason[:REASON_LENGTH])

    # ---- consequences --------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        for job in list(self.jobs.values()):
            if now >= job.heard_at + SILENT_S:
                self._on_silent(job.name, now)
        self._forget_the_gone(now)
        if self._excess:
            used = self._in_use()
            self._excess = {
                host: min(most, used[host])
                for host, most in self._excess.items()
                if used.get(host, 0) > self.hosts.get(host, 0)
            }
        for job in self.jobs.values():
            if job.is_live and job.target is not None:
                self._carry_out(job, job.target, now)
        if self._asked is not None and now >= self._asked.until:
            self._refuse(self._asked, f"no answer within {ANSWER_S:g} s", now)
        self._plan_if_needed(now)

    def _forget_the_gone(self, now: float) -> None:
        for job in list(self.jobs.values()):
            if job.gone_at is not None and now >= job.gone_at:
                del self.jobs[job.name]
                self._tell("job_gone", job.name, "its driver stayed silent; its slots are free")
                self._because("slots freed")
        for job in list(self.former):
            if job.gone_at is not None and now >= job.gone_at:
                self._drop_former(job.name, job.report.began)

    def _plan_if_needed(self, now: float) -> None:
        if self._plan_at is not None and now >= self._plan_at:
            self._plan_at = None
            self._because("time passed")
        if self._asked is not None or not self.hosts:
            return
        # A restarted Brain first hears of everybody who has slots.
        if any(job.unheard and job.claims() for job in self.jobs.values()):
            return
        if not any(job.is_live for job in self.jobs.values()):
            self._triggers, self._plan_at = [], None
        elif self._triggers:
            self._ask(self.algorithm, now)

    def _carry_out(self, job: Job, target: dict[str, int], now: float) -> None:
        """Give a job what its target says, as far as others have let go of it."""
        if job.grants and target == job.granted:
            job.gather_until = None
            return
        hosts = self._possible(job, target, now)
        if job.grants and hosts == job.granted:
            return
        self.number += 1
        began = job.report.began
        grant = Grant(began=began, number=self.number, hosts=hosts, reason=job.reason)
        job.grant(grant, now)
        self._out.append(PublishGrant(job.name, grant, job.reason))

    def _possible(self, job: Job, target: dict[str, int], now: float) -> dict[str, int]:
        """Return the slots that a job may have now; those it uses already come first.

        It goes on as it is while it could only have too few, or while a new plan is on its way
        because a host is lost.
        """
        granted, least = job.granted, job.report.least
        if any(self.hosts.get(host, 0) < slots for host, slots in target.items()):
            job.gather_until = None
            return granted
        used, own = self._in_use(), job.claims()
        free = {host: self.hosts[host] - used.get(host, 0) + own.get(host, 0) for host in target}
        order = [*(h for h in granted if h in target), *(h for h in target if h not in granted)]
        possible = {host: n for host in order if (n := min(target[host], free[host])) > 0}
        enough = not target or sum(possible.values()) >= least
        if possible != target and enough and grows(granted, possible):
            if job.gather_until is None:
                job.gather_until = now + GATHER_S
            if now < job.gather_until:
                possible = {h: k for h, n in possible.items() if (k := min(n, granted.get(h, 0)))}
                enough = sum(possible.values()) >= least
        else:
            job.gather_until = None
        return possible if enough else granted

    def _tell(self, event: str, job: str, line: str) -> None:
        self._out.append(Tell(event, job, line, line))
