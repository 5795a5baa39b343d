"""A driver under test, with the hosts it discovers, its cluster, and what its user saw."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import dataclass

from elastic_driver.runtime.discovery import Hosts
from elastic_driver.runtime.driver import ElasticDriver
from elastic_driver.runtime.results import JobResult
from elastic_driver.runtime.run_dir import RunDir
from tests.runtime.cluster import Cluster
from tests.support.json_lines import JsonLines


class ChangingHosts:
    """A discovery whose answer the test sets."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts

    def find(self) -> Hosts:
        return self.hosts

    def cancel(self) -> None:
        pass


@dataclass
class JobUnderTest:
    """A driver, its cluster, and what the user saw."""

    driver: ElasticDriver
    cluster: Cluster
    hosts: ChangingHosts
    run_dir: RunDir
    stderr: io.StringIO

    def outcome(self, within: float = 20.0) -> JobResult:
        found: list[JobResult] = []
        thread = threading.Thread(target=lambda: found.append(self.driver.wait()))
        thread.start()
        thread.join(within)
        assert found, f"the job did not end within {within} s\n{self.stderr.getvalue()}"
        return found[0]

    def logged(self) -> list[dict[str, object]]:
        return JsonLines(self.run_dir.events_file, dict).read()


StartJob = Callable[..., JobUnderTest]
