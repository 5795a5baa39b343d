"""A driver in a process of its own, which a test may kill; the test plays its agents.

    python -m tests.runtime.driver_process STATE_DIR HOSTS [--resume]

HOSTS: `a:2,b:1`. Agents to start, to kill and to adopt are lines on stdout.
"""

from __future__ import annotations

import sys
from pathlib import Path

from elastic_driver.errors import ElasticError
from elastic_driver.runtime.backend import OnLost
from elastic_driver.runtime.discovery import FixedDiscovery
from elastic_driver.runtime.driver import ElasticDriver
from elastic_driver.runtime.journal import writer
from elastic_driver.runtime.journal.replay import load_run
from elastic_driver.runtime.reporter import Reporter
from elastic_driver.runtime.resources import DriverSetup
from elastic_driver.runtime.run_dir import RunDir
from elastic_driver.settings import DriverOptions, Settings
from elastic_driver.words.orders import JobSpec

RUN = "run"


class SayingBackend:
    """A backend that says what it is told to do."""

    def __init__(self, *_where: object) -> None:
        pass

    def start(self, host: str, incarnation: int, _on_lost: OnLost) -> None:
        print("start", host, incarnation, flush=True)

    def kill(self, host: str, incarnation: int) -> None:
        print("kill", host, incarnation, flush=True)

    def adopt(self, host: str, incarnation: int, pid: int, on_lost: OnLost) -> None:
        print("adopt", host, incarnation, flush=True)
        self.lost = on_lost

    def close(self, grace: float) -> None:
        print("close", flush=True)

    def probe_address(self, _host: str) -> None:
        return None


def setup(folder: Path, listed: str, *, resume: bool) -> DriverSetup:
    """A driver of the run in this folder, or the next one."""
    hosts = tuple((name, int(slots)) for name, slots in (h.split(":") for h in listed.split(",")))
    run_dir = RunDir(folder, RUN)
    return DriverSetup(
        settings=Settings(
            start_np=sum(slots for _, slots in hosts),
            stop_grace=1.0,
            heartbeat_timeout=120.0,  # the machine may be slow, and nobody renews leases
        ),
        spec=JobSpec(RUN, ("true",), "/", {}, 30.0, 3),
        discovery=FixedDiscovery(hosts),
        starter=SayingBackend,  # type: ignore[arg-type]
        run_dir=run_dir,
        reporter=Reporter(sys.stderr),
        options=DriverOptions(debug=True),
        argv=("elasticrun", "true"),
        cwd="/home",
        resumed=load_run(run_dir.journal_file) if resume else None,
    )


def main() -> int:
    # What a driver does that is not in the journal yet is lost with it. That has tests of its own:
    # here a disk that is busy with other tests must not make the journal late.
    writer.WAIT_S = 30.0
    folder, listed, *flags = sys.argv[1:]
    try:
        return ElasticDriver(setup(Path(folder), listed, resume=bool(flags))).run().exit_code
    except ElasticError as error:
        print(f"elasticrun: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
