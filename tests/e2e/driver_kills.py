"""Does a job notice that its driver is killed again and again? A trial, not a test: minutes.

    python -m tests.e2e.driver_kills --drivers 20 --seed 1

One job on this machine, with as many workers as --workers. First workers alone are killed, as often
as --calm says; then the driver is killed at random instants, also while it resumes, and goes on at
once, as systemd would start it. In both parts a second host with one slot comes and goes. Then the
job must grow and shrink as ever, and end without a trace.

With --exact N the job is deterministic and trains N epochs; its fingerprint has to be that of one
worker without failures.

A line for each part tells the largest gaps between two steps of one process: in one world, between
two worlds, and between two if a driver was missing, as the survivors of a loss wait for it. Fails
as soon as the job goes back to earlier steps, or if a step was lost or repeated; then its folder is
kept.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.e2e.test_control import ctl
from tests.e2e.test_exact import EXACT, result_of
from tests.support.job import JOBS, Hosts, RunningJob, assert_no_step_lost_or_repeated, elasticrun

RESUMED_S = 60.0
WENT_BACK = 100  # steps
STEPS_OF_EPOCH = 50  # of the exact job


@dataclass
class Part:
    """A stretch of the job, and what was killed in it."""

    name: str
    began: float = field(default_factory=time.time)
    ended: float = 0.0
    drivers: list[float] = field(default_factory=list)  # when each was killed, unix seconds
    workers: list[float] = field(default_factory=list)

    def describe(self, job: RunningJob) -> str:
        """The gaps between the steps of this part, in one line."""
        steps: dict[int, list[tuple[float, int]]] = {}
        for record in job.steps():
            if self.began <= record.t <= self.ended:
                steps.setdefault(record.pid, []).append((record.t, record.round))
        calm, changes, waits = [0.0], [0.0], [0.0]
        absent = self.absences(job)
        for of_one in steps.values():
            for (before, old), (after, new) in itertools.pairwise(of_one):
                waited = any(died < after and before < resumed for died, resumed in absent)
                kind = calm if old == new else waits if waited else changes
                kind.append(after - before)
        killed = f"{len(self.drivers)} drivers and {len(self.workers)} workers killed"
        return (
            f"{self.name}: {killed}; a step takes {statistics.median(calm):.3f} s; the longest "
            f"gap in a world is {max(calm):.3f} s, between two worlds {max(changes):.3f} s, and "
            f"{max(waits):.3f} s if a driver was missing ({len(waits) - 1} times)"
        )

    def absences(self, job: RunningJob) -> list[tuple[float, float]]:
        """From when to when no driver did its work."""
        resumed = [event["t"] for event in job.events("driver_resumed")]
        return [
            (died, min((t for t in resumed if t > died), default=math.inf)) for died in self.drivers
        ]


@dataclass
class Trial:
    """The job under test."""

    job: RunningJob
    random: Random
    workers: int
    hosts: Hosts
    last: int  # no fault after this step
    second: bool = False  # there is a second host
    host_changes: int = 0

    @property
    def size(self) -> int:
        """The number of workers that the hosts have slots for."""
        return self.workers + self.second

    def change_hosts(self) -> None:
        """Let the second host come, or go."""
        self.second, self.host_changes = not self.second, self.host_changes + 1
        more = ["127.0.0.2:1"] if self.second else []
        self.hosts.set(f"localhost:{self.workers}", *more)

    def is_late(self) -> bool:
        """Return whether the job is near its end."""
        return max((record.step for record in self.job.live().values()), default=0) > self.last

    def check_progress(self) -> None:
        """Fail if the newest step is far below the highest one: its state was lost."""
        steps = self.job.steps()
        highest = max((record.step for record in steps), default=0)
        newest = max((record.step for record in steps[-4 * self.workers :]), default=0)
        assert newest > highest - WENT_BACK, f"step {newest} after step {highest}"

    def kill_a_worker(self, part: Part) -> None:
        """Kill one of at least two workers that hold the newest state.

        A worker that has to leave, or a new one with the process number of a dead one, may live on
        beside the last one that trains.
        """
        live = self.job.live()
        newest = max((record.step for record in live.values()), default=0)
        holders = sorted(pid for pid, record in live.items() if record.step >= newest - 1)
        if len(holders) > 1:
            with contextlib.suppress(ProcessLookupError):
                part.workers.append(self.job.kill(self.random.choice(holders)))

    def without_driver_kills(self, times: int) -> Part:
        """Kill workers alone."""
        part = Part("without driver kills")
        for _time in range(times):
            if self.random.random() < 0.2:
                self.change_hosts()
            else:
                self.kill_a_worker(part)
            self.job.until_size(self.size)
            time.sleep(self.random.uniform(0.0, 1.0))
        part.ended = time.time()
        return part

    def with_driver_kills(self, times: int) -> Part:
        """Kill drivers at random instants, and workers beside them."""
        part = Part("with driver kills")
        for _driver in range(times):
            if self.is_late():
                break
            resumed = len(self.job.events("driver_resumed"))
            part.drivers.append(time.time())
            self.job.kill_driver()
            if self.random.random() < 0.3:
                self.kill_a_worker(part)
            elif self.random.random() < 0.3:
                self.change_hosts()
            self.job.start("--resume")
            if self.random.random() < 0.3:  # it dies young, perhaps as it resumes
                time.sleep(self.random.uniform(0.0, 3.0))
                continue
            self.until_resumed(resumed)
            if self.random.random() < 0.3:
                self.kill_a_worker(part)
            if self.random.random() < 0.3 and not self.is_late():
                self.job.until_size(self.size)
            time.sleep(self.random.uniform(0.0, 2.0))
            self.check_progress()
        self.until_resumed(resumed)
        self.job.until_size(self.size)
        part.ended = time.time()
        return part

    def until_resumed(self, times: int) -> None:
        """Wait until more drivers than these have gone on with the job."""
        self.job.until(
            lambda: len(self.job.events("driver_resumed")) > times, "the next driver", RESUMED_S
        )

    def grow_and_shrink(self) -> None:
        """Scale down and up, as on any other day."""
        where = "--state-dir", str(self.job.run_dir.parent), "--run-id", self.job.run_id
        for size in (1, self.size):
            ctl("scale", str(size), *where)
            self.job.until_size(size)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trial; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--drivers", type=int, default=20, help="how many are killed")
    parser.add_argument("--calm", type=int, default=5, help="worker kills before that")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--exact", type=int, default=0, metavar="EPOCHS")
    given = parser.parse_args(argv)
    seed = given.seed if given.seed is not None else int(time.time())
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        return try_job(given, seed, Hosts(Path(folder), f"localhost:{given.workers}"))


@contextlib.contextmanager
def kept_on_failure(folder: Path) -> Iterator[None]:
    """Keep a copy of a job's folder if the trial fails."""
    try:
        yield
    except AssertionError:
        kept = shutil.copytree(folder, Path(tempfile.mkdtemp(prefix="driver-kills-"), "job"))
        print(f"the job's folder is kept: {kept}", flush=True)
        raise


