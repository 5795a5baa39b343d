"""Runs jobs on one GPU, several workers sharing it; skips where there is none, and says why.

NCCL refuses two ranks on one device of one host, so each worker poses as a host of its own
(NCCL_HOSTID) and they talk over loopback. REHEARSE=1 runs the same tests with gloo on the
processor: that tells whether the tests are right, and nothing about NCCL.

What the tests measure is printed as a table at the end. Where a test fails, the stacks of its
workers (if py-spy is there, or PY_SPY names it), the output and the events of its job are added to
the file FAILED_JOBS, if that is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.job import RunningJob, elasticrun

JOBS = Path(__file__).parent / "jobs"
ON_CPU = os.environ.get("REHEARSE") == "1"
START_S = 60.0  # for the first CUDA contexts and communicators
STACK_S = 8.0  # for py-spy to show one process

Run = Callable[..., AbstractContextManager[RunningJob]]
Note = Callable[[str, str], None]
_figures: list[tuple[str, str]] = []


def why_not() -> str:
    """Why these tests cannot run here; empty where they can."""
    if ON_CPU:
        return ""
    if not dist.is_nccl_available():
        return "torch is built without NCCL"
    if not torch.cuda.is_available():
        return "no NVIDIA GPU is visible"
    return ""


@pytest.fixture
def run() -> Run:
    """`elasticrun` with the variables that let its workers share the GPU."""
    env = {
        "DEVICE": "cpu" if ON_CPU else "cuda",
        "BACKEND": "gloo" if ON_CPU else "nccl",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }

    @contextlib.contextmanager
    def start(*args: str, **more: str) -> Iterator[RunningJob]:
        with elasticrun(*args, env={**env, **more}) as job:
            try:
                yield job
            except BaseException:
                _write_down(job)
                raise

    return start


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """`note(what, value)` adds a line to the table of figures."""

    def add(what: str, value: str) -> None:
        _figures.append((what, value))
        print(f"{request.node.name}: {what}: {value}")

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of figures."""
    if _figures:
        terminalreporter.section("figures")
        width = max(len(what) for what, _ in _figures)
        for what, value in _figures:
            terminalreporter.line(f"{what:<{width}}  {value}")


def _write_down(job: RunningJob) -> None:
    """Add what is known of a job whose test fails to the file FAILED_JOBS."""
    name = os.environ.get("FAILED_JOBS")
    if not name:
        return
    events = "\n".join(json.dumps(event) for event in job.events())
    with Path(name).open("a") as file:
        file.write(f"\n===== {os.environ.get('PYTEST_CURRENT_TEST')}\n")
        file.write(f"--- stdout\n{job.stdout[-20_000:]}\n--- stderr\n{job.stderr[-60_000:]}\n")
        file.write(f"--- events\n{events[-60_000:]}\n--- stacks\n")
        spy = os.environ.get("PY_SPY") or shutil.which("py-spy")
        for process in job.processes() if spy else []:
            args = [str(spy), "dump", "--native", "--pid", str(process.pid)]
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = subprocess.run(
                    args, capture_output=True, text=True, timeout=STACK_S, check=False
                )
                file.write(f"{done.stdout}{done.stderr}\n")
