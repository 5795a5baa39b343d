"""Workers are killed, stopped, added and taken away at random: the bits do not change.

`ELASTIC_SCHEDULES=50` plays fifty schedules; their seeds are in the tests' names, and
`ELASTIC_FIRST_SCHEDULE` says where to begin.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.e2e.test_exact import EXACT, alone, result_of
from tests.support.job import Hosts, RunningJob, elasticrun

pytestmark = pytest.mark.slow

FIRST = int(os.environ.get("ELASTIC_FIRST_SCHEDULE", "0"))
SCHEDULES = range(FIRST, FIRST + int(os.environ.get("ELASTIC_SCHEDULES", "2")))
ACTS = 4
LAST_STEP = 75  # of 100: what is done later may find the job at its end
NAMES = ("localhost", "127.0.0.2", "127.0.0.3")


@pytest.fixture(scope="module")
def expected() -> str:
    return alone("fixed")


class Fate:
    """Does one thing after the other to a job."""

    def __init__(self, job: RunningJob, hosts: Hosts, seed: int) -> None:
        self.job, self.hosts, self.dice = job, hosts, random.Random(seed)
        self.present = {"localhost": 2}
        self.done: list[str] = []

    def strikes(self) -> None:
        reached = 0
        for _ in range(ACTS):
            reached += self.dice.randrange(3, 15)
            self.job.until(lambda at=reached: self.steps() >= at, f"step {reached}")
            reached = self.steps()
            if reached > LAST_STEP:
                return
            act = self.dice.choice([self.kill, self.stop, self.join, self.leave])
            self.done.append(f"step {reached}: {act.__name__} {act()}")

    def steps(self) -> int:
        return max((r.step for r in self.job.steps()), default=0)

    def kill(self) -> str:
        return self.signal(signal.SIGKILL)

    def stop(self) -> str:
        return self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> str:
        living = self.job.live()
        if len(living) < 2:
            return "nobody: a job that loses everybody begins anew"
        pid = self.dice.choice(sorted(living))
        self.job.kill(pid, number)
        return living[pid].worker

    def join(self) -> str:
        absent = [name for name in NAMES if name not in self.present]
        name = self.dice.choice(absent or [*self.present])
        self.present[name] = self.dice.choice([1, 2])
        self.publish()
        return f"{name}:{self.present[name]}"

    def leave(self) -> str:
        if len(self.present) == 1:
            return self.join()
        name = self.dice.choice(sorted(self.present))
        del self.present[name]
        self.publish()
        return name

    def publish(self) -> None:
        self.hosts.set(*(f"{name}:{slots}" for name, slots in self.present.items()))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", SCHEDULES)
def test_no_history_of_failures_and_changes_changes_a_bit(
    seed: int, tmp_path: Path, expected: str
) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    args = (
        *("--host-discovery-script", str(hosts.script), "--discovery-interval", "0.2"),
        *("-np", "2", "--min-np", "1", "--max-np", "5", "--heartbeat-timeout", "2"),
        *("--", EXACT),
    )
    with elasticrun(*args, env={"MODE": "fixed", "STEP_MS": "40"}) as job:
        fate = Fate(job, hosts, seed)
        fate.strikes()
        story = "; ".join(fate.done)
        assert job.wait(120) == 0, f"{story}\n{job.describe()}"
        assert result_of(job.stdout) == expected, story
