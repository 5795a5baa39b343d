"""The node check as a user asks for it: before a job trains, or by itself.

`submit` calls `check_before_training` for `--network-check` and its relatives,
`launcher.ctl` calls `check_hosts` for `elasticctl check`. How a check is run is
`elastic_driver.runtime.node_checks`, what it finds `elastic_driver.policies.nodecheck.check`; here
is
what comes in and what people get to see.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from elastic_driver.errors import ClusterError, ElasticError, ExitCode
from elastic_driver.policies.nodecheck.check import NodeVerdict
from elastic_driver.policies.nodecheck.messages import TaskSettings
from elastic_driver.policies.nodecheck.report import CheckReport
from elastic_driver.runtime.backend import MakeBackend
from elastic_driver.runtime.check_history import CheckHistoryFile
from elastic_driver.runtime.discovery import HostDiscovery
from elastic_driver.runtime.host_checks import HostChecks
from elastic_driver.runtime.host_lists import Hosts
from elastic_driver.runtime.node_checks import CheckSettings, NodeChecker
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
    plan: LaunchPlan,
    wish: NodeCheckPlan,
    hosts: Hosts,
    *,
    starter: MakeBackend,
    bind_host: str,
    run_dir: RunDir,
) -> tuple[HostChecks, dict[str, str]]:
    """Check the hosts: the findings, kept in the run's folder too, and hosts not to use → why.

    Raises ClusterError where no host is left, CheckStoppedError on a signal.
    """
    run_dir.create()
    say = _say if plan.verbosity >= 0 else _say_nothing
    kept = CheckHistoryFile(Path(plan.state_dir), _say)

    def make(some: Hosts, known: Sequence[NodeVerdict]) -> NodeChecker:
        return make_checker(
            plan,
            wish,
            some,
            starter=starter,
            bind_host=bind_host,
            run_dir=RunDir(run_dir.path, _FOLDER),
            say=say,
            known=known,
        )

    with _ended_by_signals():
        report = remember(make(hosts, ()).run(), kept)
    file = run_dir.path / REPORT_FILE
    file.write_bytes(msgspec.json.encode(report) + b"\n")
    excluded = report.excluded(stragglers=wish.exclude_stragglers)
    if plan.verbosity >= 0 or excluded:
        print(show(report, as_json=plan.log_format == "json"), file=sys.stderr, flush=True)
    if len(excluded) == len(report.nodes):
        raise ClusterError(
            f"all {len(excluded)} nodes failed the check; the first: {report.nodes[0].node} "
            f"{next(iter(excluded.values()))}; repair them, or start without --network-check"
        )
    checks = HostChecks(
        report,
        make,
        exclude_stragglers=wish.exclude_stragglers,
        file=file,
        keep=kept.add,
        say=say,
    )
    return checks, excluded


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
    """Check the hosts with the plan's settings; raises ElasticError where that cannot begin."""
    checker = make_checker(
        plan, wish, hosts, starter=starter, bind_host=bind_host, run_dir=run_dir, say=say
    )
    with _ended_by_signals():
        report = checker.run()
    return remember(report, CheckHistoryFile(Path(plan.state_dir), say))


def remember(report: CheckReport, kept: CheckHistoryFile) -> CheckReport:
    """Keep a check beyond its run; the report with what earlier ones found, for people to see."""
    before = kept.read().remarks(report)
    kept.add(report)
    return msgspec.structs.replace(report, before=before)


def make_checker(
    plan: LaunchPlan,
    wish: NodeCheckPlan,
    hosts: Hosts,
    *,
    starter: MakeBackend,
    bind_host: str,
    run_dir: RunDir,
    say: Callable[[str], None],
    known: Sequence[NodeVerdict] = (),
) -> NodeChecker:
    """A check of these hosts with the plan's settings, not yet begun."""
    checked = tuple((host, n if wish.every_slot else 1) for host, n in hosts if n > 0)
    if not checked:
        raise ClusterError("there are no hosts to check; does the source of hosts name any?")
    return NodeChecker(
        checked,
        settings=CheckSettings(
            stragglers=wish.stragglers,
            start_timeout=min(plan.settings.start_timeout, wish.timeout),
            task_timeout=wish.timeout,
            heartbeat_timeout=plan.settings.heartbeat_timeout,
            task=TaskSettings(
                timeout=wish.timeout, performance=wish.performance, model=wish.stragglers
            ),
            env=plan.spec.env,
        ),
        starter=starter,
        run_dir=run_dir,
        bind=(bind_host, 0),
        say=say,
        known=known,
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
    print(f"elasticrun: {line}", file=sys.stderr, flush=True)


def _say_nothing(_line: str) -> None:
    pass
