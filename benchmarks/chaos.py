"""Train through an hour of faults by plan and seed, and judge what happened.

    python -m benchmarks.chaos --plan benchmarks/plans/hour.yaml
    python -m benchmarks.chaos --plan benchmarks/plans/hosts.yaml     hosts in namespaces; root

Kills and stops workers, agents and drivers, fills the disk, cuts and slows links, sends rogue
clients. Ends with 1 if an objective of the plan was missed, with 75 if it cannot be tried here. The
plans' fields are described in `tests/chaos/plan.py`, the faults in `tests/chaos`.
"""

from __future__ import annotations

import subprocess
import sys


def main() -> int:
    """Run the plan; return the exit status."""
    argv = [sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
    return subprocess.run(argv, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
