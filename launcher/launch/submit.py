"""Carries out a launch plan: puts a driver and its parts together and runs the job to its end.

`launcher.job` calls `submit` last. Signals become requests to the driver here: the first one asks
for an orderly end, a second one kills at once; a notice asks for an end at a step boundary. The
driver cleans up in all cases.
"""

import contextlib
import signal
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from elastic_driver.core.events import JobLeaving
from elastic_driver.errors import ClusterError, ElasticError, ExitCode
from elastic_driver.runtime.backend import Backend, BackendJob, MakeBackend
from elastic_driver.runtime.checks import NodeChecks
from elastic_driver.runtime.discovery import HostDiscovery
from elastic_driver.runtime.driver import ElasticDriver
from elastic_driver.runtime.host_lists import Hosts
from elastic_driver.runtime.joined import JoinedNodes
from elastic_driver.runtime.reporter import Level, Reporter, warnings_shown
from elastic_driver.runtime.run_dir import RunDir
from launcher.backends.registry import make_backend
from launcher.backends.slurm_allocation import AllocationDiscovery
from launcher.edge import handled
from launcher.launch.bind_address import choose_bind_host
from launcher.launch.checks import make_discovery
from launcher.launch.nodecheck import WithoutHosts, check_before_training, make_checks
from launcher.launch.plan import LaunchPlan

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # of an end to come, as Slurm's --signal gives
_SIGNALS = {
    signal.SIGINT: ("interrupted by Ctrl-C", ExitCode.INTERRUPTED),
    signal.SIGTERM: ("told to stop by SIGTERM", ExitCode.TERMINATED),
    signal.SIGUSR1: ("told by SIGUSR1 that its time is over", ExitCode.TERMINATED),
    signal.SIGUSR2: ("told by SIGUSR2 that its time is over", ExitCode.TERMINATED),
    signal.SIGHUP: ("its terminal was closed (SIGHUP)", ExitCode.TERMINATED),
}


def submit(plan: LaunchPlan, run_dir: RunDir) -> int:
    """Run the job; return its exit status. Raises ElasticError if it cannot be started."""
    discovery = source = make_discovery(plan.hosts)
    hosts = hosts_now(plan, discovery)
    plan, job = bound(plan, hosts)
    problems = make_backend(plan.backend, job).find_problems(hosts)
    for problem in problems.values():
        print(f"elasticrun: {problem}", file=sys.stderr, flush=True)
    plan = without(plan, hosts, problems)
    checks = None
    if plan.options.checks_nodes:
        checks = make_checks(plan, backend_maker(plan.backend, replace(job, grows=False)), run_dir)
    backend = backend_maker(plan.backend, job)
    driver = make_driver(plan, discovery, backend, run_dir, checks=checks)
    if checks is not None:
        hosts = discovery.find()
        driver.open()
        try:
            bad = check_before_training(driver, checks, plan, hosts, run_dir)
            plan, discovery = without(plan, hosts, bad), WithoutHosts(discovery, bad)
            good = tuple(host for host, _slots in hosts if host not in bad)
            plan = replace(plan, settings=replace(plan.settings, checked_hosts=good))
        except BaseException:
            driver.abandon()
            raise
    if isinstance(source, AllocationDiscovery):
        source.on_over = lambda reason: driver.request_stop(reason, int(ExitCode.TERMINATED))
    return run_driver(driver, plan, discovery)


def make_driver(
    plan: LaunchPlan,
    discovery: HostDiscovery,
    starter: MakeBackend,
    run_dir: RunDir,
    *,
    checks: NodeChecks | None = None,
    joined: JoinedNodes | None = None,
) -> ElasticDriver:
    """Return a driver for this plan with these parts."""
    level, as_json = Level(plan.verbosity + 1), plan.options.log_format == "json"
    return ElasticDriver(
        settings=plan.settings,
        spec=plan.spec,
        discovery=discovery,
        starter=starter,
        run_dir=run_dir,
        reporter=Reporter(sys.stderr, level=level, as_json=as_json),
        options=plan.driver,
        checks=checks,
        joined=joined,
    )


def run_driver(driver: ElasticDriver, plan: LaunchPlan, discovery: HostDiscovery) -> int:
    """Run a driver to the job's end; return its exit status.

    The driver may be open already; the job's settings and its discovery may be others than those
    that the driver was made with.
    """
    notice = plan.settings.grace_period
    with warnings_shown(driver.reporter, "rendezvous"), stop_on_signals(driver, notice=notice):
        return driver.run(plan.settings, discovery).exit_code


def hosts_now(plan: LaunchPlan, discovery: HostDiscovery) -> Hosts:
    """Return the hosts before the driver asks for them; none if they are not needed yet.

    A discovery that fails now is no mistake: the driver asks again.
    """
    if plan.backend == "local" and plan.hosts.hosts is None:
        return ()
    try:
        return discovery.find()
    except ElasticError:
        return ()


def bound(plan: LaunchPlan, hosts: Hosts) -> tuple[LaunchPlan, BackendJob]:
    """Return the plan with the address that the rendezvous listens on, and the backend's job."""
    job = replace(plan.agents, hosts=hosts)
    look_up = make_backend(plan.backend, job).look_up
    interfaces = plan.options.network_interfaces or ()
    address = choose_bind_host(plan.driver.bind_host, hosts, interfaces, look_up)
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
    raise ClusterError(
        f"{len(problems)} of {len(hosts)} hosts failed the check, see above; {slots} slots are "
        f"left and {least} are needed: repair the hosts, or lower --min-np"
    )


@contextlib.contextmanager
def stop_on_signals(driver: ElasticDriver, *, notice: float) -> Iterator[None]:
    """While this lasts, let signals end the job and not this process.

    A signal that announces the end, as Slurm's --signal, leaves `notice` seconds; 0: none.
    """

    def ask(number: int) -> None:
        reason, exit_code = _SIGNALS[signal.Signals(number)]
        if notice and number in NOTICES:
            driver.post(JobLeaving(reason, notice))
        else:
            driver.request_stop(reason, int(exit_code))

    with handled(_SIGNALS, ask):
        yield
