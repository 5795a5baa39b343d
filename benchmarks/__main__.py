"""Runs all benchmarks one after the other, each in a process of its own: `make bench`.

    python -m benchmarks [NAME …] [--thorough]

Without `--thorough` each takes a minute or two; the figures are the same, from fewer samples. A
benchmark that fails is named at the end, and the others still run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.common import machine

# Name → its arguments for a quick and for a thorough run, in the order of docs/performance.md.
BENCHMARKS: dict[str, tuple[str, str]] = {
    "recovery": ("--turns 3 --kills 4", "--turns 10 --kills 6"),
    "hosts": ("processes power cut --times 2", "--times 5"),
    "hang": ("--stops 3", "--stops 10"),
    "scale_out": ("--rounds 3", "--rounds 10"),
    "plain_restart": ("--turns 3 --kills 2", "--turns 8 --kills 3"),
    "step_time": ("--blocks 3", "--blocks 20"),
    "meeting": ("--members 8,64,256 --simulated 1000,4000 --turns 3", ""),
    "group_change": ("--ranks 2,8,16 --turns 3", "--turns 10"),
    "exact": ("--blocks 5", ""),
    "journal": ("--rounds 5", ""),
    "stats_database": ("", "--seconds 600"),
    "measured": ("--blocks 5", ""),
    "observed": ("--pairs 6", "--pairs 40"),
    "horovod": ("--blocks 3", ""),
    "auto_scale": ("--slots 4", ""),
    "balance": ("--turns 2", "--turns 5"),
}
LONGEST_S = 1800.0


def main() -> int:
    """Run the named benchmarks, or all; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--thorough", action="store_true", help="more samples; takes an hour")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    print(" · ".join(f"{key} {value}" for key, value in machine().items()))
    failed = []
    for name in options.names or BENCHMARKS:
        arguments = BENCHMARKS[name][options.thorough].split()
        started = time.monotonic()
        argv = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
        try:
            status = subprocess.run(argv, timeout=LONGEST_S, check=False).returncode
        except subprocess.TimeoutExpired:
            status = 124
        print(f"({name}: {time.monotonic() - started:.0f} s)", flush=True)
        if status != 0:
            failed.append(f"{name} ({status})")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
