"""Samples of this machine and of processes on it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from elastic_driver.words.progress import decode_usage
from launcher.agent.host import SAMPLE_S, Gpus, HostSampler, UsageThread
from tests.support.job import eventually

BUSY = "b = bytearray(60_000_000)\nprint('up', flush=True)\nwhile True: pass"


@contextmanager
def running(script: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has printed its first line."""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_a_process_that_computes_is_seen_with_its_memory_and_an_ended_one_is_left_out() -> None:
    sampler = HostSampler()
    with running(BUSY) as busy:
        sampler.sample({"a.0.1": busy.pid})
        used_before = _cpu(busy.pid)
        found = eventually(
            lambda: _cpu(busy.pid) - used_before > 0.2 and sampler.sample({"a.0.1": busy.pid}),
            within=30.0,
            what="it has computed",
        )
    usage = found.workers["a.0.1"]
    assert usage.memory > 60_000_000
    assert 0.0 < usage.cpu < 1.5, "it has one thread"
    assert 0.0 < found.host.cpu <= 1.0
    memory, disk = psutil.virtual_memory(), psutil.disk_usage("/")
    assert found.host.memory_total <= memory.total
    assert found.host.disk_total == disk.total
    assert 0 < found.host.memory_used < found.host.memory_total
    assert sampler.sample({"a.0.1": busy.pid}).workers == {}


def test_cpu_and_memory_are_within_five_percent_of_an_independent_sampler() -> None:
    sampler = HostSampler()
    with running(BUSY) as busy:
        sampler.sample({"a.0.1": busy.pid})
        before, began = _ticks(busy.pid), time.monotonic()
        eventually(lambda: _ticks(busy.pid) - before > 150, within=60.0, what="1.5 s of work")
        found = sampler.sample({"a.0.1": busy.pid}).workers["a.0.1"]
        used = (_ticks(busy.pid) - before) / os.sysconf("SC_CLK_TCK")
        assert found.cpu == pytest.approx(used / (time.monotonic() - began), rel=0.05)
        mapped = Path(f"/proc/{busy.pid}/smaps_rollup").read_text().splitlines()
        (resident,) = (line.split()[1] for line in mapped if line.startswith("Rss:"))
        assert found.memory == pytest.approx(int(resident) * 1024, rel=0.05)


def _ticks(pid: int) -> int:
    """Processor time as the kernel counts it, without psutil."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_the_peak_of_memory_stays_when_the_memory_is_given_back(tmp_path: Path) -> None:
    script = "b = bytearray(80_000_000)\ndel b\nprint('up', flush=True)\ninput()"
    with running(script) as process:
        found = HostSampler().sample({"a.0.1": process.pid}).workers["a.0.1"]
    assert found.memory < 60_000_000
    assert found.memory_peak is not None
    assert found.memory_peak > 80_000_000


def test_what_a_process_writes_to_storage_is_counted_from_the_second_look_on(
    tmp_path: Path,
) -> None:
    script = f"""
import os
print('up', flush=True)
file = os.open({str(tmp_path / "data")!r}, os.O_CREAT | os.O_WRONLY)
while True:
    os.pwrite(file, bytes(2_000_000), 0)
    os.fsync(file)
"""
    sampler = HostSampler()
    with running(script) as writer:
        first = sampler.sample({"a.0.1": writer.pid})
        assert first.workers["a.0.1"].io_write is None, "one look tells no speed"

        def writes() -> bool:
            return (sampler.sample({"a.0.1": writer.pid}).workers["a.0.1"].io_write or 0.0) > 0.0

        eventually(writes, within=30.0, what="its writes are seen")


def test_pressure_is_what_the_kernel_says_and_absent_where_it_says_nothing() -> None:
    pressure = HostSampler().sample({}).host.pressure
    for resource in ("cpu", "memory", "io"):
        found = getattr(pressure, resource)
        if Path(f"/proc/pressure/{resource}").exists():
            assert 0.0 <= found <= 1.0
        else:
            assert found is None


def _cpu(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def test_samples_cost_less_than_half_a_percent_of_a_core() -> None:
    sampler = HostSampler()
    workers = {f"a.{slot}.1": os.getpid() for slot in range(8)}
    sampler.sample(workers)
    before = time.process_time()
    for _ in range(20):
        sampler.sample(workers)
    assert (time.process_time() - before) / 20 < 0.005 * SAMPLE_S


def test_the_thread_offers_each_sample_once() -> None:
    thread = UsageThread(lambda: {"a.0.1": os.getpid()}, interval=0.05)
    thread.start()
    try:
        value = eventually(thread.take, within=30.0, what="a sample")
    finally:
        thread.close()
    assert decode_usage(value).workers["a.0.1"].memory > 0


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
