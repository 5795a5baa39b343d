"""Kill a worker: time until the job trains on, and until it is as large as before.

The systems run in turns: in each turn every system is started, some of its workers are killed one
after the other, and it is ended. Two events, each the same for every system that has it:

- *full size*: as many workers as before the kill have each finished a step in a later round.
- *survivors' next step*: all workers that were not killed have finished a step in a later round, in
  the same processes. torchrun has no survivors: it restarts all workers, so its next step is the
  one at full size.

The floor is the least that any system does which keeps the survivors' processes and learns of the
loss from the operating system; see `peers/floor.py`.

    python -m benchmarks.recovery [--turns N] [--kills N]
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.common import OURS, gather, report
from benchmarks.systems import System, elasticrun, floor, kill, torchrun, torchrun_nodes

STEP_MS = 15.0
NEXT, FULL = "kill → survivors' next step", "kill → full size"
ENV = {"STEP_MS": str(STEP_MS)}
Start = Callable[[], contextlib.AbstractContextManager[System]]


class Plan(NamedTuple):
    """A system in the comparison."""

    system: str
    label: str  # of the figures: the size of the job
    size: int
    restarts: bool  # it has no survivors
    start: Start
    spares: bool = False  # a spare is ready before each kill


THREE, FOUR, HEAVY = "3 workers", "4 workers on 2 nodes", "3 workers, 100 MB of state"
SPARES = "3 workers, --spares 1"
TWO_HOSTS = ("-H", "localhost:2,127.0.0.2:2")
PLANS = (
    Plan("floor", THREE, 3, False, lambda: floor(3, STEP_MS)),
    Plan(OURS, THREE, 3, False, lambda: elasticrun(3, env=ENV)),
    Plan(
        "ours, --insecure", THREE, 3, False, lambda: elasticrun(3, flags=("--insecure",), env=ENV)
    ),
    Plan(OURS, SPARES, 3, False, lambda: elasticrun(3, flags=("--spares", "1"), env=ENV), True),
    Plan("torchrun", THREE, 3, True, lambda: torchrun(3, ENV)),
    Plan(OURS, FOUR, 4, False, lambda: elasticrun(4, flags=TWO_HOSTS, env=ENV)),
    Plan("torchrun", FOUR, 4, True, lambda: torchrun_nodes(4, ENV)),
    Plan(OURS, HEAVY, 3, False, lambda: elasticrun(3, env={**ENV, "STATE_MB": "100"})),
)


def one_kill(system: System, size: int, dice: random.Random) -> tuple[float | None, float]:
    """Return the seconds to the survivors' next step and to full size, after one kill.

    The first is None if a survivor did not stay.
    """
    pids = system.until(lambda: system.training(size), f"{size} workers training")
    settled = max(r["step"] for r in system.records()) + dice.randrange(20, 60)
    system.until(lambda: max(r["step"] for r in system.records()) >= settled, "more steps")
    before = max(r["round"] for r in system.records())
    victim = dice.choice(sorted(pids))
    killed_at = kill(victim)

    def first_steps(at_size: int | None) -> dict[int, float]:
        first: dict[int, float] = {}
        for r in system.records():
            later = r["t"] > killed_at and r["round"] > before
            if later and at_size in (None, r["size"]):
                first.setdefault(r["pid"], r["t"])
        return first

    def full() -> float | None:
        first = first_steps(size)
        return max(first.values()) if len(first) >= size else None

    full_at = system.until(full, "full size again")
    first = first_steps(None)
    stayed = [first[pid] for pid in pids - {victim} if pid in first]
    next_at = max(stayed) - killed_at if len(stayed) == size - 1 else None
    return next_at, full_at - killed_at


def ready_spares(system: System) -> int:
    """Return how many spares have been ready so far."""
    logs = system.records_dir.glob("*/events.jsonl")
    return sum(log.read_text().count('"event":"spare_ready"') for log in logs)


def measure(plan: Plan, kills: int, dice: random.Random) -> list[tuple[float | None, float]]:
    """Return what each kill of one turn of one system took; a system that hangs ends its turn."""
    found: list[tuple[float | None, float]] = []
    with plan.start() as system:
        try:
            for _ in range(kills):
                if plan.spares:
                    system.until(lambda: ready_spares(system) > len(found), "a spare is ready")
                found.append(one_kill(system, plan.size, dice))
        except TimeoutError as error:
            print(str(error).splitlines()[0], flush=True)
    return found


def main() -> None:
    """Measure every system in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--kills", type=int, default=4, help="in a turn of one system")
    options = parser.parse_args()
    dice = random.Random(7)
    samples = []
    for turn in range(options.turns):
        for plan in PLANS:
            kills = max(1, options.kills // 2) if plan.restarts else options.kills
            for next_, full in measure(plan, kills, dice):
                if next_ is not None and not plan.restarts:
                    samples.append((plan.system, f"{NEXT}, {plan.label}", turn, next_))
                samples.append((plan.system, f"{FULL}, {plan.label}", turn, full))
    report("recovery", sorted(gather(samples), key=lambda f: f.figure))


if __name__ == "__main__":
    main()
