"""Workers run on the processors that `--bind` gives to their slots."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.agent.environment import choose, in_words, usable_cores
from tests.support.job import ROOT

SHOW = """
import os, threading
import torch
found = []
thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
thread.start(); thread.join()
cpus = sorted(os.sched_getaffinity(0))
assert set(cpus) == found[0]
print("slot", os.environ["LOCAL_RANK"], *cpus, flush=True)
"""
ALLOWED = sorted(os.sched_getaffinity(0))


def launch(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "show.py").write_text(SHOW)
    argv = [sys.executable, "-m", "launcher.cli", "--state-dir", str(tmp_path / "state")]
    return subprocess.run(
        [*argv, "--run-id", "b", *args, "show.py"],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("warm", ["1", "0"])
@pytest.mark.skipif(len(ALLOWED) < 2, reason="one processor cannot be shared out")
def test_each_worker_has_cores_of_its_own(warm: str, tmp_path: Path) -> None:
    done = launch(tmp_path, "--bind", "core", "--warm", warm, "-np", "2")
    assert done.returncode == 0, done.stderr
    cores = usable_cores()
    for slot in (0, 1):
        cpus = choose("core", slot, 2, cores)
        assert f"slot {slot} {' '.join(map(str, sorted(cpus)))}\n" in done.stdout
        events = (tmp_path / "state" / "b" / "events.jsonl").read_text().splitlines()
        started = [e for e in map(json.loads, events) if e["event"] == "worker_started"]
        said = f"bound to CPUs {in_words(cpus)}"
        assert any(e["slot"] == slot and e["reason"].endswith(said) for e in started)


def test_without_the_option_and_on_one_node_workers_have_all(tmp_path: Path) -> None:
    every = " ".join(map(str, ALLOWED))
    assert f"slot 0 {every}\n" in launch(tmp_path, "-np", "1").stdout
    if len({core.node for core in usable_cores()}) == 1:
        assert f"slot 0 {every}\n" in launch(tmp_path, "--numa-binding", "node", "-np", "1").stdout


@pytest.mark.skipif(len(ALLOWED) < 2, reason="one processor cannot be left out")
def test_what_the_agent_may_not_use_is_not_given_to_workers(tmp_path: Path) -> None:
    os.sched_setaffinity(0, ALLOWED[:1])
    try:
        done = launch(tmp_path, "--bind", "core", "-np", "2")
    finally:
        os.sched_setaffinity(0, ALLOWED)
    assert sorted(line.partition(":")[2] for line in done.stdout.splitlines()) == [
        f"slot {slot} {ALLOWED[0]}" for slot in (0, 1)
    ], done.stderr


def test_the_dry_run_shows_the_processors_of_this_machine(tmp_path: Path) -> None:
    done = launch(tmp_path, "--bind", "core", "-np", "1", "--dry-run")
    assert f"slot 0 here: CPUs {in_words(choose('core', 0, 1, usable_cores()))}" in done.stdout
    assert "binding     core, from the topology of each host" in done.stdout
