"""Kill one worker of a plain torchrun-style script: time until every worker steps again.

The same unmodified script under elasticrun and under torchrun, in turns.

    python -m benchmarks.plain_restart [--turns N] [--kills N]
"""

from __future__ import annotations

import argparse
import random

from benchmarks.common import OURS, gather, report
from benchmarks.recovery import ENV, FULL, THREE, Plan, measure
from benchmarks.systems import elasticrun, torchrun

# A plain script reports no steps, so repeated kills look like a script that only fails: both
# systems are allowed many restarts.
FLAGS = ("--fruitless-restarts", "100", "--host-failures", "100")
PLANS = (
    Plan(OURS, THREE, 3, True, lambda: elasticrun(3, how="plain", flags=FLAGS, env=ENV)),
    Plan("torchrun", THREE, 3, True, lambda: torchrun(3, ENV)),
)


def main() -> None:
    """Measure both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--kills", type=int, default=2, help="in a turn of one system")
    options = parser.parse_args()
    dice = random.Random(7)
    samples = [
        (plan.system, f"{FULL}, {plan.label}", turn, full)
        for turn in range(options.turns)
        for plan in PLANS
        for _, full in measure(plan, options.kills, dice)
    ]
    report("plain_restart", gather(samples))


if __name__ == "__main__":
    main()
