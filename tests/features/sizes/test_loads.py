"""The load of hosts, as the search for starved ones gets it."""

from __future__ import annotations

from elastic_driver.features.sizes.driver import loads_seen
from elastic_driver.words import wire_events as ev
from elastic_driver.words.progress import HostUsage, Measured, Pressure, StepTimes, WorkerMeasured
from tests.job.scenario import Scenario

HOST = {"memory_used": 1, "memory_total": 2, "disk_used": 1, "disk_total": 2}


def computing(seconds: float | None) -> WorkerMeasured:
    return WorkerMeasured(step=1, times=StepTimes(compute=seconds))


def test_a_host_has_the_median_of_its_workers_and_its_own_load() -> None:
    s = Scenario(start_np=4, auto_scale=True).training(a=3, b=1)
    workers = {"a.0.1": computing(0.1), "a.1.1": computing(0.3), "a.2.1": computing(0.2)}
    hosts = {
        "a": HostUsage(cpu=0.9, pressure=Pressure(cpu=0.5), **HOST),
        "b": HostUsage(cpu=0.1, **HOST),
    }
    seen = loads_seen(s.job, Measured(workers=workers, hosts=hosts))
    (load,) = seen.hosts
    assert (load.host, load.workers, load.compute) == ("a", 3, 0.2)
    assert (load.cpu, load.pressure) == (0.9, 0.5)
    assert (seen.round, seen.held) == (1, False)


def test_hosts_without_figures_are_left_out_and_a_user_s_size_is_told() -> None:
    s = Scenario(start_np=2, auto_scale=True).training(a=1, b=1)
    s.send(ev.ScaleRequested(2))
    workers = {"a.0.1": computing(0.1), "b.0.1": computing(None)}
    hosts = {"b": HostUsage(cpu=0.1, **HOST)}
    seen = loads_seen(s.job, Measured(workers=workers, hosts=hosts))
    assert (seen.hosts, seen.held) == ((), True)
