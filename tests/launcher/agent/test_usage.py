"""Samples of this machine and of processes on it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from elastic_driver.core.measured import decode_usage
from launcher.agent.usage import Gpus, HostSampler, MemoryLimit, UsageThread
from tests.support.job import eventually

BUSY = "b = bytearray(60_000_000)\nprint('up', flush=True)\nwhile True: pass"


def test_a_process_that_computes_is_seen_with_its_memory_and_an_ended_one_is_left_out() -> None:
    sampler = HostSampler()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout is not None
            busy.stdout.readline()
            sampler.sample({"a.0.1": busy.pid})
            used_before = _cpu(busy.pid)
            found = eventually(
                lambda: _cpu(busy.pid) - used_before > 0.2 and sampler.sample({"a.0.1": busy.pid}),
                within=30.0,
                what="it has computed",
            )
        finally:
            busy.kill()
    usage = found.workers["a.0.1"]
    assert usage.memory > 60_000_000
    assert 0.0 < usage.cpu < 1.5, "it has one thread"
    assert 0.0 < found.host.cpu <= 1.0
    memory, disk = psutil.virtual_memory(), psutil.disk_usage("/")
    assert found.host.memory_total <= memory.total
    assert found.host.disk_total == disk.total
    assert 0 < found.host.memory_used < found.host.memory_total
    assert sampler.sample({"a.0.1": busy.pid}).workers == {}


def _cpu(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def test_a_sample_costs_far_less_than_half_a_percent_of_a_core() -> None:
    sampler = HostSampler()
    workers = {f"a.{slot}.1": os.getpid() for slot in range(8)}
    sampler.sample(workers)
    before = time.process_time()
    for _ in range(20):
        sampler.sample(workers)
    assert (time.process_time() - before) / 20 < 0.005 * 5.0


def test_the_thread_offers_each_sample_once() -> None:
    thread = UsageThread(lambda: {"a.0.1": os.getpid()}, interval=0.05)
    thread.start()
    try:
        value = eventually(thread.take, within=30.0, what="a sample")
    finally:
        thread.close()
    assert decode_usage(value).workers["a.0.1"].memory > 0


def test_the_memory_of_a_container_counts_up_to_its_limit(tmp_path: Path) -> None:
    inner = tmp_path / "cgroups" / "pod" / "box"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("1000\n")
    (inner.parent / "memory.current").write_text("700\n")
    (inner.parent / "memory.stat").write_text("anon 400\ninactive_file 100\n")
    own = tmp_path / "own"
    own.write_text("4:memory:/other\n0::/pod/box\n")
    assert MemoryLimit(tmp_path / "cgroups", own).usage() == (600, 1000)
    own.write_text("0::/\n")
    assert MemoryLimit(tmp_path / "cgroups", own).usage() is None
    assert MemoryLimit(tmp_path / "none", tmp_path / "neither").usage() is None


def test_gpus_are_read_through_nvml_and_one_that_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def memory(handle: int) -> SimpleNamespace:
        if handle == 1:
            raise OSError("lost")
        return SimpleNamespace(used=10, total=20)

    nvml = ModuleType("pynvml")
    nvml.__dict__.update(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda _handle: b"H100",
        nvmlDeviceGetUtilizationRates=lambda _handle: SimpleNamespace(gpu=35),
        nvmlDeviceGetMemoryInfo=memory,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (found,) = Gpus().usage()
    assert (found.index, found.name, found.used) == (0, "H100", 0.35)
    assert (found.memory_used, found.memory_total) == (10, 20)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert Gpus().usage() == ()
