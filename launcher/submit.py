"""Carries out a launch plan: puts a driver and its parts together and runs the job to its end.

`launcher.job` calls `submit` last. Signals become requests to the driver here: the first asks for
an orderly end, a second one kills at once; either way the driver cleans up.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from elastic_driver.errors import ExitCode, UsageError
from elastic_driver.runtime.discovery import (
    FixedDiscovery,
    HostDiscovery,
    HostfileDiscovery,
    ScriptDiscovery,
)
from elastic_driver.runtime.driver import DriverOptions, ElasticDriver
from elastic_driver.runtime.reporter import Level, Reporter
from elastic_driver.runtime.rundir import RunDir
from launcher.backends.local import LocalBackend
from launcher.plan import FileHosts, FixedHosts, HostSource, LaunchPlan, ScriptHosts

_SIGNALS = {
    signal.SIGINT: ("interrupted by Ctrl-C", ExitCode.INTERRUPTED),
    signal.SIGTERM: ("told to stop by SIGTERM", ExitCode.TERMINATED),
    signal.SIGHUP: ("its terminal was closed (SIGHUP)", ExitCode.TERMINATED),
}


def submit(plan: LaunchPlan, run_dir: RunDir) -> int:
    """Run the job; returns its exit status. Raises ElasticError where it cannot be started."""
    driver = ElasticDriver(
        settings=plan.settings,
        spec=plan.spec,
        discovery=make_discovery(plan.hosts),
        starter=LocalBackend,
        run_dir=run_dir,
        reporter=Reporter(
            sys.stderr, level=Level(plan.verbosity + 1), as_json=plan.log_format == "json"
        ),
        options=DriverOptions(
            bind_host=numeric_address(plan.bind[0]),
            bind_port=plan.bind[1],
            discovery_interval=plan.discovery_interval,
            debug=plan.debug,
        ),
    )
    with stop_on_signals(driver):
        return driver.run().exit_code


def make_discovery(hosts: HostSource) -> HostDiscovery:
    """The plan's source of hosts as the driver asks it."""
    match hosts:
        case ScriptHosts(path=path, timeout=timeout, default_slots=slots):
            return ScriptDiscovery(Path(path), timeout=timeout, default_slots=slots)
        case FileHosts(path=path, default_slots=slots):
            return HostfileDiscovery(Path(path), default_slots=slots)
        case FixedHosts(hosts=fixed):
            return FixedDiscovery(fixed)


def numeric_address(host: str) -> str:
    """The address to bind for a host's name; the server itself looks no names up."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"--rdzv-endpoint: {host} has no address here: {error.strerror}") from None
    return str(found[0][4][0])


@contextlib.contextmanager
def stop_on_signals(driver: ElasticDriver) -> Iterator[None]:
    """While this lasts, signals end the job and not this process."""

    def ask(number: int, _frame: FrameType | None) -> None:
        reason, exit_code = _SIGNALS[signal.Signals(number)]
        driver.request_stop(reason, int(exit_code))

    # A signal that is ignored stays so: `nohup elasticrun …` is to survive its terminal.
    ours = [s for s in _SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
