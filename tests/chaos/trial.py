"""A trial: the faults of a plan, one after the other, and what the job made of them."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tests.chaos.faults import HARMLESS, Arena, Fault
from tests.chaos.plan import Plan
from tests.chaos.watch import Growth, longest_gap, percentile
from tests.support.job import RunningJob, StepRecord, assert_no_step_lost_or_repeated

START_S = 300.0  # for the first world; on a busy machine imports alone may take their 60 s twice
WHOLE_S = 90.0  # for all workers to train together again
SETTLE_S = 10.0  # for what rogue clients have opened to be closed


@dataclass
class Trial:
    """A plan that is being run against a job on this machine."""

    plan: Plan
    arena: Arena
    faults: Mapping[str, Fault]
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    gaps: dict[str, list[float]] = field(default_factory=dict)
    growth: Growth = field(default_factory=Growth)

    @property
    def job(self) -> RunningJob:
        """The job in the middle of it."""
        return self.arena.job

    def run(self) -> None:
        """Take turns until the time is over; all workers train together before each fault."""
        self.until_whole(0.0, START_S)
        self.see_growth()
        end = time.monotonic() + self.plan.seconds
        while time.monotonic() < end:
            turn = [name for name, times in self.plan.faults.items() for _ in range(times)]
            self.arena.random.shuffle(turn)
            for name in turn:
                if time.monotonic() < end:
                    self.suffer(name)

    def suffer(self, name: str) -> None:
        """One fault, and the way back."""
        time.sleep(self.arena.random.uniform(*self.plan.peace))
        before, drivers = self.newest_round(), len(self.job.events("driver_resumed"))
        began = time.time()
        self.faults[name](self.arena)
        ended = time.time()
        if name == "kill_driver":
            resumed = self.job.until_without_driver
            resumed(lambda: len(self.job.events("driver_resumed")) > drivers, "the next driver")
        self.recoveries.setdefault(name, []).append(self.until_whole(ended) - ended)
        told = f"{name:<14} whole after {self.recoveries[name][-1]:5.2f} s"
        if name in HARMLESS:
            gap = longest_gap(self.job.steps(), began, ended)
            self.gaps.setdefault(name, []).append(gap)
            told += f", longest gap {gap:.3f} s"
            if self.newest_round() != before:
                self.arena.broken.append(f"{name}: somebody was lost, round {self.newest_round()}")
        self.see_growth()
        print(told, flush=True)

    def until_whole(self, since: float, within: float = WHOLE_S) -> float:
        """Wait until all workers have finished a step together after this time; return when."""

        def look() -> float | None:
            newest = self.newest_round()
            first: dict[str, StepRecord] = {}
            for r in self.job.steps():
                if r.t > since and r.round == newest and r.size == self.plan.workers:
                    first.setdefault(r.worker, r)
            whole = len(first) == self.plan.workers and self.all_live(first.values())
            return max(r.t for r in first.values()) if whole else None

        return self.job.until(look, "all workers train together", within) or 0.0

    def all_live(self, records: Iterable[StepRecord]) -> bool:
        """Whether all processes that have written these live."""
        live = self.job.live()
        return all(record.pid in live for record in records)

    def newest_round(self) -> int:
        """The newest complete round; 0: there was none."""
        return max((e["round"] for e in self.job.events("round_completed")), default=0)

    def processes(self) -> dict[int, str]:
        """The driver and the agents, by pid."""
        return {self.job.process.pid: "driver", **dict.fromkeys(self.job.agents(), "agent")}

    def see_growth(self) -> None:
        """Note how large the driver and the agents are, once it is quiet."""
        of, until = self.processes(), time.monotonic() + SETTLE_S
        self.growth.see(of)
        while self.growth.beyond(self.plan.objectives) and time.monotonic() < until:
            time.sleep(0.2)
            self.growth.see(of)

    def end(self) -> None:
        """End the job, and see that no step was lost and nothing is left."""
        live = self.job.live()
        for pid in {record.pid for record in self.job.steps()} - set(live):
            self.job.killed.setdefault(pid, 0.0)  # each of them died by a fault
        last = min(record.step for record in live.values())
        self.job.process.send_signal(signal.SIGTERM)
        self.judge_end(
            128 + signal.SIGTERM,
            self.job.assert_nothing_left,
            lambda: assert_no_step_lost_or_repeated(self.job, last),
        )

    def judge_end(self, wanted: int, *checks: Callable[[], None]) -> None:
        """Wait for the job's end; note another exit status, and each check that fails."""
        status = self.job.wait()
        if status != wanted:
            self.arena.broken.append(f"exit status {status}, not {wanted}")
        for check in checks:
            try:
                check()
            except AssertionError as error:
                self.arena.broken.append(str(error)[:2000])

    def missed(self) -> list[str]:
        """The objectives that were missed, each in a sentence."""
        wanted, missed = self.plan.objectives, list(self.arena.broken)
        recovery = percentile([s for found in self.recoveries.values() for s in found], 0.99)
        if recovery > wanted.recovery_p99:
            missed.append(f"recovery: p99 is {recovery:.2f} s, not {wanted.recovery_p99:g} s")
        gap = max(self.gaps.get("rogue_clients", [0.0]))
        if gap > wanted.rogue_gap:
            missed.append(f"rogue clients: a gap of {gap:.2f} s, not {wanted.rogue_gap:g} s")
        return missed + self.growth.beyond(wanted)

    def report(self) -> dict[str, object]:
        """What happened, for people and for files."""
        figures = {
            name: {
                "times": len(found),
                "median": round(statistics.median(found), 3),
                "p99": round(percentile(found, 0.99), 3),
                "longest gap": round(max(self.gaps.get(name, [0.0])), 3),
            }
            for name, found in sorted(self.recoveries.items())
        }
        return {
            "seed": self.plan.seed,
            "faults": figures,
            "answers to rogue clients": self.arena.answers,
            "largest growth": self.growth.most()._asdict(),
            "rounds": len(self.job.events("round_completed")),
            "steps": max((record.step for record in self.job.steps()), default=0),
        }
