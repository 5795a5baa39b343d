"""Lose hosts of a small ssh cluster, made of network namespaces: time until the others train on.

Needs root; without it this says so and measures nothing. The faults and their names are those of
`tests.cluster.trials`, which also checks that no step is lost or done twice.

    python -m benchmarks.hosts [FAULT …] [--times N]
"""

from __future__ import annotations

import subprocess
import sys

CANNOT = 75  # the trials say why


def main() -> int:
    """Run the trials; return 1 if something was wrong."""
    argv = [sys.executable, "-m", "tests.cluster.trials", *sys.argv[1:]]
    status = subprocess.run(argv, check=False).returncode
    return 0 if status == CANNOT else status


if __name__ == "__main__":
    sys.exit(main())
