"""The node check: before a job trains, or by itself.

`submit` calls `check_before_training` for `--network-check` and the flags that imply it;
`elasticctl check` uses the other functions. The driver runs the check; this module sets it up and
keeps what it finds.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from elastic_driver.errors import ClusterError, ExitCode
from elastic_driver.policies.nodecheck.messages import TaskSettings
from elastic_driver.policies.nodecheck.report import CheckReport
from elastic_driver.runtime.backend import MakeBackend
from elastic_driver.runtime.checks import CheckHistoryFile, CheckSettings, NodeChecks
from elastic_driver.runtime.discovery import HostDiscovery
from elastic_driver.runtime.driver import ElasticDriver
from elastic_driver.runtime.host_lists import Hosts
from elastic_driver.runtime.reporter import Reporter
from elastic_driver.runtime.run_dir import RunDir
from launcher.edge import handled
from launcher.launch.plan import LaunchPlan

REPORT_FILE = "node_check.json"
_FOLDER = "node-check"  # below the run's own; for the check's token and address


def check_before_training(
    driver: ElasticDriver, checks: NodeChecks, plan: LaunchPlan, hosts: Hosts, run_dir: RunDir
) -> dict[str, str]:
    """Check the hosts before the job begins; return the hosts to leave out, with the reasons.

    The report is shown, and kept in the run's folder. Raises ClusterError if no host is left or a
    signal ends the check.
    """
    checks.report = report = run_check(driver, hosts, plan, _say)
    (run_dir.path / REPORT_FILE).write_bytes(msgspec.json.encode(report) + b"\n")
    excluded = report.excluded(stragglers=checks.settings.exclude_stragglers)
    if plan.verbosity >= 0 or excluded:
        print(show(report, plan), file=sys.stderr, flush=True)
    if len(excluded) == len(report.nodes):
        raise ClusterError(
            f"all {len(excluded)} nodes failed the check; the first: {report.nodes[0].node} "
            f"{next(iter(excluded.values()))}; repair them, or start without --network-check"
        )
    return excluded


def check_settings(plan: LaunchPlan) -> CheckSettings:
    """Return the settings of the plan's node checks."""
    options = plan.options
    timeout, stragglers = options.check_timeout, options.looks_for_stragglers
    return CheckSettings(
        stragglers=stragglers,
        exclude_stragglers=options.exclude_straggler,
        every_slot=plan.gpus,
        start_timeout=min(plan.settings.start_timeout, timeout),
        task_timeout=timeout,
        heartbeat_timeout=plan.settings.heartbeat_timeout,
        task=TaskSettings(timeout=timeout, performance=options.comm_perf_test, model=stragglers),
        env=plan.spec.env,
    )


def make_checks(
    plan: LaunchPlan,
    starter: MakeBackend,
    run_dir: RunDir,
    say: Callable[[str], None] | None = None,
) -> NodeChecks:
    """Return the node checks of a run; `say` shows a line to the user."""
    say = say or _say
    return NodeChecks(
        check_settings(plan),
        make_backend=starter,
        folder=RunDir(run_dir.path, _FOLDER),
        file=run_dir.path / REPORT_FILE,
        keep=CheckHistoryFile(Path(plan.state_dir), say).add,
        say=say if plan.verbosity >= 0 else (lambda _line: None),
    )


def run_check(
    driver: ElasticDriver, hosts: Hosts, plan: LaunchPlan, say: Callable[[str], None]
) -> CheckReport:
    """Check hosts and keep the report beyond this run; return it with earlier findings.

    Raises ElasticError if the check cannot begin, or a signal ends it.
    """
    with _ended_by_signals():
        report = driver.check(hosts)
    kept = CheckHistoryFile(Path(plan.state_dir), say)
    before = kept.read().remarks(report)
    kept.add(report)
    return msgspec.structs.replace(report, before=before)


def show(report: CheckReport, plan: LaunchPlan) -> str:
    """Return the report as a table, or as one line of JSON."""
    as_json = plan.options.log_format == "json"
    return msgspec.json.encode(report).decode() if as_json else report.render()


class WithoutHosts:
    """A discovery without the hosts that failed the check (a `HostDiscovery`)."""

    def __init__(self, source: HostDiscovery, excluded: dict[str, str]) -> None:
        self._source, self._excluded = source, excluded
        self.cancel = source.cancel

    def find(self) -> Hosts:
        """Return the other hosts of the source."""
        return tuple(entry for entry in self._source.find() if entry[0] not in self._excluded)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let the first signal end the check by an error; later signals change nothing."""
    stopped = False

    def stop(number: int) -> None:
        nonlocal stopped
        if stopped:
            return
        stopped = True
        name = signal.Signals(number).name
        error = ClusterError(f"the node check was stopped by {name}; nothing was started")
        interrupted = number == signal.SIGINT
        error.exit_code = ExitCode.INTERRUPTED if interrupted else ExitCode.TERMINATED
        raise error

    with handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), stop):
        yield


def _say(line: str) -> None:
    Reporter(sys.stderr).note(line)  # does not wait for a terminal that is stopped
