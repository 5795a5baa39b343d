"""A node check by a driver without a job."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from elastic_driver.features.checks.driver import CheckSettings, NodeChecks
from elastic_driver.features.checks.report import CheckReport
from elastic_driver.runtime.backend import MakeBackend
from elastic_driver.runtime.discovery import FixedDiscovery, Hosts
from elastic_driver.runtime.driver import ElasticDriver
from elastic_driver.runtime.reporter import Reporter
from elastic_driver.runtime.resources import DriverSetup
from elastic_driver.runtime.run_dir import RunDir
from elastic_driver.settings import DriverOptions, Settings
from elastic_driver.words.orders import JobSpec


def check_without_a_job(
    hosts: Hosts,
    *,
    settings: CheckSettings,
    make_backend: MakeBackend,
    folder: Path,
    say: Callable[[str], None] = lambda _line: None,
) -> CheckReport:
    """Check these hosts; the check's own folder is `check`."""
    driver = ElasticDriver(
        DriverSetup(
            settings=Settings(),
            spec=JobSpec("run", ("true",), "/", {}, 30.0, 3),
            discovery=FixedDiscovery(hosts),
            starter=make_backend,
            run_dir=RunDir(folder, "run"),
            reporter=Reporter(io.StringIO()),
            options=DriverOptions(debug=True),
            checks=NodeChecks(
                settings, make_backend=make_backend, folder=RunDir(folder, "check"), say=say
            ),
        )
    )
    driver.open()
    try:
        return driver.check(hosts)
    finally:
        driver.abandon()
