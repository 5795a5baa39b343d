"""What the Brain knows of one job: its newest report, its grants, its slots, and its speeds.

A driver that is not heard may be dead, stopped, or only cut off from the Brain; then its workers
train on. So its slots stay its own until it is known that it has ended: at the address where the
living driver has proved itself, its machine says that nobody listens any more, or somebody listens
who proves nothing. The first is certain. The second may also be a driver that was stopped and whose
connection was lost, so it counts as long as no proof comes. The workers end by themselves some time
after both (`JobReport.lives_on`). A job that never had a process, and whose driver was never found,
is forgotten after that time, too.

A report counts for its own job, and no further than what the Brain has granted it (`believed`).

The speed of a size counts as for `--auto-scale` (`features.sizes.gauge`): after a warm-up, with 20
steps or more, and an error of 3 %.

Pure. Times are unix seconds, durations seconds.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from statistics import fmean

from msgspec.structs import replace

from elastic_driver.brain import brain_events as log
from elastic_driver.brain.algorithm import JobView, SpeedAt
from elastic_driver.brain.grants import JOB_LEASE_S, Grant, JobReport, Proved, Speed
from elastic_driver.brain.messages import DriverProbed, ProbeDriver
from elastic_driver.features.sizes.gauge import Gauge

COSTS_KEPT = 8  # of the newest changes
GAP_S = 3.0  # between two reports, around a change whose cost is measured


@dataclass
class Speeds:
    """The speeds of one job. `found`: the step time of this round, once it is known; 0: not yet."""

    at: dict[tuple[int, int], SpeedAt] = field(default_factory=dict)  # by size and hosts
    costs: list[float] = field(default_factory=list)  # seconds lost by each change of the size
    found: float = 0.0
    gauge: Gauge = field(default_factory=Gauge)
    last: Speed | None = None
    mean: float = 0.0  # of the steps until `last`

    @property
    def change_cost(self) -> float:
        """The seconds that a change of the size costs; 0: none was measured."""
        return fmean(self.costs) if self.costs else 0.0

    def take(self, speed: Speed) -> str:
        """Take in how far the job is; return why a plan is needed ("": it is not)."""
        if speed.steps < 0:
            return ""
        if self.last is None or speed.round != self.last.round:
            self._enter(speed)
        self.gauge.take(speed.steps, speed.at)
        self.last, self.mean = speed, self.gauge.mean
        if self.found:
            return self._watch(speed)
        if not self.gauge.is_known():
            return ""
        self._note(speed)
        return "size measured"

    def _enter(self, speed: Speed) -> None:
        """Begin to measure a new round; note what the change cost."""
        last = self.last
        if last is not None and self.mean and last.worker == speed.worker:
            lost = speed.at - last.at - (speed.steps - last.steps) * self.mean
            # After a longer gap the steps between are partly those of the new size.
            if last.size != speed.size and speed.at - last.at <= max(GAP_S, 3 * self.mean):
                self.costs = [*self.costs, max(0.0, lost)][-COSTS_KEPT:]
        self.gauge, self.found = Gauge(), 0.0

    def _watch(self, speed: Speed) -> str:
        """Look whether the step time has changed since it was measured."""
        if not self.gauge.has_drifted(self.found):
            return ""
        self.at.clear()  # the other sizes are not what they were, either
        self._note(speed)
        return "slowdown"

    def _note(self, speed: Speed) -> None:
        self.found = self.gauge.mean
        self.at[speed.size, speed.hosts] = SpeedAt(
            size=speed.size, hosts=speed.hosts, step_time=self.found, error=self.gauge.error
        )


# ---- one job -------------------------------------------------------------------------------

PROBE_S = 5.0  # between two probes of a driver
STUCK_S = 60.0  # for a job to give up slots, at the end of a step
TURN_S = 600.0  # the longest that a silent job without processes keeps its turn
# What a job wants, by which the Brain plans for all. It may change its mind so often at once, and
# once more each few seconds; what comes sooner counts later.
WANTED = ("least", "most", "held", "weight", "planned", "memory_need", "room", "starved")
CHANGES, CHANGE_S = 5.0, 10.0


@dataclass
class Job:
    """One run of a job.

    `grants`: from the one that the job has carried out to the newest; none: it waits for its first.
    `target`: where the newest plan wants its workers, None before the first plan. `unheard`: not
    heard by this Brain since it was started. `silent_at`: since when it is silent; of an unheard
    job this is still to come, and None at the very start. `gone_at`: when the processes of a job
    whose driver has ended have ended, too; `is_doubted`: it counts until the driver proves itself.
    `found_at`: the address at which its driver has done so; `is_watched`: on a connection that
    stands. `has_begun`: whether it has ever carried out a grant. `is_told`: people know that it
    says it holds more than it was granted.
    """

    name: str
    arrived: float
    report: JobReport
    grants: list[Grant] = field(default_factory=list)
    target: dict[str, int] | None = None
    reason: str = ""
    heard_at: float = 0.0  # the newest report
    unheard: bool = False
    silent_at: float | None = None
    gone_at: float | None = None
    is_doubted: bool = False
    found_at: str = ""
    is_watched: bool = False
    has_begun: bool = False
    is_told: bool = False
    owes_since: float | None = None  # it is to give up slots that it has
    is_stuck: bool = False  # it has not done so for too long: no plan counts on it
    minds: float = CHANGES  # how often it may change its mind now
    minded_at: float = 0.0  # when that was counted last
    probe_at: float | None = None  # the next look whether its driver lives
    speeds: Speeds = field(default_factory=Speeds)
    started: float | None = None  # when it got its first slots
    changed: float | None = None  # when its size was last changed
    changes: int = 0
    floor: int = 0  # the fewest workers allowed when the newest grant was made
    gather_until: float | None = None  # it waits so long for all the slots of its target

    @property
    def is_live(self) -> bool:
        """Whether its driver is heard, so that it can be told about a change."""
        return self.silent_at is None and not self.unheard

    def is_awaited(self, now: float) -> bool:
        """Return whether its driver has not had the time to find a Brain that was restarted."""
        return self.unheard and (self.silent_at is None or now < self.silent_at)

    @property
    def is_planned(self) -> bool:
        """Whether plans count on it: it is heard, and does what they say."""
        return self.is_live and not self.is_stuck

    @property
    def granted(self) -> dict[str, int]:
        """The slots of its newest grant, by host."""
        return self.grants[-1].hosts if self.grants else {}

    @property
    def newest(self) -> int:
        """The number of its newest grant; 0: there is none."""
        return self.grants[-1].number if self.grants else 0

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
        report, why = self._in_time(report, now), []
        released = self.report.starved and not report.starved  # by a user
        if released or _limits(report) != _limits(self.report):
            why.append("limits changed")
        if self._lacks_memory(report):
            why.append("out of memory")
        if report.starved and report.starved != self.report.starved:
            why.append("CPU starved")
        if not self.is_live:
            why.append("job back")
        was_live = self.is_live
        self.report, self.heard_at = report, now
        self.has_begun = self.has_begun or report.carried_out > 0
        self.silent_at = self.gone_at = None
        self.unheard = self.is_doubted = False
        if not report.liveness or (self.is_watched and report.liveness == self.found_at):
            self.probe_at = None
        elif self.probe_at is None or not was_live:
            self.probe_at = now
        while len(self.grants) > 1 and self.grants[0].number < report.carried_out:
            del self.grants[0]
        was_stuck = self.is_stuck
        if not self._owes(now) and was_stuck:
            why.append("job back")
        if report.speed is not None and (event := self.speeds.take(report.speed)):
            why.append(event)
        return why

    def _in_time(self, report: JobReport, now: float) -> JobReport:
        """Return a report with what the job wants now, or wanted before if it changes too often."""
        before = {name: getattr(self.report, name) for name in WANTED}
        if all(getattr(report, name) == wanted for name, wanted in before.items()):
            return report
        since = max(0.0, now - self.minded_at)
        self.minds, self.minded_at = min(CHANGES, self.minds + since / CHANGE_S), now
        if self.minds < 1.0:
            return replace(report, **before)
        self.minds -= 1.0
        return report

    def _lacks_memory(self, report: JobReport) -> bool:
        """Return whether a report says that a worker has run out of memory, or finds too little."""
        before, now, granted = self.report, report, self.granted
        if (now.memory_need, now.room) == (before.memory_need, before.room):
            return False
        unusable = any(room < granted.get(host, 0) for host, room in now.room.items())
        return unusable or now.memory_need > before.memory_need

    def _owes(self, now: float) -> bool:
        """Note and return whether the job has slots that are no longer granted."""
        owes = any(slots > self.granted.get(host, 0) for host, slots in self.claims().items())
        if not owes:
            self.owes_since, self.is_stuck = None, False
        elif self.owes_since is None:
            self.owes_since = now
        return owes

    def fall_silent(self, at: float) -> None:
        """Its lease ends at this time."""
        self.silent_at = self.probe_at = at
        self.gather_until = None
        never_was = not (self.unheard or self.has_begun or self.found_at)
        if not self.claims() or never_was:
            self.gone_at = at + min(TURN_S, self.report.lives_on)  # for so long it keeps its turn

    def count_as_silent(self, now: float) -> None:
        """Nothing is known of its lease, which may have been renewed just now."""
        self.fall_silent(now + JOB_LEASE_S)

    def probe(self, now: float) -> ProbeDriver | None:
        """Return the look that is due now, if there is one."""
        if self.probe_at is None or now < self.probe_at:
            return None
        if not self.report.liveness or (self.gone_at is not None and not self.is_doubted):
            self.probe_at = None
            return None
        self.probe_at = now + PROBE_S
        reason = "is its driver found there?" if self.is_live else "its driver is silent"
        return ProbeDriver(self.name, self.report.began, self.report.liveness, reason)

    def take_probe(self, event: DriverProbed, now: float) -> log.BrainLogEvent | None:
        """Take in the result of a look; return what people should know, if it is news."""
        if event.liveness != self.report.liveness:
            return None
        if event.result == "lost":
            self.is_watched, self.probe_at = False, now
        elif event.result == "answered":
            return self._note_proof(event.liveness)
        elif event.result != "silent" and event.liveness == self.found_at and not self.is_live:
            return self._note_loss(event.result == "refused", now)
        return None

    def _note_proof(self, place: str) -> log.BrainLogEvent | None:
        """Note that its driver has proved itself; that is news if it was doubted."""
        self.found_at, self.is_watched, self.probe_at = place, True, None
        if not self.is_doubted:
            return None
        self.gone_at, self.is_doubted = None, False
        return log.JobFound()

    def _note_loss(self, certain: bool, now: float) -> log.BrainLogEvent | None:
        """Note that its driver has ended, for certain or not; return it if it is news."""
        if self.gone_at is not None:
            if certain:
                self.is_doubted, self.probe_at = False, None
            return None
        self.gone_at, self.is_doubted = now + self.report.lives_on, not certain
        if certain:
            self.probe_at = None
            return log.JobLost(seconds=self.report.lives_on)
        return log.JobDoubted(place=self.found_at, seconds=self.report.lives_on)

    def grant(self, grant: Grant, now: float) -> None:
        """Note the newest grant."""
        size = sum(grant.hosts.values())
        if self.size != size:
            self.changed = now
            self.changes += bool(self.size)
        if size and self.started is None:
            self.started = now
        if not self.grants or grant.hosts != self.granted:
            self.floor = self.report.least
        self.grants.append(grant)
        self.gather_until = None
        self._owes(now)

    def take_over(self, proved: Proved, now: float) -> None:
        """Note a grant of a Brain whose state is lost."""
        began, number = self.report.began, proved.number
        hosts = {host: slots for host, slots in proved.hosts.items() if slots}
        reason = "it had these slots already"
        self.grant(Grant(began=began, number=number, hosts=hosts, reason=reason), now)
        self.has_begun = True

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
            memory=report.memory_need or None,
            room=dict(report.room),
            planned=dict(report.planned),
            starved=dict(report.starved),
        )


def believed(
    report: JobReport, granted: Mapping[str, int], newest: int, hosts: Set[str]
) -> JobReport:
    """Return what counts of a report.

    `granted`: the most slots of each host that the job may have by its grants, of which `newest` is
    the newest. `hosts`: those of the Brain; what is said of others is left out.
    """
    known = hosts | granted.keys()
    return replace(
        report,
        carried_out=min(report.carried_out, newest),
        receipt="",
        holding={
            host: min(slots, granted[host])
            for host, slots in report.holding.items()
            if slots and granted.get(host)
        },
        room={host: most for host, most in report.room.items() if host in known},
        starved={host: most for host, most in report.starved.items() if host in known},
        planned={host: most for host, most in report.planned.items() if host in known},
    )


def _limits(report: JobReport) -> tuple[object, ...]:
    """Return what a user can change."""
    return report.least, report.most, report.held, report.weight, report.planned
