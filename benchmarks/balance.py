"""A worker becomes slow in mid-training: the throughput that `--balance` restores.

    python -m benchmarks.balance [--workers 4] [--case MS,SHARE,FACTOR …] [--turns 2] [--seconds 6]

Each worker has a fixed part of a processor (a cgroup quota, as root), so that the others do not
gain when one loses. Then one is given a FACTOR-th of that. A case is the computing time of a
micro-batch (MS), each worker's part of a processor (SHARE), and the FACTOR. Three throughputs are
measured within seconds of each other, from one job in each turn: undisturbed, slowed until work is
moved, and afterwards.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.common import Figure, report
from benchmarks.systems import System, elasticrun
from tests.support.slowing import held

VIRTUAL_PER_WORKER = 8
NAME = "elasticrun --balance"


def throughput(system: System, since: float, until: float) -> float:
    """Return the steps per second of the first worker between two moments (unix seconds)."""
    times = [r["t"] for r in system.records() if r["rank"] == 0 and since <= r["t"] <= until]
    if len(times) < 3:
        raise RuntimeError(f"{len(times)} steps between {since} and {until}: measure for longer")
    return float((len(times) - 1) / (times[-1] - times[0]))


def moves(system: System) -> list[dict[str, Any]]:
    """Return the events `work_moved` so far."""
    found = []
    for path in system.records_dir.glob("*/events.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        read = [json.loads(line) for line in lines if line.endswith("\n")]
        found += [event for event in read if event["event"] == "work_moved"]
    return found


@dataclass(frozen=True)
class Case:
    """Milliseconds of a processor for a micro-batch, each worker's share, and the slow-down."""

    work_ms: float
    share: float
    factor: float

    @classmethod
    def parse(cls, words: str) -> Case:
        """Return the case written as `MS,SHARE,FACTOR`."""
        return cls(*map(float, words.split(",")))

    def __str__(self) -> str:
        return f"{self.work_ms:g} ms at {self.share:g} of a processor, {self.factor:g} x slower"


CASES = (Case(3.0, 0.25, 3.0), Case(1.0, 0.2, 4.0))  # the second has large fixed costs as well


def one_turn(case: Case, options: argparse.Namespace) -> tuple[float, float, float, float]:
    """Return steps a second undisturbed, slowed and balanced; seconds until work was moved."""
    workers = options.workers
    flags = ("--virtual-workers", str(VIRTUAL_PER_WORKER * workers), "--balance")
    env = {"HOW": "fixed", "WORK_MS": str(case.work_ms)}
    with elasticrun(workers, how="fixed", flags=flags, env=env) as system:
        pids = sorted(system.until(lambda: system.training(workers), "workers training"))
        victim = next(r["pid"] for r in system.records() if r["rank"] == workers - 1)
        with held(pids, case.share) as quotas:
            begun = time.time() + 1.0
            time.sleep(1.0 + options.seconds)
            slow_at = time.time()
            with quotas[victim].at(case.share / case.factor):
                moved = system.until(lambda: moves(system)[-1:], "work moved")[0]["t"]
                settled = time.time() + options.settle
                time.sleep(options.settle + options.seconds)
                return (
                    throughput(system, begun, slow_at),
                    throughput(system, slow_at, moved),
                    throughput(system, settled, time.time()),
                    moved - slow_at,
                )


def measure(case: Case, options: argparse.Namespace) -> list[Figure]:
    """Return the figures of one case, turn by turn."""
    turns = [one_turn(case, options) for _ in range(options.turns)]
    undisturbed, slow, balanced, took = zip(*turns, strict=True)
    recovered = [(c - b) / (a - b) for a, b, c, _ in turns]
    return [
        Figure(NAME, f"{case}: undisturbed", "steps/s", undisturbed),
        Figure(NAME, f"{case}: one slowed", "steps/s", slow),
        Figure(NAME, f"{case}: and work moved", "steps/s", balanced),
        Figure(NAME, f"{case}: recovered of what was lost", "x", tuple(recovered)),
        Figure(NAME, f"{case}: slow → work moved", "s", took),
    ]


def main() -> None:
    """Measure all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--case", type=Case.parse, action="append", metavar="MS,SHARE,FACTOR")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--settle", type=float, default=4.0, help="seconds for the new shares")
    options = parser.parse_args()
    report("balance", [f for case in options.case or CASES for f in measure(case, options)])


if __name__ == "__main__":
    main()
