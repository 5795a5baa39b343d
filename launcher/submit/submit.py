"""Carries out a launch plan: puts a driver and its parts together and runs the job to its end.

`launcher.job` calls `submit` last. Signals become requests to the driver here: the first asks for
an orderly end, a second one kills at once; a notice asks for an end at a step boundary. Either way
the driver cleans up.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from msgspec.structs import replace

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
from launcher.backends.slurm_nodes import AllocationDiscovery
from launcher.plan.hosts import JoinedHosts
from launcher.plan.launch import LaunchPlan
from launcher.submit.bind_address import choose_bind_host
from launcher.submit.discovery import make_discovery
from launcher.submit.nodecheck import WithoutHosts, check_before_training, make_checks
from launcher.submit.signals import handled

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
    if isinstance(plan.hosts, JoinedHosts):
        raise AssertionError("launcher.join.serve runs such a job")
    discovery = source = make_discovery(plan.hosts)
    hosts = hosts_now(plan, discovery)
    job = bound_job(plan, hosts)
    problems = make_backend(plan.backend, job).find_problems(hosts)
    for problem in problems.values():
        print(f"elasticrun: {problem}", file=sys.stderr, flush=True)
    plan = without(plan, hosts, problems)
    backend = backend_maker(plan.backend, job)
    if plan.node_check is None:
        driver = make_driver(
            plan, discovery, starter=backend, bind_host=str(job.bind_host), run_dir=run_dir
        )
        return run_driver(driver, plan, source=source)
    checks = make_checks(
        plan,
        plan.node_check,
        starter=backend_maker(plan.backend, replace(job, grows=False)),
        run_dir=run_dir,
    )
    driver = make_driver(
        plan,
        discovery,
        starter=backend,
        bind_host=str(job.bind_host),
        run_dir=run_dir,
        checks=checks,
    )
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
    return run_driver(driver, plan, discovery=discovery, source=source)


def make_driver(
    plan: LaunchPlan,
    discovery: HostDiscovery,
    *,
    starter: MakeBackend,
    bind_host: str,
    run_dir: RunDir,
    checks: NodeChecks | None = None,
    joined: JoinedNodes | None = None,
) -> ElasticDriver:
    """Return a driver for this plan with these parts."""
    level, as_json = Level(plan.verbosity + 1), plan.log_format == "json"
    return ElasticDriver(
        settings=plan.settings,
        spec=plan.spec,
        discovery=discovery,
        starter=starter,
        run_dir=run_dir,
        reporter=Reporter(sys.stderr, level=level, as_json=as_json),
        options=replace(plan.driver, bind_host=bind_host),
        checks=checks,
        joined=joined,
    )


def run_driver(
    driver: ElasticDriver,
    plan: LaunchPlan,
    *,
    discovery: HostDiscovery | None = None,
    source: HostDiscovery | None = None,
) -> int:
    """Run a driver to the job's end; return its exit status.

    Args:
        driver: it has the plan's parts, and may be open.
        plan: the job's settings may have changed since the driver was made.
        discovery: in place of the driver's own.
        source: what `discovery` asks in the end; it may have to end the job.
    """
    if isinstance(source, AllocationDiscovery):
        source.on_over = lambda reason: driver.request_stop(reason, int(ExitCode.TERMINATED))
    notice = plan.settings.grace_period
    with warnings_shown(driver.reporter, "rendezvous"), stop_on_signals(driver, notice=notice):
        return driver.run(plan.settings, discovery).exit_code


def hosts_now(plan: LaunchPlan, discovery: HostDiscovery) -> Hosts:
    """Return the hosts before the driver asks for them; none if nobody needs them yet.

    A discovery that fails now is no mistake: the driver asks again.
    """
    if plan.backend == "local" and plan.hosts.hosts is None:
        return ()
    try:
        return discovery.find()
    except ElasticError:
        return ()


def bound_job(plan: LaunchPlan, hosts: Hosts) -> BackendJob:
    """Return what backends are told, once it is decided where the rendezvous listens."""
    job = plan.backend_job(os.environ, hosts)
    look_up = make_backend(plan.backend, job).look_up
    return replace(
        job, bind_host=choose_bind_host(plan.driver.bind_host, hosts, plan.interfaces, look_up)
    )


def backend_maker(name: str, job: BackendJob) -> MakeBackend:
    """Return what makes this backend for a rendezvous, once that is up."""

    def make(endpoint: str, token_file: Path) -> Backend:
        return make_backend(name, replace(job, endpoint=endpoint, token_file=token_file))

    return make


def without(plan: LaunchPlan, hosts: Hosts, problems: Collection[str]) -> LaunchPlan:
    """Return the plan for a start without the hosts that have problems; they may join later.

    Raises ClusterError where the job cannot be started on the others.
    """
    if not problems:
        return plan
    settings = plan.settings
    slots = sum(n for host, n in hosts if host not in problems)
    least = settings.start_np if settings.start_min_np is None else settings.start_min_np
    if slots < least and plan.hosts.hosts is not None:
        raise ClusterError(
            f"{len(problems)} of {len(hosts)} hosts failed the check, see above; {slots} slots are "
            f"left and {least} are needed: repair the hosts, or lower --min-np"
        )
    if slots < least:
        return plan  # the script may find others before --start-timeout is over
    return replace(plan, settings=replace(settings, start_np=min(settings.start_np, slots)))


@contextlib.contextmanager
def stop_on_signals(driver: ElasticDriver, *, notice: float) -> Iterator[None]:
    """While this lasts, let signals end the job and not this process.

    Those that announce the end, as Slurm's --signal does, leave it `notice` seconds; 0: none.
    """

    def ask(number: int) -> None:
        reason, exit_code = _SIGNALS[signal.Signals(number)]
        if notice and number in NOTICES:
            driver.post(JobLeaving(reason, notice))
        else:
            driver.request_stop(reason, int(exit_code))

    with handled(_SIGNALS, ask):
        yield
