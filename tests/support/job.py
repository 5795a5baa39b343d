"""Runs a real `elasticrun` and watches it as a user could: output, event log, step records.

Everything here waits for a condition with a deadline; nothing sleeps to be right. A `RunningJob`
kills what is left of its own processes when it is closed, so a failing test leaves nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.support.json_lines import JsonLines
from tests.support.processes import (
    is_running,
    kill_all,
    processes_with,
    read_each,
    read_words,
)

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "tests" / "e2e" / "jobs"
T = TypeVar("T")
PATIENCE_S = 90.0  # with a job that shares its processors: torch's import takes 4 s of CPU time


def eventually(
    look: Callable[[], T | None], *, within: float, what: str, context: Callable[[], str] = str
) -> T:
    """The first truthy value of `look()`; fails after `within` seconds, saying `what`."""
    deadline = time.monotonic() + within
    while True:
        value = look()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within} s: {what}\n{context()}")
        time.sleep(0.01)


@dataclass(frozen=True)
class StepRecord:
    """One finished step, as the job script wrote it down just before its commit."""

    t: float
    step: int
    round: int
    rank: int
    size: int
    pid: int
    worker: str
    began: float = 0.0  # where the script tells it
    held_up: float = 0.0  # time it took over the time of its work; where the script tells it


def _step_record(line: dict[str, Any]) -> StepRecord:
    return StepRecord(**line)


@dataclass
class RunningJob:
    """A started `elasticrun`, its files and what it has said so far."""

    process: subprocess.Popen[bytes]  # the newest driver's
    run_id: str
    folder: Path
    killed: dict[int, float] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    state_dir: Path = Path()  # of all runs
    _logs: dict[Path, JsonLines[dict[str, Any]]] = field(default_factory=dict)
    _records: dict[Path, JsonLines[StepRecord]] = field(default_factory=dict)

    # ---- what a user sees ----------------------------------------------------------------

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    @property
    def run_dir(self) -> Path:
        return (self.state_dir if self.state_dir.name else self.folder / "state") / self.run_id

    def events(self, *names: str) -> list[dict[str, Any]]:
        """The event log so far, or those events of it that have one of these names."""
        path = self.run_dir / "events.jsonl"
        log = self._logs.setdefault(path, JsonLines(path, dict))
        return [e for e in log.read() if not names or e["event"] in names]

    def rounds(self) -> list[int]:
        """World sizes of the completed rounds, in order."""
        return [e["size"] for e in self.events("round_completed")]

    def steps(self) -> list[StepRecord]:
        """All step records so far, by time."""
        found: list[StepRecord] = []
        for path in (self.folder / "steps").glob("*.jsonl"):
            of_worker = self._records.setdefault(path, JsonLines(path, _step_record))
            found += of_worker.read()
        return sorted(found, key=lambda r: r.t)

    def live(self) -> dict[int, StepRecord]:
        """The newest record of each process that still lives."""
        newest = {r.pid: r for r in self.steps()}
        return {pid: r for pid, r in newest.items() if self._is_ours(pid)}

    def describe(self) -> str:
        """Enough of everything to understand a failed wait."""
        events = "\n".join(json.dumps(e) for e in self.events()[-25:])
        said = f"--- stdout\n{self.stdout[-2000:]}\n--- stderr\n{self.stderr[-5000:]}"
        return f"{said}\n--- events\n{events}"

    # ---- waiting and acting --------------------------------------------------------------

    def until(self, look: Callable[[], T | None], what: str, within: float = PATIENCE_S) -> T:
        """Wait for a condition while the job runs."""

        def look_while_running() -> T | None:
            value = look()
            if not value and self.process.poll() is not None:
                value = look()
                if not value:
                    raise AssertionError(
                        f"job ended ({self.process.returncode}) before: {what}\n{self.describe()}"
                    )
            return value

        return eventually(look_while_running, within=within, what=what, context=self.describe)

    def until_without_driver(self, look: Callable[[], T | None], what: str) -> T:
        """Wait for a condition while no driver lives."""
        return eventually(look, within=PATIENCE_S, what=what, context=self.describe)

    def until_size(
        self, size: int, within: float = PATIENCE_S, steps: int = 2
    ) -> dict[int, StepRecord]:
        """Wait until `size` live workers each finished `steps` steps in one world of that size.

        Only the newest world counts: one that the event log has, though nobody may have finished
        a step in it yet, makes those before it history.
        """

        def look() -> dict[int, StepRecord] | None:
            newest = max((e["round"] for e in self.events("round_completed")), default=None)
            of_pid: dict[int, list[StepRecord]] = {}
            for record in self.steps():
                if record.round == newest and record.size == size:
                    of_pid.setdefault(record.pid, []).append(record)
            full = {pid: rs[-1] for pid, rs in of_pid.items() if len(rs) >= steps}
            alive = all(pid not in self.killed and is_running(pid) for pid in full)
            return full if len(full) == size and alive else None

        return self.until(look, f"{size} workers training together", within)

    def kill(self, pid: int, sig: int = signal.SIGKILL) -> float:
        """Send a signal to one of this job's processes; returns when (unix seconds)."""
        now = time.time()
        os.kill(pid, sig)
        if sig == signal.SIGKILL:
            self.killed[pid] = now
        return now

    def kill_driver(self) -> None:
        """Kill the driver and wait until it is gone; its agents and workers may live on."""
        self.process.kill()
        self.process.wait(10)

    def start(self, *args: str, stderr: str = "stderr") -> None:
        """Start `elasticrun` for this run again; its output follows that of the last one.

        `stderr`: the name of the file for its lines.
        """
        argv = [
            *(sys.executable, "-m", "launcher.cli"),
            *("--run-id", self.run_id, "--state-dir", str(self.run_dir.parent)),
            *args,
        ]
        with (self.folder / "stdout").open("ab") as out, (self.folder / stderr).open("ab") as err:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self.environ,
                cwd=self.folder,
            )

    def wait(self, within: float = PATIENCE_S) -> int:
        """The exit status of `elasticrun`."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within} s\n{self.describe()}") from None

    def processes(self) -> list[psutil.Process]:
        """Every process on this machine that carries this job's run id."""
        return processes_with(f"ELASTIC_RUN_ID={self.run_id}", f"TEST_RUN_ID={self.run_id}")

    def agents(self) -> list[int]:
        """Pids of this job's agents that live."""
        return [
            pid
            for pid in (e["pid"] for e in self.events("agent_started"))
            if "launcher.agent" in read_words(pid, "cmdline") and self._is_ours(pid)
        ]

    def _is_ours(self, pid: int) -> bool:
        """Whether a process of this job lives; a stranger may have the number of a dead one."""
        mark = f"TEST_RUN_ID={self.run_id}"
        return mark in read_words(pid, "environ") and is_running(pid)

    def assert_nothing_left(self, within: float = 10.0) -> None:
        """No process, file with a token, or endpoint file of this job is left."""
        eventually(
            lambda: not self.processes(),
            within=within,
            what="every process of the job is gone",
            context=lambda: str(read_each(self.processes(), psutil.Process.cmdline)),
        )
        left = [p.name for p in self.run_dir.glob("*") if p.name.startswith(("token", "endpoint"))]
        assert left == [], left

    def close(self) -> None:
        """Kill what is left; only processes that carry this job's own id."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        kill_all(self.processes)


@contextlib.contextmanager
def elasticrun(
    *args: str,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    state_dir: Path | None = None,
    stderr: int | None = None,
    inside: tuple[str, ...] = (),
) -> Iterator[RunningJob]:
    """Start `elasticrun ARGS…` in a folder of its own; whatever is left is killed at the end.

    `stderr`: a descriptor, in place of a file in that folder. `inside`: a command that becomes
    `elasticrun`, whose words come after its own.
    """
    run_id = f"t{uuid.uuid4().hex[:10]}"
    with tempfile.TemporaryDirectory(prefix="elastic-e2e-") as name:
        folder = Path(name)
        (folder / "steps").mkdir()
        full = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("ELASTIC", "PYTEST"))},
            "TEST_RUN_ID": run_id,
            "STEP_RECORDS": str(folder / "steps"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            **(env or {}),
        }
        argv = [
            *(*inside, sys.executable, "-m", "launcher.cli"),
            *("--run-id", run_id, "--state-dir", str(state_dir or folder / "state")),
            *args,
        ]
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err if stderr is None else stderr,
                env=full,
                cwd=cwd or folder,
            )
        job = RunningJob(process, run_id, folder, {}, full, args, state_dir or folder / "state")
        try:
            yield job
        finally:
            job.close()


class Hosts:
    """A discovery script whose answer a test changes at will."""

    def __init__(self, folder: Path, *hosts: str) -> None:
        self.listing = folder / "hosts"
        self.script = folder / "discover.sh"
        self.set(*hosts)
        self.script.write_text(f"#!/bin/sh\nexec cat '{self.listing}'\n")
        self.script.chmod(0o755)

    def set(self, *hosts: str) -> None:
        """From now on the script prints these lines (swapped in one go)."""
        fresh = self.listing.with_suffix(".new")
        fresh.write_text("".join(f"{h}\n" for h in hosts))
        fresh.replace(self.listing)


def assert_no_step_lost_or_repeated(job: RunningJob, last: int) -> None:
    """Every step 1 … last was finished, in one round only, and nobody went backwards.

    A step that only a process killed in that same round had finished does not count: its state died
    with it, so the others rightly do that step.
    """
    records = job.steps()
    ends = {pid: max(r.round for r in records if r.pid == pid) for pid in {r.pid for r in records}}
    rounds_of: dict[int, set[int]] = {}
    for record in records:
        died_in_it = record.pid in job.killed and ends[record.pid] == record.round
        if not died_in_it:
            rounds_of.setdefault(record.step, set()).add(record.round)
    missing = [s for s in range(1, last + 1) if s not in rounds_of]
    assert missing == [], f"steps lost: {missing}"
    twice = {s: sorted(r) for s, r in rounds_of.items() if len(r) > 1}
    first = dict(list(twice.items())[:10])
    assert first == {}, f"{len(twice)} steps repeated in several rounds, the first ones: {first}"
    by_process: dict[int, list[int]] = {}
    for record in records:
        by_process.setdefault(record.pid, []).append(record.step)
    for pid, steps in by_process.items():
        assert steps == sorted(set(steps)), f"process {pid} repeated or went back: {steps}"
