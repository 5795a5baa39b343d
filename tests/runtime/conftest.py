"""The fixture that starts drivers, and ends them without a thread left."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import pytest

from elastic_driver.features.checks.driver import CheckSettings, NodeChecks
from elastic_driver.features.checks.report import CheckReport
from elastic_driver.runtime.brain_link import BrainReports
from elastic_driver.runtime.discovery import Hosts
from elastic_driver.runtime.driver import ElasticDriver
from elastic_driver.runtime.journal.journal_file import JournalStore
from elastic_driver.runtime.reporter import Level, Reporter
from elastic_driver.runtime.resources import DriverSetup
from elastic_driver.runtime.run_dir import RunDir
from elastic_driver.settings import DriverOptions, Settings
from elastic_driver.words.orders import JobSpec
from tests.runtime.cluster import Cluster
from tests.runtime.jobs import ChangingHosts, JobUnderTest, StartJob


def found(report: CheckReport, folder: Path) -> NodeChecks:
    """What a check before the job found; no host is checked again."""

    def make(*_where: object) -> NoReturn:
        raise AssertionError("no check was expected")

    checks = NodeChecks(CheckSettings(), make_backend=make, folder=RunDir(folder, "node-check"))
    checks.report = report
    return checks


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[StartJob]:
    threads_before = set(threading.enumerate())
    jobs: list[JobUnderTest] = []

    def start(
        hosts: Hosts = (("a", 2),),
        *,
        cluster: Cluster | None = None,
        options: DriverOptions | None = None,
        level: Level = Level.NORMAL,
        node_check: CheckReport | None = None,
        store: Callable[[RunDir], JournalStore] | None = None,
        environ: Mapping[str, str] | None = None,
        brain: BrainReports | None = None,
        **settings: object,
    ) -> JobUnderTest:
        values: dict[str, object] = {"start_np": sum(s for _, s in hosts), "stop_grace": 1.0}
        cluster = cluster or Cluster()
        stderr = io.StringIO()
        source = ChangingHosts(hosts)
        run_dir = RunDir(tmp_path / "state", f"run{len(jobs)}")
        checks = None if node_check is None else found(node_check, run_dir.path)
        driver = ElasticDriver(
            DriverSetup(
                settings=Settings(**{**values, **settings}),  # type: ignore[arg-type]
                spec=JobSpec("run", ("true",), "/", {}, 30.0, 3),
                discovery=source,
                starter=cluster,
                run_dir=run_dir,
                reporter=Reporter(stderr, level=level),
                options=options or DriverOptions(discovery_interval=0.02, debug=True),
                checks=checks,
                store=None if store is None else store(run_dir),
                environ=environ or {},
                brain=brain,
            )
        )
        jobs.append(JobUnderTest(driver, cluster, source, run_dir, stderr))
        driver.start()
        return jobs[-1]

    yield start
    for job in jobs:
        job.driver.request_stop("the test is over", 143)
        job.driver.request_stop("the test is over", 143)
        job.driver.stop()
        job.cluster.close(0.0)
    left = [t for t in set(threading.enumerate()) - threads_before if t.is_alive()]
    assert left == []
