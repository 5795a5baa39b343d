"""`python -m tests.sim --seeds N`: play N seeds; `--seed K --trace`: replay one and show it.

In every second seed drivers die.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.sim.runner import SeedFailed, run_seed


def main() -> int:
    """Play the seeds; the first failing one is printed before its story, exit status 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to play")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="play only this one")
    parser.add_argument("--mortal", action="store_true", help="drivers die in all seeds")
    parser.add_argument("--trace", action="store_true", help="show events and decisions")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    if (one := options.seed) is not None:
        seeds = range(one, one + 1)
    ends: Counter[str] = Counter()
    rounds = replaced = promoted = repaired = events = died = 0
    began = time.process_time()
    for seed in seeds:
        try:
            outcome = run_seed(seed, mortal=options.mortal or (one is None and seed % 2 == 1))
        except SeedFailed as failure:
            print(failure)
            shown = failure.trace if options.trace else failure.trace[-20:]
            print("\n".join(shown))
            return 1
        rounds += outcome.rounds
        replaced += outcome.replaced
        promoted += outcome.promoted
        repaired += outcome.repaired
        events += outcome.events
        died += outcome.died
        ends[f"exit code {outcome.exit_code}"] += 1
    summary = ", ".join(f"{count} ended with {end}" for end, count in sorted(ends.items()))
    did = f"{replaced} slow workers replaced, {promoted} spares promoted, {repaired} repairs"
    print(f"{len(seeds)} seeds, {rounds} rounds, {did}, {died} drivers died: {summary}")
    minutes = (time.process_time() - began) / 60
    print(f"{events} events, {events / minutes:.0f} a minute and core")
    return 0


if __name__ == "__main__":
    sys.exit(main())
