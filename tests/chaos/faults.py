"""The faults of a plan: each is begun, holds for a while, and ends by itself.

`FAULTS` are those of one machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.support.job import ROOT, RunningJob

DISK_MB = 96  # more than keys (16 MiB), their write-ahead log, and the events of an hour take
FULL_MB = 1024  # more than any disk of a trial has left


@dataclass
class Arena:
    """A job in the middle of its faults."""

    job: RunningJob
    random: Random
    held: float  # seconds
    answers: dict[str, dict[str, int]] = field(default_factory=dict)  # of the server, to rogues
    broken: list[str] = field(default_factory=list)  # what must never happen, and did

    @property
    def worker(self) -> int:
        """The pid of one of the workers that train."""
        return self.random.choice(sorted(self.job.live()))

    @property
    def agent(self) -> int:
        """The pid of one of the agents."""
        return self.random.choice(sorted(self.job.agents()))

    def beside(self, *argv: str) -> list[str]:
        """A command that runs where strangers can reach the job."""
        return list(argv)


def kill_worker(arena: Arena) -> None:
    """A worker dies."""
    arena.job.kill(arena.worker)


def kill_agent(arena: Arena) -> None:
    """An agent dies, and its workers with it."""
    arena.job.kill(arena.agent)


def kill_driver(arena: Arena) -> None:
    """The driver dies, and another one goes on with the job at once."""
    arena.job.kill_driver()
    arena.job.start("--resume")


def stop_worker(arena: Arena) -> None:
    """A worker is stopped for a while; the others wait for it."""
    with _stopped(arena.worker):
        time.sleep(arena.held)


def stop_agent(arena: Arena) -> None:
    """An agent is stopped for a while; it is taken for dead, and its workers end with it."""
    with _stopped(arena.agent):
        time.sleep(arena.held)


def stop_driver(arena: Arena) -> None:
    """The driver is stopped for a while; nobody is to be lost by it."""
    with _stopped(arena.job.process.pid):
        time.sleep(arena.held)


def full_disk(arena: Arena) -> None:
    """The disk of the run's folder is full for a while."""
    filler = arena.job.run_dir.parent / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        for _ in range(FULL_MB):
            file.write(bytes(2**20))
    with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass
    time.sleep(arena.held)
    filler.unlink()
    arena.job.until(lambda: _has_journal(arena.job.stderr) or None, "the journal takes events")


def _has_journal(told: str) -> bool:
    """Whether the driver, by what it has told, writes its journal."""
    return told.rfind("the journal has failed") <= told.rfind("the journal is complete again")


def rogue_clients(arena: Arena) -> None:
    """Rogue clients come for a while."""
    argv = arena.beside(
        *(sys.executable, "-m", "tests.chaos.rogues", str(arena.job.run_dir), str(arena.held)),
        str(arena.random.randrange(10**6)),
    )
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, timeout=arena.held + 120, check=False
    )
    if done.returncode != 0:
        arena.broken.append(f"rogue clients: {done.stdout[-500:]}{done.stderr[-1000:]}")
        return
    for rogue, answers in json.loads(done.stdout).items():
        counted = arena.answers.setdefault(rogue, {})
        for status, number in answers.items():
            counted[status] = counted.get(status, 0) + number


Fault = Callable[[Arena], None]
FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        *(kill_worker, kill_agent, kill_driver, stop_worker, stop_agent, stop_driver),
        *(full_disk, rogue_clients),
    )
}
# Faults by which nobody is to be lost: the world stays as it is.
HARMLESS = ("stop_driver", "full_disk", "rogue_clients")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small disk on this folder; nobody else sees it (see `in_own_mounts`)."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=700", "tmpfs", str(folder)],
        check=True,
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def in_own_mounts() -> None:
    """Become a process whose mounts nobody else sees; does nothing in one that is."""
    if os.environ.get("ELASTIC_TEST_MOUNTS") == "own":
        return
    environ = {**os.environ, "ELASTIC_TEST_MOUNTS": "own"}
    argv = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "tests.chaos"]
    os.execvpe("unshare", [*argv, *sys.argv[1:]], environ)  # noqa: S606


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
