"""The systems that benchmarks compare, each running the same training script.

A `System` is a running job that writes step records; the benchmarks only read those and look at
the processes. Only processes started here are signalled, each by its pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

ROOT = Path(__file__).resolve().parents[1]
TRAIN = str(ROOT / "benchmarks" / "train.py")
T = TypeVar("T")


@dataclass
class System:
    """A running job and the folder its step records go to."""

    name: str
    process: subprocess.Popen[bytes]
    records_dir: Path

    def records(self) -> list[dict[str, Any]]:
        """Return all step records so far, by time."""
        found = []
        for path in self.records_dir.glob("*.jsonl"):
            lines = path.read_text().splitlines(keepends=True)
            found += [json.loads(line) for line in lines if line.endswith("\n")]
        return sorted(found, key=lambda r: float(r["t"]))

    def training(self, size: int) -> set[int]:
        """Return the live pids that finished steps together in the newest round of that size."""
        records = self.records()
        if not records:
            return set()
        newest = max(r["round"] for r in records)
        pids = {r["pid"] for r in records if r["round"] == newest and r["size"] == size}
        alive = {pid for pid in pids if psutil.pid_exists(pid)}
        return alive if len(alive) == size else set()

    def until(self, look: Callable[[], T | None], what: str, within: float = 90.0) -> T:
        """Return the first true answer; raises TimeoutError with the tail of the output."""
        deadline = time.monotonic() + within
        while not (value := look()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                output = (self.records_dir / "output").read_text(errors="replace")[-1500:]
                raise TimeoutError(f"{self.name}: no {what} within {within} s\n{output}")
            time.sleep(0.005)
        return value

    def agent(self) -> psutil.Process:
        """Return the process of elasticrun's agent on this machine."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if "launcher.agent" in child.cmdline())

    def end(self) -> None:
        """Terminate the job, then kill what is left of it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [*psutil.Process(self.process.pid).children(recursive=True)]
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(5)


def cpu_of(process: psutil.Process) -> float:
    """Return the processor time of a process so far; seconds."""
    return float(sum(process.cpu_times()[:2]))


def free_port() -> int:
    """Return a TCP port on which nobody listens at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(name: str, argv: list[str], env: dict[str, str], *, count: int = 1) -> Iterator[System]:
    """Start a system; with `count` > 1 its command that many times (torchrun's nodes)."""
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as folder:
        records = Path(folder)
        full = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
            "RECORDS": folder,
            **env,
        }
        with (records / "output").open("wb") as output:
            started = [
                subprocess.Popen(
                    [word.replace("{records}", folder) for word in argv],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=full,
                    cwd=ROOT,
                )
                for _ in range(count)
            ]
        systems = [System(name, process, records) for process in started]
        try:
            yield systems[0]
        finally:
            for system in systems:
                system.end()


def elasticrun(
    workers: int, *, how: str = "elastic", flags: tuple[str, ...] = (), env: dict[str, str]
) -> contextlib.AbstractContextManager[System]:
    """Start elasticrun on the elastic or the plain training script."""
    argv = [sys.executable, "-m", "launcher.cli", "-np", str(workers), "--state-dir", "{records}"]
    return running(f"elasticrun ({how})", [*argv, *flags, "--", TRAIN], {"HOW": how, **env})


def torchrun(workers: int, env: dict[str, str]) -> contextlib.AbstractContextManager[System]:
    """Start torchrun on one node, in its fastest form: no TCPStore shared between attempts."""
    argv = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(workers), "--max-restarts", "100", "--monitor-interval", "0.1"),
        TRAIN,
    ]
    more = {"HOW": "plain", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **env}
    return running("torchrun", argv, more)


def torchrun_nodes(workers: int, env: dict[str, str]) -> contextlib.AbstractContextManager[System]:
    """Start torchrun with 1:2 nodes on this machine, `workers` split over the two."""
    argv = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
        *("--rdzv-id", "bench", "--nproc-per-node", str(workers // 2)),
        *("--max-restarts", "100", "--monitor-interval", "0.1", "--local-addr", "127.0.0.1"),
        TRAIN,
    ]
    more = {"HOW": "plain", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **env}
    return running("torchrun 1:2 nodes", argv, more, count=2)


def floor(workers: int, step_ms: float) -> contextlib.AbstractContextManager[System]:
    """Start the in-process floor."""
    script = str(ROOT / "benchmarks" / "peers" / "floor.py")
    return running("floor", [sys.executable, script, "{records}", str(workers), str(step_ms)], {})


def kill(pid: int) -> float:
    """Kill a process with SIGKILL; return the time, in unix seconds."""
    now = time.time()
    os.kill(pid, signal.SIGKILL)
    return now
