"""SIGSTOP one of three workers: time until the survivors finish their next step.

The heartbeat timeout is part of it; the interesting figure is the time beyond it.

    python -m benchmarks.hang [--stops N] [--heartbeat S]
"""

from __future__ import annotations

import argparse
import os
import signal
import time

from benchmarks.common import Figure, report
from benchmarks.systems import System, elasticrun


def one_stop(system: System) -> float:
    """Return the seconds from SIGSTOP to the last survivor's next finished step."""
    pids = system.until(lambda: system.training(3), "3 workers training")
    reached = max(r["step"] for r in system.records()) + 30
    system.until(lambda: max(r["step"] for r in system.records()) >= reached, "more steps")
    before = max(r["round"] for r in system.records())
    victim = min(pids)
    stopped_at = time.time()
    os.kill(victim, signal.SIGSTOP)
    survivors = pids - {victim}

    def went_on() -> float | None:
        first: dict[int, float] = {}
        for r in system.records():
            if r["round"] > before and r["pid"] in survivors:
                first.setdefault(r["pid"], r["t"])
        return max(first.values()) if set(first) == survivors else None

    return system.until(went_on, "the survivors' next step") - stopped_at


def main() -> None:
    """Stop workers one after the other; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--heartbeat", type=float, default=2.0, help="seconds")
    options = parser.parse_args()
    flags = ("--heartbeat-timeout", str(options.heartbeat))
    with elasticrun(3, flags=flags, env={"STEP_MS": "15"}) as system:
        took = [one_stop(system) for _ in range(options.stops)]
    beyond = tuple(t - options.heartbeat for t in took)
    note = f"heartbeat timeout {options.heartbeat} s"
    name = "elasticrun (elastic)"
    figures = [
        Figure(name, "SIGSTOP → next step", "s", tuple(took), note),
        Figure(name, "beyond the heartbeat timeout", "s", beyond),
    ]
    report("hang", figures)


if __name__ == "__main__":
    main()
