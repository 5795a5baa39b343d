"""A host appears while two workers train: their longest pause, and the time until it takes part.

"Longest gap" is the longest time between two finished steps of a healthy rank in the seconds
around the growth, less the step time itself; "host appears → first step with it" counts from the
moment the discovery script's answer changes.

    python -m benchmarks.scale_out [--rounds N]
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.common import Figure, report
from benchmarks.systems import System, elasticrun

STEP_MS = 15.0
INTERVAL_S = 1.0
JOIN = "host appears → first step with it"


class Hosts:
    """A discovery script with an answer that the benchmark sets."""

    def __init__(self, folder: Path) -> None:
        self.listing = folder / "hosts"
        self.script = folder / "discover.sh"
        self.script.write_text(f"#!/bin/sh\nexec cat '{self.listing}'\n")
        self.script.chmod(0o755)

    def answer(self, *hosts: str) -> float:
        """Have the script print these lines from now on; return the time, in unix seconds."""
        fresh = self.listing.with_suffix(".new")
        fresh.write_text("".join(f"{host}\n" for host in hosts))
        fresh.replace(self.listing)
        return time.time()


def longest_gap(system: System, pids: set[int], since: float, until: float) -> float:
    """Return the longest time between two steps of one of these ranks, less the step time."""
    worst = 0.0
    for pid in pids:
        times = [r["t"] for r in system.records() if r["pid"] == pid and since <= r["t"] <= until]
        worst = max([worst, *(b - a for a, b in itertools.pairwise(times))])
    return worst - STEP_MS / 1000


def _is_over(moment: float) -> bool:
    return time.time() > moment


def main() -> None:
    """Grow and shrink a running job a few times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    gaps, quiet, joins = [], [], []
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as folder:
        hosts = Hosts(Path(folder))
        hosts.answer("localhost:2")
        discovery = ("--host-discovery-script", str(hosts.script))
        flags = ("--min-np", "1", *discovery, "--discovery-interval", str(INTERVAL_S))
        with elasticrun(2, flags=flags, env={"STEP_MS": str(STEP_MS)}) as system:
            for _ in range(rounds):
                pids = system.until(lambda: system.training(2), "2 workers training")
                start = time.time()
                quiet_until = time.time() + 2
                system.until(partial(_is_over, quiet_until), "two quiet seconds")
                quiet.append(longest_gap(system, pids, start, time.time()))
                appeared = hosts.answer("localhost:2", "127.0.0.2:1")
                system.until(lambda: system.training(3), "3 workers training")
                joined = min(
                    r["t"] for r in system.records() if r["t"] > appeared and r["size"] == 3
                )
                joins.append(joined - appeared)
                gaps.append(longest_gap(system, pids, appeared, joined + 1))
                hosts.answer("localhost:2")
    name = "elasticrun (elastic)"
    figures = [
        Figure(name, "longest gap of the healthy ranks, growing", "s", tuple(gaps)),
        Figure(name, "longest gap in quiet training (noise)", "s", tuple(quiet)),
        Figure(
            name, "host appears → first step with it", "s", tuple(joins), f"interval {INTERVAL_S} s"
        ),
    ]
    report("scale_out", figures)


if __name__ == "__main__":
    main()
