"""How much longer things take than the processor works on them, as the kernel counts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_driver.worker.heartbeat import training_progress as progress
from elastic_driver.worker.heartbeat.training_progress import (
    CpuSlowdown,
    CpuTime,
    StepCost,
    StepSamples,
)
from tests.support.slowing import Quota

SPIN = """
import sys, time
from elastic_driver.worker.heartbeat.training_progress import CpuSlowdown
sys.stdin.readline()
factor = CpuSlowdown()
factor.factor()
until = time.process_time() + 0.1
while time.process_time() < until:
    pass
print(factor.factor())
"""


def test_a_process_that_is_held_to_a_part_of_a_processor_is_stretched_as_much() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        quota = Quota(child.pid, 0.2)
    except OSError:
        child.kill()
        child.communicate()
        pytest.skip("no control group with a quota can be made here")
    try:
        said, _ = child.communicate("go\n", timeout=60)
    finally:
        child.kill()
        child.wait()
        quota.end()
    assert float(said) > 3, "a fifth of a processor takes five times as long, noise aside"


def account(monkeypatch: pytest.MonkeyPatch, *times: tuple[float, float]) -> None:
    """Have the kernel say this, one after the other."""
    said = iter([CpuTime(*time) for time in times])
    monkeypatch.setattr(progress, "read_cpu_time", lambda _main_thread: next(said))


def test_the_newest_stretch_of_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    account(monkeypatch, (1.0, 5.0), (2.0, 5.0), (2.001, 9.0), (3.0, 8.0))
    one = CpuSlowdown()
    assert [one.factor() for _ in range(4)] == [1.0, 1.0, 1.0, 4.0], "0.001 s tell nothing"


def test_where_the_kernel_does_not_count_nothing_is_stretched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(progress, "_MAIN_THREAD", tmp_path / "none")
    slowdown = CpuSlowdown()
    assert [slowdown.factor(), slowdown.factor()] == [1.0, 1.0]


def test_a_thread_of_this_process_is_accounted_for() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not count")
    assert progress.read_cpu_time(progress._MAIN_THREAD).ran > 0


def test_the_exchange_is_told_as_long_as_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    account(monkeypatch, (1.0, 1.0), (2.0, 4.0))
    samples = StepSamples()
    samples.collect(1.0)
    samples.record(1, lambda: StepCost(0.5, 0.2, 0.01))
    (told,) = samples.collect(1.0)
    assert told.exchange == pytest.approx(0.04)
    assert (told.compute, told.one_pass) == (0.5, 0.2), "what the clock has measured stays"
