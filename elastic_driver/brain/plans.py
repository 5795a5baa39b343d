"""When the Brain asks for a plan, what becomes of the answer, and how slots pass between jobs.

A plan is asked for when something has happened that may change it. It is refused if it was made for
a state that is over, or is out of bounds; if the algorithm that a user chose fails, the built-in
one answers. After a few plans that came too late, what still fits of one is taken: so no job keeps
others from their slots by changing its mind. One plan is asked for at a time.

A plan is carried out slot by slot: a job gets those slots of its target that no process of another
job may occupy any more (`next_slots`).

Pure. Times are unix seconds.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from elastic_driver.brain import brain_events as log
from elastic_driver.brain.algorithm import BUILT_IN, JobView, Plan, View, faults
from elastic_driver.brain.jobs import Job
from elastic_driver.brain.messages import AskAlgorithm, PlanFailed, Planned, Tell

ANSWER_S = 30.0  # an algorithm that has not answered by then is taken to have failed
RETRY_S = 10.0  # after which a plan is asked for again, if the built-in algorithm has failed
PATIENCE = 3  # plans in a row that may come too late
REPLAN_S = 60.0  # a change that did not repay itself may do so later

MakeView = Callable[[tuple[str, ...]], View]  # of what there is now; takes the triggers


@dataclass
class Asked:
    """A plan that was asked for. `algorithm` "": the built-in one."""

    request: int
    algorithm: str
    view: View
    until: float


@dataclass
class Plans:
    """The plan that is asked for, and why the next one will be. `algorithm` "": the built-in one.

    `due`: when a plan is asked for, whatever happens.
    """

    algorithm: str = ""
    triggers: list[str] = field(default_factory=list)
    due: float | None = None
    asked: Asked | None = None
    request: int = 0
    late: int = 0  # plans in a row that were made for a state that is over

    @property
    def deadline(self) -> float | None:
        """When to look again if nothing happens."""
        return self.due if self.asked is None else self.asked.until

    def need(self, *triggers: str) -> None:
        """Note that a plan is needed, and why."""
        self.triggers += [each for each in triggers if each not in self.triggers]

    def forget_triggers(self) -> None:
        """Forget why a plan was needed: there is no job to plan for."""
        self.triggers = []
        self.due = None

    def ask_if_needed(self, view: MakeView, now: float) -> list[AskAlgorithm]:
        """Ask for a plan if there is a reason, and none is on its way."""
        if self.asked is not None or not self.triggers:
            return []
        return [self._ask(self.algorithm, view, now)]

    def check_times(self, view: MakeView, now: float) -> list[AskAlgorithm | Tell]:
        """Note that it is time for a plan, or that an algorithm has not answered in time."""
        if self.due is not None and now >= self.due:
            self.due = None
            self.need("time passed")
        if self.asked is not None and now >= self.asked.until:
            return self._refuse(self.asked, f"no answer within {ANSWER_S:g} s", view, now)
        return []

    def take(
        self, event: Planned | PlanFailed, view: MakeView, now: float
    ) -> tuple[Plan | None, Set[str], list[AskAlgorithm | Tell]]:
        """Return the plan to carry out and the jobs that it is for; or None, and ask again."""
        asked, nobody = self.asked, frozenset[str]()
        if asked is None or event.request != asked.request:
            return None, nobody, []
        if isinstance(event, PlanFailed):
            return None, nobody, self._refuse(asked, event.reason, view, now)
        seen, plan = view(()), event.plan
        is_late, same = shape(seen) != shape(asked.view), same_jobs(seen, asked.view)
        self.late = self.late + 1 if is_late else 0
        if is_late and self.late <= PATIENCE:
            self.need(*asked.view.triggers)
            return None, nobody, [self._ask(asked.algorithm, view, now)]
        wrong = faults(asked.view, plan)
        if is_late and not wrong:
            kept = {job: workers for job, workers in plan.workers.items() if job in same}
            plan = replace(plan, workers=kept)
            wrong = faults(seen, plan)
            self.need(*asked.view.triggers)
        if wrong:
            why = f"its plan is out of bounds: {wrong[0]}"
            return None, nobody, self._refuse(asked, why, view, now)
        self.asked, self.due, self.late = None, now + REPLAN_S, 0
        return plan, same, []

    def _ask(self, algorithm: str, view: MakeView, now: float) -> AskAlgorithm:
        shown = view(tuple(self.triggers))
        self.request += 1
        self.asked = Asked(self.request, algorithm, shown, now + ANSWER_S)
        self.triggers, self.due = [], None
        reason = shown.event or "the plan before it was refused"
        return AskAlgorithm(self.request, algorithm, shown, reason)

    def _refuse(
        self, asked: Asked, why: str, view: MakeView, now: float
    ) -> list[AskAlgorithm | Tell]:
        """Say by name whose plan is not carried out, and ask the built-in algorithm."""
        name, self.asked = asked.algorithm or BUILT_IN, None
        if not asked.algorithm:
            self.due = now + RETRY_S
            refused = log.BuiltInPlanRefused(algorithm=name, why=why, seconds=RETRY_S)
            return [Tell(refused, "", refused.text)]
        self.need(*asked.view.triggers)
        chosen = log.PlanRefused(algorithm=name, why=why)
        return [self._ask("", view, now), Tell(chosen, "", chosen.text)]


def same_jobs(now: View, then: View) -> Set[str]:
    """Return the jobs that are the same in both views, with the same limits."""
    before = {job.name: limits(job) for job in then.jobs}
    return frozenset(job.name for job in now.jobs if before.get(job.name) == limits(job))


def limits(job: JobView) -> tuple[object, ...]:
    """Return which job this is, and what its size may be."""
    return job.name, job.arrived, job.least, job.most, job.held


def shape(view: View) -> tuple[object, ...]:
    """Return what a plan must not be older than: who is there, their limits, and the slots."""
    return [limits(job) for job in view.jobs], [(host.name, host.slots) for host in view.hosts]


# ---- from plan to grants -------------------------------------------------------------------

GATHER_S = 1.0  # slots that become free one after the other within this time are given together


def claimed(jobs: Iterable[Job]) -> dict[str, int]:
    """Return the slots of each host that processes of these jobs may occupy."""
    found: dict[str, int] = {}
    for job in jobs:
        for host, slots in job.claims().items():
            found[host] = found.get(host, 0) + slots
    return found


def is_on_its_way(job: Job) -> bool:
    """Return whether a plan wants other slots for a job than it has been granted."""
    return job.target is not None and not (job.grants and job.target == job.granted)


class NextSlots(NamedTuple):
    """The slots to grant a job now; None: it goes on as it is.

    `gather_until`: the time until which it waits for all slots of its target; None: it does not.
    """

    slots: dict[str, int] | None
    gather_until: float | None = None


def next_slots(
    job: Job, hosts: Mapping[str, int], used: Mapping[str, int], now: float
) -> NextSlots:
    """Return the slots to grant a job now, on its way to its target.

    `hosts`: the slots of each host. `used`: those that processes of all jobs may occupy.
    """
    target = job.target
    if target is None or not is_on_its_way(job):
        return NextSlots(None)
    if any(hosts.get(host, 0) < slots for host, slots in target.items()):
        found = NextSlots(job.granted)  # a host is lost, so another plan is on its way
    else:
        found = _possible(job, target, hosts, used, now)
    return found._replace(slots=None) if job.grants and found.slots == job.granted else found


def _possible(
    job: Job,
    target: Mapping[str, int],
    hosts: Mapping[str, int],
    used: Mapping[str, int],
    now: float,
) -> NextSlots:
    """Return the slots that a job may have now; those that it uses already come first.

    They are what it has while it could only have too few.
    """
    granted, own, least = job.granted, job.claims(), job.report.least
    until: float | None = None
    free = {host: hosts[host] - used.get(host, 0) + own.get(host, 0) for host in target}
    order = [*(h for h in granted if h in target), *(h for h in target if h not in granted)]
    possible = {host: n for host in order if (n := min(target[host], free[host])) > 0}
    if job.owes_since is not None:  # first it gives up what it owes, or it would gather slots
        possible = {h: k for h, n in possible.items() if (k := min(n, granted.get(h, 0)))}
    enough = not target or sum(possible.values()) >= least
    if possible != target and enough and _grows(granted, possible):
        until = now + GATHER_S if job.gather_until is None else job.gather_until
        if now < until:
            possible = {h: k for h, n in possible.items() if (k := min(n, granted.get(h, 0)))}
            enough = sum(possible.values()) >= least
    return NextSlots(possible if enough else granted, until)


def _grows(now: Mapping[str, int], then: Mapping[str, int]) -> bool:
    """Return whether there are more slots on any host than now."""
    return any(slots > now.get(host, 0) for host, slots in then.items())
