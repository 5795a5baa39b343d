"""`make demo`: three workers learn handwritten digits, one is killed, and the job goes on.

Starts `elasticrun` on digits.py, sends SIGKILL to a worker in the middle, and says at the end
what happened. Every figure is read from what the workers wrote down while they trained, and from
the job's event log.
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
class Step:
    """One finished step of one worker, as digits.py wrote it down."""

    t: float
    step: int
    round: int
    rank: int
    size: int
    pid: int


def read_steps(folder: Path) -> list[Step]:
    """All steps so far, by time; a line that is still being written is left for later."""
    lines = [
        line
        for path in folder.glob("*.jsonl")
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return sorted((Step(**json.loads(line)) for line in lines), key=lambda step: step.t)


def started_pids(events: Path) -> list[int]:
    """Processes of the workers, in the order in which the event log has them."""
    if not events.exists():
        return []
    lines = [line for line in events.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [e["pid"] for e in map(json.loads, lines) if e["event"] == "worker_started"]


def choose_victim(events: Path, records: Path, after: int) -> Step | None:
    """The newest step of the last started worker, once all three have done `after` steps."""
    steps = read_steps(records)
    newest = {step.pid: step for step in steps}
    done = Counter(step.pid for step in steps)
    pids = started_pids(events)
    if len(pids) == len(done) == 3 and min(done.values()) >= after:
        return newest[pids[-1]]
    return None


def kill(victim: Step) -> Step:
    """SIGKILL, which no process can refuse; returns the victim with the time of it."""
    print(f"\n>>> kill -9 {victim.pid}: rank {victim.rank}, after step {victim.step}\n", flush=True)
    now = time.time()
    os.kill(victim.pid, signal.SIGKILL)
    return replace(victim, t=now)


def watch(job: subprocess.Popen[bytes], folder: Path, run: Path, after: int) -> Step | None:
    """Echo the job's output until it ends, and kill a worker on the way."""
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


def summarise(steps: list[Step], victim: Step) -> list[tuple[str, str]]:
    """What happened, from the records alone."""
    sizes = [size for size, _ in groupby(step.size for step in steps)]
    survivors = {s.pid for s in steps if s.round == victim.round} - {victim.pid}
    resumed: dict[int, float] = {}
    for step in steps:
        if step.round > victim.round and step.pid in survivors:
            resumed.setdefault(step.pid, step.t)
    rounds: dict[int, set[int]] = defaultdict(set)
    for step in steps:
        if step.pid != victim.pid:
            rounds[step.step].add(step.round)
    last = max(rounds)
    lost = last - len(rounds)
    repeated = sum(len(r) > 1 for r in rounds.values())
    pause = f"{max(resumed.values()) - victim.t:.2f} s" if resumed else "never"
    return [
        ("workers", " -> ".join(map(str, sizes))),
        ("kill to next step", f"{pause}, in the {len(resumed)} processes that were left"),
        ("steps lost", f"{lost} of {last}; done twice: {repeated}"),
    ]


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
            *("--state-dir", name, "--", *training, "--record", str(folder / "steps")),
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
    summary.append(("accuracy", accuracy[1] if accuracy else "not reported"))
    print()
    for label, text in summary:
        print(f"{label:>18}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
