"""What a job did in the middle of faults: gaps between steps, steps lost, processes that grow."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.chaos.plan import Objectives
from tests.support.job import StepRecord

_STATE, _INODE, _ESTABLISHED = 3, 9, "01"  # columns and a value of /proc/PID/net/tcp


class Size(NamedTuple):
    """What a process has at a quiet moment; memory is in MiB.

    A client of the job has several connections, and opens some of them late. So those that are
    open at both ends are counted by themselves.
    """

    descriptors: int
    connections: int
    threads: int
    memory: int

    @classmethod
    def of(cls, process: psutil.Process) -> Size:
        """The size of a process; raises psutil.NoSuchProcess."""
        with process.oneshot():
            memory = process.memory_info().rss // 2**20
            try:
                open_ones = open_connections(process.pid)
            except OSError as error:  # the files of an ended process fail in several ways
                raise psutil.NoSuchProcess(process.pid) from error
            others = process.num_fds() - open_ones
            return cls(others, open_ones, process.num_threads(), memory)


def open_connections(pid: int) -> int:
    """Return how many TCP connections of a process are open at both ends.

    psutil knows those of our own network namespace only; the process may be in another one.
    """
    own = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            own.add(str(descriptor.readlink()))
    lines = (
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    )
    return sum(line[_STATE] == _ESTABLISHED and f"socket:[{line[_INODE]}]" in own for line in lines)


@dataclass
class Growth:
    """Each driver and agent, when it was seen for the second time and for the last.

    The first time may be before all clients have found it.
    """

    first: dict[int, Size] = field(default_factory=dict)
    last: dict[int, Size] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def see(self, processes: Mapping[int, str]) -> None:
        """Note the sizes of these processes; the moment is a quiet one."""
        for pid, name in processes.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                size = Size.of(psutil.Process(pid))
                if pid in self.last:
                    self.first.setdefault(pid, size)
                self.last[pid], self.names[pid] = size, name

    def beyond(self, objectives: Objectives) -> list[str]:
        """What has grown by more than it may."""
        allowed = Size(
            *(objectives.descriptors, objectives.connections),
            *(objectives.threads, objectives.memory),
        )
        return [
            f"{self.names[pid]} {pid}: {kind} {before} → {after}, at most {most} more allowed"
            for pid, first in self.first.items()
            for kind, before, after, most in zip(
                Size._fields, first, self.last[pid], allowed, strict=True
            )
            if after > before + most
        ]

    def most(self) -> Size:
        """The largest growth of each kind, of any process."""
        grown = [
            Size(*(b - a for a, b in zip(first, self.last[pid], strict=True)))
            for pid, first in self.first.items()
        ]
        return Size(*map(max, zip(*grown, strict=True))) if grown else Size(0, 0, 0, 0)


def longest_gap(records: Iterable[StepRecord], began: float, ended: float) -> float:
    """The longest time between two steps of one process within this time; inf: there were none."""
    of_pid: dict[int, list[float]] = {}
    for record in records:
        if began <= record.t <= ended:
            of_pid.setdefault(record.pid, []).append(record.t)
    gaps = [
        after - before
        for times in of_pid.values()
        for before, after in itertools.pairwise([began, *times, ended])
    ]
    return max(gaps, default=math.inf)


def percentile(samples: Sequence[float], part: float) -> float:
    """The sample below which this part of all lies; 0 without samples."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)] if ordered else 0.0
