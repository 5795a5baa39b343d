"""Kill one worker of a plain torchrun-style script: time until every worker steps again.

The same unmodified script under elasticrun and under torchrun, in turn.

    python -m benchmarks.plain_restart [--kills N]
"""

from __future__ import annotations

import argparse

from benchmarks.common import Figure, report
from benchmarks.recovery import ALL, STEP_MS, measure
from benchmarks.systems import elasticrun, torchrun


def main() -> None:
    """Measure both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=5)
    kills = parser.parse_args().kills
    env = {"STEP_MS": str(STEP_MS)}
    # A plain script reports no steps, so repeated kills look like a script that only fails: both
    # systems are allowed many restarts.
    flags = ("--fruitless-restarts", "100", "--host-failures", "100")
    figures = []
    for start in (
        lambda: torchrun(3, env),
        lambda: elasticrun(3, how="plain", flags=flags, env=env),
    ):
        name, _, fulls, note = measure(start, 3, kills)
        figures.append(Figure(name, ALL, "s", tuple(fulls), note))
    report("plain_restart", figures, baseline="torchrun")


if __name__ == "__main__":
    main()