def try_job(given: argparse.Namespace, seed: int, hosts: Hosts) -> int:
    """Run the job of the trial; return the exit status."""
    steps = given.exact * STEPS_OF_EPOCH or 1_000_000
    env = {"STEPS": str(steps), "STEP_MS": "20", "MODE": "fixed", "EPOCHS": str(given.exact)}
    script = EXACT if given.exact else str(JOBS / "train.py")
    args = (
        *("--host-discovery-script", str(hosts.script), "--discovery-interval", "0.2"),
        *("-np", str(given.workers), "--min-np", "1", "--max-np", str(given.workers + 1)),
        *("--max-restarts", "100000", "--", script),
    )
    with elasticrun(*args, env=env) as job, kept_on_failure(job.folder):
        trial = Trial(job, Random(seed), given.workers, hosts, int(0.9 * steps))
        job.until_size(given.workers)
        for part in (
            trial.without_driver_kills(given.calm),
            trial.with_driver_kills(given.drivers),
        ):
            print(part.describe(job), flush=True)
        print(f"the hosts changed {trial.host_changes} times", flush=True)
        if given.exact:
            return has_same_bits(job, given.exact)
        trial.grow_and_shrink()
        last = min(record.step for record in job.live().values())
        job.process.send_signal(signal.SIGTERM)
        status = job.wait()
        job.assert_nothing_left()
        assert status == 128 + signal.SIGTERM, job.describe()
        assert_no_step_lost_or_repeated(job, last)
        print(f"{last} steps, none lost or repeated; exit status {status}; nothing is left")
    return 0


def has_same_bits(job: RunningJob, epochs: int) -> int:
    """Wait for the end of an exact job; return 0 if its fingerprint is that of one worker."""
    status = job.wait(600)
    job.assert_nothing_left()
    assert status == 0, job.describe()
    env = {"MODE": "fixed", "STEP_MS": "0", "EPOCHS": str(epochs)}
    with elasticrun("-np", "1", "--", EXACT, env=env) as calm:
        assert calm.wait(600) == 0, calm.describe()
        found, expected = result_of(job.stdout), result_of(calm.stdout)
    print(f"{epochs} epochs: {found}; one worker without failures: {expected}")
    return int(found != expected)


if __name__ == "__main__":
    sys.exit(main())
