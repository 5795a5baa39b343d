"""`python -m tests.horovod.seeds --seeds N`: play N seeds, in jobs of 2, 3 and 4 ranks.

Calls in other orders and of other branches on each rank, disagreements, names that are pending
twice, and tensors that a rank forgets: the result is right, or the error names the tensor.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.support.job import RunningJob, elasticrun

STALL = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
SIZES = (2, 3, 4)


def play(size: int, first: int, count: int) -> str:
    """Play seeds in one job of `size` workers; return what was wrong, or nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ("-m", "tests.horovod.seeds.worker", str(folder), str(first), str(count))
        options = ("-np", str(size), "--max-restarts", "0")
        with elasticrun(*options, *words, env=STALL) as job:
            code = job.wait(within=90 + 10 * count)
            return _wrong(job, code, folder, size, count)


def _wrong(job: RunningJob, code: int, folder: Path, size: int, count: int) -> str:
    told = [path.read_text() for path in sorted(folder.glob("*.wrong"))]
    right = [path.read_text() for path in folder.glob("*.ok")]
    if code == 0 and not told and right == [str(count)] * size:
        return ""
    return "\n".join([f"{size} ranks, exit status {code}", *told, job.describe()])


def main() -> int:
    """Play the seeds, a third of them with each number of ranks; the first failure ends it."""
    parser = argparse.ArgumentParser(prog="python -m tests.horovod.seeds", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to play")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--ranks", type=int, help="only with so many ranks")
    options = parser.parse_args()
    sizes = SIZES if options.ranks is None else (options.ranks,)
    for number, size in enumerate(sizes):
        count = (options.seeds + number) // len(sizes)
        began = time.monotonic()
        if wrong := play(size, options.first, count):
            print(wrong)
            return 1
        print(f"{size} ranks: {count} seeds right, {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
