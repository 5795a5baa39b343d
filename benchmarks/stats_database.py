"""The processor time that a driver spends on the statistics of a large job.

A simulated job hands its samples to the writer as a driver does, each second of its time. The time
goes faster than the clock, so the database gets the rows of minutes in seconds. All processor time
of the process counts, that of making the samples left out.

    python -m benchmarks.stats_database [--workers N] [--hosts N] [--seconds S] [--stats-db URL]
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path

from elastic_driver.brain.grants import Kind, Speed
from elastic_driver.brain.store import statistics_writer as writer
from elastic_driver.brain.store.address import Address, read_address
from elastic_driver.brain.store.database import Database
from elastic_driver.brain.store.records import FINE, HOUR, JobKey, Record, Sample
from elastic_driver.features.statistics.measurements import MOST_USAGE_S, USAGE_S, WORKERS_PER_S
from elastic_driver.words.progress import HostUsage, Measured, StepTimes, WorkerMeasured

PAUSE_S = 0.05  # of the writer, whose 5 s are 5 s of the job
GIB = 2**30
LONGEST_S = 300.0


def seconds_between_looks(workers: int) -> int:
    """Seconds from one look of a driver at the usage of workers and hosts to the next one."""
    return math.ceil(max(USAGE_S, min(workers / WORKERS_PER_S, MOST_USAGE_S)))


def measured(second: int, workers: int, hosts: int) -> Measured:
    """The job after so many seconds; workers and hosts are known as often as in a driver."""
    whole = second % seconds_between_looks(workers) == 0
    wave = 1 + (second % 7) / 10
    worker = WorkerMeasured(
        step=10 * second,
        steps_per_s=10 * wave,
        samples_per_s=320 * wave,
        memory=GIB + second,
        memory_peak=GIB + second,
        cpu=wave,
        io_read=0.0,
        io_write=wave,
        times=StepTimes(data=0.01, compute=0.05, exchange=0.03 * wave, commit=0.001),
    )
    host = HostUsage(
        cpu=wave / 2,
        memory_used=20 * GIB + second,
        memory_total=64 * GIB,
        disk_used=GIB,
        disk_total=9 * GIB,
        net_in=wave,
        net_out=wave,
    )
    per_host = max(1, workers // hosts)
    names = [f"host{n // per_host}.{n % per_host}.1" for n in range(workers)] if whole else []
    return Measured(
        step=10 * second,
        steps_per_s=10 * wave,
        samples_per_s=320 * wave * workers,
        samples=320 * second * workers,
        numbers={"loss": 1 / (second + 1)},
        workers=dict.fromkeys(names, worker),
        hosts={f"host{n}": host for n in range(hosts)} if whole else {},
    )


def main() -> int:
    """Print the share of a core."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--hosts", type=int, default=125)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--stats-db", type=read_address, help="default: a new file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "statistics.db"
        address = options.stats_db or Address(file=str(file))
        spent, rows = run(address, options.workers, options.hosts, options.seconds)
        size = file.stat().st_size if file.exists() else 0
    share = spent / options.seconds
    seconds = options.seconds
    print(f"{options.workers} workers on {options.hosts} hosts, {seconds} s of the job")
    print(f"{share:.1%} of a core; {rows} rows of 5 s, {size / seconds / 1024:.0f} KiB/s")
    return 0


def run(address: Address, workers: int, hosts: int, seconds: int) -> tuple[float, int]:
    """Write the statistics of so many seconds; return the processor time, and the rows of 5 s."""
    said: list[str] = []
    record = Record(Kind(name="simulated", command="c"))
    key = JobKey("simulated", time.time())
    job = writer.StatisticsWriter(address, key, record, said.append, pause=PAUSE_S)
    began = time.time() // HOUR * HOUR
    samples = []
    for second in range(seconds):
        speed = Speed(
            round=1, size=workers, hosts=hosts, worker="w", steps=10 * second, at=float(second)
        )
        found = measured(second, workers, hosts)
        samples.append(Sample(began + second, workers, found, speed, 10**8, 32 * workers))
    before = time.process_time()
    job.start()
    for number, sample in enumerate(samples):
        job.take(sample)
        while number % FINE == FINE - 1 and job.waiting:
            time.sleep(PAUSE_S / 5)
    job.close(0)
    job._thread.join(LONGEST_S)
    spent = time.process_time() - before
    if said or job._thread.is_alive():
        raise RuntimeError(said[0] if said else f"not written within {LONGEST_S:g} s")
    return spent, len(Database(address).rows(key, FINE))


if __name__ == "__main__":
    raise SystemExit(main())
