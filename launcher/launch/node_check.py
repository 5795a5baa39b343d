"""The node check of a job: its settings, its report, and the hosts that it leaves out.

The driver checks the hosts before the job, and those that come later; `elasticctl check` does the
same without a job.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from elastic_driver.console import say, say_note
from elastic_driver.errors import ClusterError
from elastic_driver.features.checks.driver import CheckHistoryFile, CheckSettings, NodeChecks
from elastic_driver.features.checks.messages import TaskSettings
from elastic_driver.features.checks.report import CheckReport
from elastic_driver.runtime.backend import MakeBackend
from elastic_driver.runtime.discovery import HostDiscovery, Hosts
from elastic_driver.runtime.driver import ElasticDriver
from elastic_driver.runtime.run_dir import RunDir
from launcher.launch.plan import LaunchPlan
from launcher.launch.signals import ended_by_signals
from rendezvous.wire import UNREADABLE

REPORT_FILE = "node_check.json"
_CHECK_FOLDER = "node-check"  # in the run's folder; for the token and address of the check


def sayer(plan: LaunchPlan) -> Callable[[str], None]:
    """Return a function that shows a sentence to the user."""
    return partial(say_note, as_json=plan.options.log_format == "json")


def check_before_training(
    driver: ElasticDriver, checks: NodeChecks, plan: LaunchPlan, hosts: Hosts, run_dir: RunDir
) -> dict[str, str]:
    """Check the hosts before the job begins; return the hosts to leave out, with the reasons.

    The report is shown, and kept in the run's folder. Raises ClusterError if no host is left or a
    signal ends the check.
    """
    checks.report = report = run_check(driver, hosts, plan, sayer(plan))
    (run_dir.path / REPORT_FILE).write_bytes(msgspec.json.encode(report) + b"\n")
    bad = excluded(report, checks.settings)
    if plan.verbosity >= 0 or bad:
        say(show(report, plan))
    if len(bad) == len(report.nodes):
        raise ClusterError(
            f"each node failed the check ({len(bad)}); the first: {report.nodes[0].node} "
            f"{next(iter(bad.values()))}; repair them, or start without --network-check"
        )
    return bad


def excluded(report: CheckReport | None, settings: CheckSettings) -> dict[str, str]:
    """Return the hosts that the job does not use after this check, with the reasons."""
    return {} if report is None else report.excluded(stragglers=settings.exclude_stragglers)


def read_report(run_dir: RunDir) -> CheckReport | None:
    """Return the report of the check with which the run began; None if there is no usable one."""
    try:
        return msgspec.json.decode((run_dir.path / REPORT_FILE).read_bytes(), type=CheckReport)
    except (OSError, *UNREADABLE):
        return None


def check_settings(plan: LaunchPlan) -> CheckSettings:
    """Return the settings of the plan's node checks."""
    options = plan.options
    timeout, model = options.check_timeout, options.trains_for_check
    return CheckSettings(
        exclude_stragglers=options.exclude_straggler,
        every_slot=plan.gpus,
        start_timeout=min(plan.settings.start_timeout, timeout),
        task_timeout=timeout,
        heartbeat_timeout=plan.settings.heartbeat_timeout,
        task=TaskSettings(timeout=timeout, performance=options.comm_perf_test, model=model),
        ports=plan.spec.ports,
        env=plan.spec.env,
    )


def make_checks(
    plan: LaunchPlan,
    starter: MakeBackend,
    run_dir: RunDir,
    say: Callable[[str], None] | None = None,
) -> NodeChecks:
    """Return the node checks of a run; `say` shows a line to the user, if not `sayer`."""
    say = sayer(plan) if say is None else say
    return NodeChecks(
        check_settings(plan),
        make_backend=starter,
        folder=RunDir(run_dir.path, _CHECK_FOLDER),
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
    with ended_by_signals("the node check"):
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
