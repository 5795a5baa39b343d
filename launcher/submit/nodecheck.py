"""The node check as a user asks for it: before a job trains, or by itself.

`submit` calls `check_before_training` for `--network-check` and its relatives, `elasticctl check`
calls `check_hosts`. The driver runs the check; here it is set up, and its findings are shown.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from elastic_driver.errors import ClusterError, ElasticError, ExitCode
from elastic_driver.policies.nodecheck.messages import TaskSettings
from elastic_driver.policies.nodecheck.report import CheckReport
from elastic_driver.runtime.backend import MakeBackend
from elastic_driver.runtime.checks import CheckHistoryFile, CheckSettings, NodeChecks
from elastic_driver.runtime.discovery import FixedDiscovery, HostDiscovery
from elastic_driver.runtime.driver import ElasticDriver
from elastic_driver.runtime.host_lists import Hosts
from elastic_driver.runtime.options import DriverOptions
from elastic_driver.runtime.reporter import Reporter
from elastic_driver.runtime.run_dir import RunDir
from launcher.plan.launch import LaunchPlan, NodeCheckPlan
from launcher.submit.signals import handled

REPORT_FILE = "node_check.json"
_FOLDER = "node-check"  # below the run's own; for the check's token and address


class CheckStoppedError(ElasticError):
    """Somebody asked for the end of a check that was going on."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"the node check was stopped by {number.name}; nothing was started")
        interrupted = number is signal.SIGINT
        self.exit_code = ExitCode.INTERRUPTED if interrupted else ExitCode.TERMINATED


def check_before_training(
    driver: ElasticDriver, checks: NodeChecks, plan: LaunchPlan, hosts: Hosts, run_dir: RunDir
) -> dict[str, str]:
    """Check the hosts before the job begins; return those not to use, with the reasons.

    What was found is shown, and kept in the run's folder. Raises ClusterError where no host is
    left, CheckStoppedError on a signal.
    """
    with _ended_by_signals():
        report = remember(driver.check(hosts), CheckHistoryFile(Path(plan.state_dir), _say))
    checks.report = report
    (run_dir.path / REPORT_FILE).write_bytes(msgspec.json.encode(report) + b"\n")
    excluded = report.excluded(stragglers=checks.settings.exclude_stragglers)
    if plan.verbosity >= 0 or excluded:
        print(show(report, as_json=plan.log_format == "json"), file=sys.stderr, flush=True)
    if len(excluded) == len(report.nodes):
        raise ClusterError(
            f"all {len(excluded)} nodes failed the check; the first: {report.nodes[0].node} "
            f"{next(iter(excluded.values()))}; repair them, or start without --network-check"
        )
    return excluded


def make_checks(
    plan: LaunchPlan, wish: NodeCheckPlan, *, starter: MakeBackend, run_dir: RunDir
) -> NodeChecks:
    """Return the checks of a job with this plan."""
    return NodeChecks(
        check_settings(plan, wish),
        make_backend=starter,
        folder=RunDir(run_dir.path, _FOLDER),
        file=run_dir.path / REPORT_FILE,
        keep=CheckHistoryFile(Path(plan.state_dir), _say).add,
        say=_say if plan.verbosity >= 0 else (lambda _line: None),
    )


def check_hosts(
    plan: LaunchPlan,
    wish: NodeCheckPlan,
    hosts: Hosts,
    *,
    starter: MakeBackend,
    bind_host: str,
    run_dir: RunDir,
    say: Callable[[str], None],
) -> CheckReport:
    """Check the hosts by a driver without a job; raises ElasticError where that cannot begin."""
    checks = NodeChecks(
        check_settings(plan, wish),
        make_backend=starter,
        folder=RunDir(run_dir.path, _FOLDER),
        say=say,
    )
    driver = ElasticDriver(
        settings=plan.settings,
        spec=plan.spec,
        discovery=FixedDiscovery(hosts),
        starter=starter,
        run_dir=run_dir,
        reporter=Reporter(sys.stderr),
        options=DriverOptions(bind_host=bind_host),
        checks=checks,
    )
    driver.open()
    try:
        with _ended_by_signals():
            report = driver.check(hosts)
    finally:
        driver.abandon()
    return remember(report, CheckHistoryFile(Path(plan.state_dir), say))


def remember(report: CheckReport, kept: CheckHistoryFile) -> CheckReport:
    """Keep a check beyond its run; the report with what earlier ones found, for people to see."""
    before = kept.read().remarks(report)
    kept.add(report)
    return msgspec.structs.replace(report, before=before)


def check_settings(plan: LaunchPlan, wish: NodeCheckPlan) -> CheckSettings:
    """Return how the plan's node checks are made."""
    return CheckSettings(
        stragglers=wish.stragglers,
        exclude_stragglers=wish.exclude_stragglers,
        every_slot=wish.every_slot,
        start_timeout=min(plan.settings.start_timeout, wish.timeout),
        task_timeout=wish.timeout,
        heartbeat_timeout=plan.settings.heartbeat_timeout,
        task=TaskSettings(
            timeout=wish.timeout, performance=wish.performance, model=wish.stragglers
        ),
        env=plan.spec.env,
    )


def show(report: CheckReport, *, as_json: bool) -> str:
    """The report as a table, or as one line of JSON."""
    return msgspec.json.encode(report).decode() if as_json else report.render()


class WithoutHosts:
    """A discovery without the hosts that failed the check (a `HostDiscovery`)."""

    def __init__(self, source: HostDiscovery, excluded: dict[str, str]) -> None:
        self._source, self._excluded = source, frozenset(excluded)

    def find(self) -> Hosts:
        """The source's hosts, as far as they are to be used."""
        return tuple(entry for entry in self._source.find() if entry[0] not in self._excluded)

    def cancel(self) -> None:
        """See `HostDiscovery.cancel`."""
        self._source.cancel()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """The first signal ends the check in an orderly way; more of them change nothing."""
    stopped = False

    def stop(number: int) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise CheckStoppedError(signal.Signals(number))

    with handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), stop):
        yield


def _say(line: str) -> None:
    Reporter(sys.stderr).note(line)  # which does not wait for a terminal that stands still
