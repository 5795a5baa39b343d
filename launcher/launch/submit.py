"""Carries out a launch plan: makes the driver and its parts, and runs the job to its end.

`launcher.job` calls `submit` last. Signals become requests to the driver (`signals`), which cleans
up in all cases. With a node check, the driver checks the hosts first (`node_check`).
"""

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

from elastic_driver.errors import ClusterError, ElasticError
from elastic_driver.features.checks.driver import NodeChecks
from elastic_driver.features.joining.driver import JoinedNodes
from elastic_driver.runtime.backend import Backend, BackendJob, MakeBackend, RefusedReason
from elastic_driver.runtime.brain_report import BrainReports
from elastic_driver.runtime.discovery import HostDiscovery, Hosts
from elastic_driver.runtime.driver import ElasticDriver, JobNow
from elastic_driver.runtime.journal.resume import ResumedRun
from elastic_driver.runtime.journal.store import JournalStore
from elastic_driver.runtime.library_logs import described
from elastic_driver.runtime.reporter import Level, Reporter
from elastic_driver.runtime.resources import DriverSetup
from elastic_driver.runtime.results import JobResult
from elastic_driver.runtime.run_dir import RunDir, default_state_dir
from elastic_driver.words import counted
from launcher.backends.registry import make_backend
from launcher.backends.slurm_allocation import AllocationDiscovery
from launcher.launch.bind_address import bind_again, choose_bind_host
from launcher.launch.bottom_line import BottomLine, has_room_for_line
from launcher.launch.checks import make_discovery
from launcher.launch.node_check import (
    WithoutHosts,
    check_before_training,
    excluded,
    make_checks,
    read_report,
    sayer,
)
from launcher.launch.plan import LaunchPlan
from launcher.launch.progress import status_line, summary
from launcher.launch.signals import announce_end, stop_on_signals
from launcher.launch.statistics import default_database
from launcher.options.table import LaunchOptions


def submit(
    plan: LaunchPlan,
    run_dir: RunDir,
    run: ResumedRun | None = None,
    store: JournalStore | None = None,
    *,
    brain: BrainReports | None = None,
    granted: Hosts = (),
) -> JobResult:
    """Run the job, or go on with `run`; return its result. `store`: the place of the journal.

    `brain`: reports the job to the Brain, whose first grant was `granted`. Raises ElasticError if
    the job cannot be run.
    """
    discovery = source = make_discovery(plan.hosts)
    hosts = granted if brain is not None and run is None else _first_hosts(plan, discovery, run)
    plan, job = bound(plan, hosts, "" if run is None else run.url)
    if run is None:
        problems = make_backend(plan.backend, job).find_problems(hosts)
        for problem in problems.values():
            sayer(plan)(problem)
        plan = without(plan, hosts, problems)
        refused = [(h, str(p)) for h, p in problems.items() if isinstance(p, RefusedReason)]
        plan = replace(plan, settings=replace(plan.settings, refused_hosts=tuple(refused)))
    checks = None
    if plan.options.checks_nodes:
        starter = backend_maker(plan.backend, replace(job, grows=False, resumable=False))
        checks = make_checks(plan, starter, run_dir)
    backend = backend_maker(plan.backend, job)
    driver = make_driver(
        plan, discovery, backend, run_dir, checks=checks, run=run, store=store, brain=brain
    )
    if checks is not None and run is not None:
        checks.report = report = read_report(run_dir)
        discovery = WithoutHosts(discovery, excluded(report, checks.settings))
    elif checks is not None:
        hosts = discovery.find()
        plan, bad = _checked(plan, driver, checks, hosts, run_dir)
        discovery = WithoutHosts(discovery, bad)
    if isinstance(source, AllocationDiscovery):
        # Slurm may still be ending the steps: what the agents then report comes at any time.
        source.on_over = lambda reason: announce_end(driver, reason, plan.settings.grace_period)
    return run_driver(driver, plan, discovery)


def _first_hosts(plan: LaunchPlan, discovery: HostDiscovery, run: ResumedRun | None) -> Hosts:
    """Return the hosts that are known before the driver asks for any."""
    if run is not None:  # agents may run there, so nothing is asked before they are adopted
        return tuple((host.name, host.slots) for host in run.job.hosts.known.values())
    if plan.backend != "local" or plan.hosts.hosts is not None:
        with contextlib.suppress(ElasticError):  # no end of the job: the driver asks again
            return discovery.find()
    return ()


def _checked(
    plan: LaunchPlan, driver: ElasticDriver, checks: NodeChecks, hosts: Hosts, run_dir: RunDir
) -> tuple[LaunchPlan, dict[str, str]]:
    """Check the hosts before the job; return the plan without the bad ones, and their reasons."""
    driver.open()
    try:
        bad = check_before_training(driver, checks, plan, hosts, run_dir)
        plan = without(plan, hosts, bad)
        good = tuple(host for host, _slots in hosts if host not in bad)
        return replace(plan, settings=replace(plan.settings, checked_hosts=good)), bad
    except BaseException:
        driver.abandon()
        raise


