"""`make demo`: three workers learn handwritten digits, one is killed, and the job goes on.

Starts `elasticrun` on digits.py, sends SIGKILL to a worker in the middle, and prints a summary at
the end. Every figure comes from the lines that the workers wrote while they trained, and from the
job's event log.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 300.0


@dataclass(frozen=True)
class RecordedStep:
    """One finished step of one worker, as digits.py recorded it."""

    t: float
    step: int
    round: int
    rank: int
    size: int
    pid: int


def read_steps(folder: Path) -> list[RecordedStep]:
    """Return all steps so far, by time, without a line that is still being written."""
    lines = [
        line
        for path in folder.glob("*.jsonl")
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return sorted((RecordedStep(**json.loads(line)) for line in lines), key=lambda step: step.t)


def started_pids(events: Path) -> list[int]:
    """Return the process ids of the workers, in the order of the event log."""
    if not events.exists():
        return []
    lines = [line for line in events.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [e["pid"] for e in map(json.loads, lines) if e["event"] == "worker_started"]


def choose_victim(events: Path, records: Path, after: int) -> RecordedStep | None:
    """Return the newest step of the last started worker, once all three have done `after`."""
    steps = read_steps(records)
    newest = {step.pid: step for step in steps}
    done = Counter(step.pid for step in steps)
    pids = started_pids(events)
    if len(pids) == len(done) == 3 and min(done.values()) >= after:
        return newest[pids[-1]]
    return None


def kill(victim: RecordedStep) -> RecordedStep:
    """Kill a worker with SIGKILL; return its newest step with the time of the kill."""
    print(f"\n>>> kill -9 {victim.pid}: rank {victim.rank}, after step {victim.step}\n", flush=True)
    now = time.time()
    os.kill(victim.pid, signal.SIGKILL)
    return replace(victim, t=now)


def watch(job: subprocess.Popen[bytes], folder: Path, run: Path, after: int) -> RecordedStep | None:
    """Print the job's output until it ends, and kill a worker on the way."""
    victim = None
    deadline = time.monotonic() + DEADLINE_S
    with (folder / "output").open() as output:
        while time.monotonic() < deadline:
            ended = job.poll() is not None
            print(output.read(), end="", flush=True)
            if ended:
                return victim
            if victim is None:
                chosen = choose_victim(run / "events.jsonl", folder / "steps", after)
                victim = kill(chosen) if chosen else None
            time.sleep(0.02)
    raise SystemExit(f"the job did not end within {DEADLINE_S:.0f} s")


@dataclass(frozen=True)
class Summary:
    """The course of the job, from the workers' records alone."""

    sizes: list[int]  # numbers of workers, one after the other
    survivors: int
    pause_s: float | None  # from the kill until every survivor had finished a step again
    full_s: float | None  # from the kill until as many trained as before
    steps: int
    lost: int
    repeated: int

    @property
    def as_promised(self) -> bool:
        """True if the job shrank and grew back, with every step done exactly once."""
        return self.sizes == [3, 2, 3] and (self.lost, self.repeated) == (0, 0)

    def lines(self) -> list[tuple[str, str]]:
        """Return the label and the text of each line to print."""
        pause, full = ("never" if s is None else f"{s:.2f} s" for s in (self.pause_s, self.full_s))
        return [
            ("workers", " -> ".join(map(str, self.sizes))),
            ("kill to next step", f"{pause}, in the same {self.survivors} processes"),
            ("kill to three again", full),
            ("steps lost", f"{self.lost} of {self.steps}; done twice: {self.repeated}"),
        ]


def summarise(steps: list[RecordedStep], victim: RecordedStep) -> Summary:
    """Sum up the records; the victim's steps of its last round were lost with it."""
    after = [step for step in steps if step.round > victim.round]
    survivors = {s.pid for s in steps if s.round == victim.round} - {victim.pid}
    resumed: dict[int, float] = {}
    rounds: dict[int, set[int]] = defaultdict(set)
    for step in steps:
        if step.pid != victim.pid:
            rounds[step.step].add(step.round)
        if step.round > victim.round and step.pid in survivors:
            resumed.setdefault(step.pid, step.t)
    full = next((step.t for step in after if step.size == victim.size), None)
    return Summary(
        sizes=[size for size, _ in groupby(step.size for step in steps)],
        survivors=len(survivors),
        pause_s=max(resumed.values()) - victim.t if set(resumed) == survivors else None,
        full_s=None if full is None else full - victim.t,
        steps=max(rounds),
        lost=max(rounds) - len(rounds),
        repeated=sum(len(numbers) > 1 for numbers in rounds.values()),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a worker and watch the job go on.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--kill-after", type=int, default=60, help="steps before the kill")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="elastic-demo-") as name:
        folder = Path(name)
        (folder / "steps").mkdir()
        training = ["examples/digits.py", "--epochs", str(args.epochs)]
        command = [
            *(sys.executable, "-m", "launcher.cli", "-np", "3", "--run-id", "demo"),
            *("--preload", "torch,sklearn.datasets", "--state-dir", name),
            *("--", *training, "--record", str(folder / "steps")),
        ]
        print("$ elasticrun -np 3", *training, flush=True)
        with (folder / "output").open("wb") as output:
            job = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            victim = watch(job, folder, folder / "demo", args.kill_after)
        finally:
            job.terminate()  # no effect on a job that has ended; a stopped one cleans up
            job.wait()
        if victim is None or job.returncode != 0:
            raise SystemExit(f"the job ended with status {job.returncode}; its output is above")
        accuracy = re.search(r"accuracy ([0-9.]+%)", (folder / "output").read_text())
        summary = summarise(read_steps(folder / "steps"), victim)
    print()
    for label, text in (*summary.lines(), ("accuracy", accuracy[1] if accuracy else "?")):
        print(f"{label:>20}  {text}")
    return 0 if summary.as_promised else 1


if __name__ == "__main__":
    sys.exit(main())
