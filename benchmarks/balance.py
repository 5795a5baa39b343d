"""A worker that becomes slow in mid-training: what `--balance` gives back of the lost throughput.

    python -m benchmarks.balance [--workers 4] [--share 0.25] [--factor 3] [--turns 3] [--seconds 6]

Each worker has a fixed part of a processor (a cgroup quota; without root it is stopped and
continued in turns), so that what one loses the others do not gain. Then one is given a
`--factor`-th of that. Three throughputs are taken within seconds of each other, from one job in
each turn: undisturbed, slowed until work is moved, and afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.common import Figure, report
from benchmarks.systems import System, elasticrun
from tests.support.slowing import slowed

VIRTUAL_PER_WORKER = 8
WORK_MS = 3.0  # of a processor for each micro-batch
NAME = "elasticrun --balance"


def throughput(system: System, since: float, until: float) -> float:
    """Steps per second of the first worker between two moments (unix seconds)."""
    times = [r["t"] for r in system.records() if r["rank"] == 0 and since <= r["t"] <= until]
    if len(times) < 3:
        raise RuntimeError(f"{len(times)} steps between {since} and {until}: measure for longer")
    return (len(times) - 1) / (times[-1] - times[0])


def moves(system: System) -> list[dict[str, Any]]:
    """The events `work_moved` so far."""
    found = []
    for path in system.records_dir.glob("*/events.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        read = [json.loads(line) for line in lines if line.endswith("\n")]
        found += [event for event in read if event["event"] == "work_moved"]
    return found


@contextlib.contextmanager
def held(pids: list[int], share: float) -> Iterator[list[contextlib.ExitStack]]:
    """Each process has this part of a processor, until its stack is closed."""
    with contextlib.ExitStack() as all_of_them:
        stacks = [all_of_them.enter_context(contextlib.ExitStack()) for _ in pids]
        for stack, pid in zip(stacks, pids, strict=True):
            stack.enter_context(slowed(pid, share))
        yield stacks


def one_turn(options: argparse.Namespace) -> tuple[float, float, float, float]:
    """Steps a second undisturbed, slowed and balanced; seconds until work was moved."""
    workers = options.workers
    flags = ("--virtual-workers", str(VIRTUAL_PER_WORKER * workers), "--balance")
    env = {"HOW": "fixed", "WORK_MS": str(WORK_MS)}
    with elasticrun(workers, how="fixed", flags=flags, env=env) as system:
        pids = sorted(system.until(lambda: system.training(workers), "workers training"))
        victim = next(r["pid"] for r in system.records() if r["rank"] == workers - 1)
        with held(pids, options.share) as stacks:
            begun = time.time() + 1.0
            time.sleep(1.0 + options.seconds)
            slow_at = time.time()
            stacks[pids.index(victim)].close()
            with slowed(victim, options.share / options.factor):
                moved = system.until(lambda: moves(system)[-1:], "work moved")[0]["t"]
                settled = time.time() + options.settle
                time.sleep(options.settle + options.seconds)
                return (
                    throughput(system, begun, slow_at),
                    throughput(system, slow_at, moved),
                    throughput(system, settled, time.time()),
                    moved - slow_at,
                )


def main() -> None:
    """Measure turn by turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.25, help="of a processor for each worker")
    parser.add_argument("--factor", type=float, default=3.0, help="how much slower one becomes")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--settle", type=float, default=4.0, help="seconds for the new shares")
    options = parser.parse_args()
    turns = [one_turn(options) for _ in range(options.turns)]
    undisturbed, slow, balanced, took = zip(*turns, strict=True)
    recovered = [(c - b) / (a - b) for a, b, c, _ in turns]
    figures = [
        Figure(NAME, "undisturbed", "steps/s", undisturbed),
        Figure(NAME, f"one of {options.workers} {options.factor:g} x slower", "steps/s", slow),
        Figure(NAME, "and work moved", "steps/s", balanced),
        Figure(NAME, "recovered of what was lost", "x", tuple(recovered)),
        Figure(NAME, "slow → work moved", "s", took),
    ]
    report("balance", figures)


if __name__ == "__main__":
    main()
