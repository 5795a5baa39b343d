"""The examples run as their first lines say, and the demonstration shows what it promises."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo import RecordedStep, summarise
from tests.support.job import ROOT, Hosts, elasticrun

EXAMPLES = ROOT / "examples"


def accuracy(output: str) -> float:
    found = re.search(r"accuracy ([0-9.]+)%", output)
    assert found, output
    return float(found[1])


@pytest.mark.slow
def test_digits_learns_on_two_workers_what_it_learns_alone() -> None:
    with elasticrun("-np", "2", str(EXAMPLES / "digits.py"), "--epochs", "5") as job:
        assert job.wait(90) == 0, job.describe()
        assert accuracy(job.stdout) > 90
    alone = subprocess.run(
        [sys.executable, EXAMPLES / "digits.py", "--epochs", "3"],
        check=True,
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert accuracy(alone.stdout) > 90


@pytest.mark.slow
def test_char_lm_learns_to_write() -> None:
    script = (str(EXAMPLES / "char_lm.py"), "--characters", "100000")
    with elasticrun("-np", "2", *script) as job:
        assert job.wait(90) == 0, job.describe()
        assert "done after 25 steps; it writes:" in job.stdout
        assert "def " in job.stdout


def test_a_torchrun_script_runs_as_it_is(tmp_path: Path) -> None:
    saved = tmp_path / "line.pt"
    script = (str(EXAMPLES / "plain_ddp.py"), "--steps", "100", "--checkpoint", str(saved))
    with elasticrun("-np", "2", *script) as job:
        assert job.wait(60) == 0, job.describe()
        assert "2 workers from step 0, restart 0" in job.stdout
        assert "done after 100 steps" in job.stdout
        assert saved.exists()


def test_the_discovery_script_prints_the_file_of_hosts(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    args = ("--host-discovery-script", str(EXAMPLES / "discover_hosts.sh"), "-np", "2")
    env = {"HOSTS_FILE": str(hosts.listing)}
    with elasticrun(*args, "sh", "-c", "echo of $WORLD_SIZE", env=env) as job:
        assert job.wait(30) == 0, job.describe()
        assert job.stdout.count("of 2") == 2


@pytest.mark.slow
def test_the_demo_kills_a_worker_and_reports_what_happened() -> None:
    demo = subprocess.Popen(
        [sys.executable, EXAMPLES / "demo.py"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = demo.communicate(timeout=110)
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)  # its agents end with it
            demo.communicate()
    assert demo.returncode == 0, said
    assert "workers  3 -> 2 -> 3" in said
    assert re.search(r"kill to next step  \d+\.\d\d s, in the same 2 processes", said)
    assert re.search(r"steps lost  0 of \d+; done twice: 0", said)
    assert accuracy(said) > 95


# ---- the demonstration's arithmetic ------------------------------------------------------


def history(*steps: tuple[float, int, int, int, int]) -> list[RecordedStep]:
    """(t, step, round, size, pid) each."""
    return [RecordedStep(t, step, number, 0, size, pid) for t, step, number, size, pid in steps]


def test_the_pause_lasts_until_the_slowest_survivor_trains_again() -> None:
    before = [(1.0, 1, 1, 3, pid) for pid in (7, 8, 9)]
    shrunk = [(2.1, 2, 2, 2, 7), (2.3, 2, 2, 2, 8)]
    grown = [(5.0, 3, 3, 3, pid) for pid in (7, 8, 10)]
    summary = summarise(history(*before, *shrunk, *grown), RecordedStep(2.0, 1, 1, 2, 3, 9))
    assert summary.sizes == [3, 2, 3]
    assert summary.pause_s == pytest.approx(0.3)
    assert summary.full_s == pytest.approx(3.0)
    assert (summary.steps, summary.lost, summary.repeated) == (3, 0, 0)
    assert summary.as_promised


def test_lost_and_repeated_steps_are_counted_and_break_the_promise() -> None:
    before = [(1.0, 1, 1, 3, pid) for pid in (7, 8, 9)]
    again = [(2.1, 1, 2, 2, 7), (2.2, 3, 2, 2, 7), (2.2, 3, 2, 2, 8)]
    summary = summarise(history(*before, *again), RecordedStep(2.0, 1, 1, 2, 3, 9))
    assert (summary.steps, summary.lost, summary.repeated) == (3, 1, 1)
    assert summary.full_s is None
    assert not summary.as_promised


def test_a_step_only_the_victim_finished_does_not_count() -> None:
    before = [(1.0, 1, 1, 2, 7), (1.0, 1, 1, 2, 9), (1.1, 2, 1, 2, 9)]
    after = [(2.0, 2, 2, 1, 7)]
    summary = summarise(history(*before, *after), RecordedStep(1.5, 2, 1, 1, 2, 9))
    assert (summary.lost, summary.repeated) == (0, 0)
