"""Measurements become figures; what is not known becomes none."""

from __future__ import annotations

from elastic_driver.brain.store.records import Sample, figures_of
from elastic_driver.words.progress import HostUsage, Measured, Pressure, WorkerMeasured

HOST = {"cpu": 0.5, "memory_used": 3, "memory_total": 8, "disk_used": 20, "disk_total": 100}


def figures(host: HostUsage, worker: WorkerMeasured) -> dict[tuple[str, str], float]:
    measured = Measured(step=7, hosts={"a": host}, workers={"a.0.1": worker})
    found = figures_of(Sample(1000.0, 1, measured))
    return {(series.subject, series.name): value for series, value in found}


def test_pressure_peaks_and_flows_are_figures() -> None:
    host = HostUsage(**HOST, disk_read=5.0, pressure=Pressure(cpu=0.25, memory=0.0))
    worker = WorkerMeasured(step=7, memory=2, memory_peak=4, cpu=0.5, io_read=6.0, io_write=0.0)
    found = figures(host, worker)
    assert found["host:a", "disk_read"] == 5.0
    assert found["host:a", "pressure_cpu"] == 0.25
    assert found["host:a", "pressure_memory"] == 0.0, "a zero that was measured is a figure"
    assert found["worker:a.0.1", "memory_peak"] == 4
    assert found["worker:a.0.1", "io_read"] == 6.0
    assert found["worker:a.0.1", "io_write"] == 0.0


def test_what_is_not_known_is_absent() -> None:
    found = figures(HostUsage(**HOST), WorkerMeasured(step=7))
    of_host = {name for subject, name in found if subject == "host:a"}
    assert of_host == set(HOST)
    assert not [name for subject, name in found if subject == "worker:a.0.1"]