def make_driver(
    plan: LaunchPlan,
    discovery: HostDiscovery,
    starter: MakeBackend,
    run_dir: RunDir,
    *,
    checks: NodeChecks | None = None,
    joined: JoinedNodes | None = None,
    secrets: tuple[str, ...] = (),
    run: ResumedRun | None = None,
    store: JournalStore | None = None,
    brain: BrainReports | None = None,
) -> ElasticDriver:
    """Return a driver for this plan with these parts; `run`: the job that it goes on with."""
    level, as_json = Level(plan.verbosity + 1), plan.options.log_format == "json"
    return ElasticDriver(
        DriverSetup(
            settings=plan.settings,
            spec=plan.spec,
            discovery=discovery,
            starter=starter,
            run_dir=run_dir,
            reporter=Reporter(
                sys.stderr,
                level=level,
                as_json=as_json,
                colors=_has_colors(),
                sum_up=partial(summary, more=_more(plan)),
            ),
            options=plan.driver,
            checks=checks,
            joined=joined,
            secrets=secrets,
            argv=plan.line.words,
            cwd=plan.spec.cwd,
            resumed=run,
            store=store,
            environ=os.environ,
            statistics=plan.options.stats_db or default_database(run_dir),
            brain=brain,
        )
    )


def run_driver(driver: ElasticDriver, plan: LaunchPlan, discovery: HostDiscovery) -> JobResult:
    """Run a driver to the job's end; return the job's result.

    The driver may be open already. The settings and the discovery replace those that the driver was
    made with.
    """
    notice = plan.settings.grace_period
    line = bottom_line(driver.now, plan.options, driver.reporter.note)
    with stop_on_signals(driver, notice=notice), line:
        return driver.run(plan.settings, discovery)


def bottom_line(
    now: Callable[[], JobNow | None], options: LaunchOptions, note: Callable[[str], None]
) -> contextlib.AbstractContextManager[object]:
    """Return what keeps a status line on the terminal, if there is one and the user wants it."""
    off = options.quiet or options.no_progress or options.log_format == "json"
    if off or not has_room_for_line(os.environ):
        return contextlib.nullcontext()

    def failed(error: Exception) -> None:
        note(f"the status line is gone ({described(error)}); the job goes on")

    plain = not _wants_colors()
    return BottomLine(2, lambda columns: status_line(now(), columns), failed, plain=plain)


def _wants_colors() -> bool:
    """Return whether the user wants colors on terminals (https://no-color.org)."""
    return not os.environ.get("NO_COLOR")


def _has_colors() -> bool:
    """Return whether our stderr is a terminal that shows colors, and the user wants them."""
    with contextlib.suppress(OSError):
        return _wants_colors() and os.environ.get("TERM", "dumb") != "dumb" and os.isatty(2)
    return False


def _more(plan: LaunchPlan) -> str:
    """Return where the user can read more about a job that is over."""
    words = ["elasticctl", "report", "--run-id", plan.spec.run_id]
    if plan.state_dir != str(default_state_dir(os.environ)):
        words += ["--state-dir", plan.state_dir]
    logs = "" if plan.spec.log_dir is None else f"; the workers' lines: {plan.spec.log_dir}"
    return shlex.join(words) + logs


def bound(plan: LaunchPlan, hosts: Hosts, url: str = "") -> tuple[LaunchPlan, BackendJob]:
    """Return the plan with the address of the rendezvous, and the job for the backend.

    `url`: the address of the last driver of a job that goes on.
    """
    job = replace(plan.agents, hosts=hosts)
    look_up = make_backend(plan.backend, job).look_up
    interfaces = plan.options.network_interfaces or ()
    address = choose_bind_host(plan.driver.bind_host, hosts, interfaces, look_up)
    address = bind_again(address, url)
    plan = replace(plan, driver=replace(plan.driver, bind_host=address))
    return plan, replace(job, bind_host=address)


def backend_maker(name: str, job: BackendJob) -> MakeBackend:
    """Return a function that makes this backend for a rendezvous, once that is up."""

    def make(endpoint: str, token_file: Path) -> Backend:
        return make_backend(name, replace(job, endpoint=endpoint, token_file=token_file))

    return make


def without(plan: LaunchPlan, hosts: Hosts, problems: Collection[str]) -> LaunchPlan:
    """Return the plan for a start without the hosts that have problems; they may join later.

    Raises ClusterError if the job cannot be started on the others.
    """
    if not problems:
        return plan
    settings = plan.settings
    slots = sum(n for host, n in hosts if host not in problems)
    least = settings.start_np if settings.start_min_np is None else settings.start_min_np
    if slots >= least:
        return replace(plan, settings=replace(settings, start_np=min(settings.start_np, slots)))
    if plan.hosts.hosts is None:
        return plan  # the discovery may find others before --start-timeout is over
    left = counted(slots, "slot is", "slots are")
    raise ClusterError(
        f"{len(problems)} of {counted(len(hosts), 'host')} failed the check, see above; "
        f"{left} left and {least} needed: repair the hosts, or lower --min-np"
    )
