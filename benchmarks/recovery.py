"""Kill one of three workers: time to the survivors' next step, and to full size again.

Peers: the in-process floor, and torchrun (one node; 1:2 nodes), interleaved in one run. For a
restart-based peer, "next step" is the next step of all workers, since it has no survivors.

    python -m benchmarks.recovery [--kills N]
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Callable

from benchmarks.common import Figure, report
from benchmarks.systems import System, elasticrun, floor, kill, torchrun, torchrun_nodes

STEP_MS = 15.0
NEXT, FULL, ALL = "kill → survivors' next step", "kill → full size", "kill → all step again"


def one_kill(system: System, size: int, dice: random.Random) -> tuple[float, float]:
    """Return the seconds to the survivors' next step and to a step at full size, after one kill."""
    pids = system.until(lambda: system.training(size), f"{size} workers training")
    settled = max(r["step"] for r in system.records()) + dice.randrange(20, 60)
    system.until(lambda: max(r["step"] for r in system.records()) >= settled, "more steps")
    before = max(r["round"] for r in system.records())
    victim = dice.choice(sorted(pids))
    killed_at = kill(victim)

    def later() -> list[dict]:
        return [r for r in system.records() if r["t"] > killed_at and r["round"] > before]

    def full() -> float | None:
        first: dict[int, float] = {}
        for r in later():
            if r["size"] == size:
                first.setdefault(r["pid"], r["t"])
        return max(first.values()) if len(first) >= size else None

    full_at = system.until(full, "full size again")
    survivors = pids - {victim}
    first: dict[int, float] = {}
    for r in later():
        first.setdefault(r["pid"], r["t"])
    stayed = [first[pid] for pid in survivors if pid in first]
    next_at = max(stayed) if len(stayed) == len(survivors) else full_at
    return next_at - killed_at, full_at - killed_at


def measure(
    start: Callable[[], contextlib.AbstractContextManager[System]], size: int, kills: int
) -> tuple[str, list[float], list[float], str]:
    """Return the samples of one system; a peer that hangs is reported as such."""
    dice = random.Random(7)
    nexts: list[float] = []
    fulls: list[float] = []
    note = ""
    with start() as system:
        try:
            for _ in range(kills):
                first, all_again = one_kill(system, size, dice)
                nexts.append(first)
                fulls.append(all_again)
        except TimeoutError as error:
            note = str(error).splitlines()[0]
    return system.name, nexts, fulls, note


def main() -> None:
    """Measure every system and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    kills = parser.parse_args().kills
    env = {"STEP_MS": str(STEP_MS)}
    plans: list[tuple[Callable[[], contextlib.AbstractContextManager[System]], int, int]] = [
        (lambda: floor(3, STEP_MS), 3, kills),
        (lambda: elasticrun(3, env=env), 3, kills),
        (lambda: torchrun(3, env), 3, max(3, kills // 3)),
        (lambda: torchrun_nodes(4, env), 4, max(3, kills // 3)),
    ]
    figures = []
    for start, size, count in plans:
        name, nexts, fulls, note = measure(start, size, count)
        restarting = name.startswith("torchrun")
        if not restarting:
            figures.append(Figure(name, NEXT, "s", tuple(nexts), note))
            figures.append(Figure(name, FULL, "s", tuple(fulls), note))
        figures.append(Figure(name, ALL, "s", tuple(fulls if restarting else nexts), note))
    heavy = {**env, "STATE_MB": "100"}
    name, nexts, fulls, note = measure(lambda: elasticrun(3, env=heavy), 3, max(3, kills // 2))
    figures.append(Figure(name, f"{NEXT}, 100 MB of state", "s", tuple(nexts), note))
    figures.append(Figure(name, f"{FULL}, 100 MB of state", "s", tuple(fulls), note))
    report("recovery", sorted(figures, key=lambda f: f.figure), baseline="floor")


if __name__ == "__main__":
    main()
