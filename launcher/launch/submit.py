"""Carries out a launch plan: makes the driver and its parts, and runs the job to its end.

`launcher.run_job` calls `submit` last.

*Signals* become requests to the driver, which cleans up in all cases. Batch systems and service
managers send SIGTERM, SIGUSR1 or SIGUSR2, often to every process of a job and more than once: the
job leaves at a step boundary, and later ones of these signals are about the same leaving. Ctrl-C
(SIGINT) and a closed terminal (SIGHUP) stop the job without that. Only SIGINT says "at once", when
the job is being stopped already: a person sends it.

*The node check*: the driver checks the hosts before the job, and those that come later; `elasticctl
check` does the same without a job.

*The first failure* of a job goes into the file of TORCHELASTIC_ERROR_FILE, as with torchrun.
Schedulers that start torchrun set this variable and read the file; its form is that of torch's
`@record` (torch.distributed.elastic.multiprocessing.errors).
"""

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from elastic_driver.console import say, say_note
from elastic_driver.errors import ClusterError, ElasticError, ExitCode
from elastic_driver.job.events import JobLeaving
from elastic_driver.runtime.backend import Backend, BackendJob, MakeBackend, RefusedReason
from elastic_driver.runtime.brain_link import BrainReports
from elastic_driver.runtime.discovery import HostDiscovery, Hosts
from elastic_driver.runtime.driver import ElasticDriver, JobNow
from elastic_driver.runtime.host_checks import CheckOrder, HostChecks, Report, check_command
from elastic_driver.runtime.journal.journal_file import JournalStore
from elastic_driver.runtime.journal.replay import ResumedRun
from elastic_driver.runtime.library_logs import described
from elastic_driver.runtime.reporter import Level, Reporter
from elastic_driver.runtime.resources import DriverSetup
from elastic_driver.runtime.results import JobResult, describe_failure, last_words
from elastic_driver.runtime.run_dir import RunDir, default_state_dir
from elastic_driver.runtime.status_routes import Nodes
from elastic_driver.words import counted
from launcher.backends.base import make_backend
from launcher.backends.slurm_allocation import AllocationDiscovery
from launcher.edge import TO_LEAVE, handled
from launcher.launch.checks import bind_again, choose_bind_host, default_database, make_discovery
from launcher.launch.plan import LaunchPlan
from launcher.launch.status_line import BottomLine, has_room_for_line, status_line, summary
from launcher.options.table import LaunchOptions
from rendezvous.own_files import open_named


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
        checks.go_on()
        discovery = WithoutHosts(discovery, checks.excluded(checks.report))
    elif checks is not None:
        hosts = discovery.find()
        plan, bad = _checked(plan, driver, checks, hosts)
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
    plan: LaunchPlan, driver: ElasticDriver, checks: HostChecks, hosts: Hosts
) -> tuple[LaunchPlan, dict[str, str]]:
    """Check the hosts before the job; return the plan without the bad ones, and their reasons."""
    driver.open()
    try:
        bad = check_before_training(driver, checks, plan, hosts)
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
    checks: HostChecks | None = None,
    joined: Nodes | None = None,
    secrets: tuple[str, ...] = (),
    run: ResumedRun | None = None,
    store: JournalStore | None = None,
    brain: BrainReports | None = None,
) -> ElasticDriver:
    """Return a driver for this plan with these parts; `run`: the job that it goes on with."""
    level = Level(plan.verbosity + 1)
    as_json = plan.options.log_format == "json"
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


# ---- the node check -----------------------------------------------------------------------


def sayer(plan: LaunchPlan) -> Callable[[str], None]:
    """Return a function that shows a sentence to the user."""
    return partial(say_note, as_json=plan.options.log_format == "json")


def check_before_training(
    driver: ElasticDriver, checks: HostChecks, plan: LaunchPlan, hosts: Hosts
) -> dict[str, str]:
    """Check the hosts before the job begins; return the hosts to leave out, with the reasons.

    The report is shown, and kept in the run's folder. Raises ClusterError if no host is left or a
    signal ends the check.
    """
    report = run_check(driver, hosts, checks)
    checks.begin_with(report)
    bad = checks.excluded(report)
    if plan.verbosity >= 0 or bad:
        say(render_report(report, plan))
    if len(bad) == len(report.nodes):
        raise ClusterError(
            f"each node failed the check ({len(bad)}); the first: {report.nodes[0].node} "
            f"{next(iter(bad.values()))}; repair them, or start without --network-check"
        )
    return bad


def check_order(plan: LaunchPlan) -> CheckOrder:
    """Return what the plan says of node checks."""
    options = plan.options
    timeout = options.check_timeout
    return CheckOrder(
        timeout=timeout,
        start_timeout=min(plan.settings.start_timeout, timeout),
        heartbeat_timeout=plan.settings.heartbeat_timeout,
        exclude_slow=options.exclude_straggler,
        every_slot=plan.gpus,
        measures_network=options.comm_perf_test,
        trains=options.trains_for_check,
        ports=plan.spec.ports,
        env=plan.spec.env,
    )


def make_checks(
    plan: LaunchPlan,
    starter: MakeBackend,
    run_dir: RunDir,
    say: Callable[[str], None] | None = None,
) -> HostChecks:
    """Return the node checks of a run; `say` shows a line to the user, if not `sayer`."""
    return check_command().make_checks(
        check_order(plan),
        starter=starter,
        run_dir=run_dir,
        state_dir=Path(plan.state_dir),
        say=sayer(plan) if say is None else say,
        quiet=plan.verbosity < 0,
    )


def run_check(driver: ElasticDriver, hosts: Hosts, checks: HostChecks) -> Report:
    """Check hosts and keep the report beyond this run; return it with earlier findings.

    Raises ElasticError if the check cannot begin, or a signal ends it.
    """
    with ended_by_signals("the node check"):
        report = driver.check(hosts)
    return checks.remember(report)


def render_report(report: Report, plan: LaunchPlan) -> str:
    """Return the report as a table, or as one line of JSON."""
    as_json = plan.options.log_format == "json"
    return msgspec.json.encode(report).decode() if as_json else str(report.render())


class WithoutHosts:
    """A discovery without the hosts that failed the check (a `HostDiscovery`)."""

    def __init__(self, source: HostDiscovery, excluded: dict[str, str]) -> None:
        self._source, self._excluded = source, excluded
        self.cancel = source.cancel

    def find(self) -> Hosts:
        """Return the other hosts of the source."""
        return tuple(entry for entry in self._source.find() if entry[0] not in self._excluded)


# ---- signals ------------------------------------------------------------------------------


_SIGNALS = {
    signal.SIGINT: ("interrupted by Ctrl-C", ExitCode.INTERRUPTED),
    signal.SIGTERM: ("told to stop by SIGTERM", ExitCode.TERMINATED),
    signal.SIGUSR1: ("told by SIGUSR1 that its time is over", ExitCode.TERMINATED),
    signal.SIGUSR2: ("told by SIGUSR2 that its time is over", ExitCode.TERMINATED),
    signal.SIGHUP: ("its terminal was closed (SIGHUP)", ExitCode.TERMINATED),
}


def announce_end(driver: ElasticDriver, reason: str, notice: float) -> None:
    """Let the job leave at a step boundary, within `notice` seconds; stop it at once if that is 0.

    Any thread may call it, and more than once. A driver that takes no notice (any more) stops at
    once, too.
    """
    if driver.stop_asked:
        return
    if not notice or not driver.post(JobLeaving(reason, notice)):
        driver.request_stop(reason, int(ExitCode.TERMINATED))


@contextlib.contextmanager
def stop_on_signals(driver: ElasticDriver, *, notice: float) -> Iterator[None]:
    """Let signals end the job, and not this process, while the context is open.

    A signal of a batch system or a service manager gives the job `notice` seconds to leave; if that
    is 0, the job stops at once. It counts once.
    """
    told = False

    def ask(number: int) -> None:
        nonlocal told
        reason, exit_code = _SIGNALS[signal.Signals(number)]
        if number in TO_LEAVE:
            if not told:
                announce_end(driver, reason, notice)
            told = True
        elif number == signal.SIGINT or not driver.stop_asked:
            driver.request_stop(reason, int(exit_code))

    with handled(_SIGNALS, ask):
        yield


@contextlib.contextmanager
def ended_by_signals(what: str) -> Iterator[None]:
    """Let the first signal end something by an error; later signals change nothing."""
    stopped = False

    def stop(number: int) -> None:
        nonlocal stopped
        if stopped:
            return
        stopped = True
        name = signal.Signals(number).name
        error = ClusterError(f"{what} was stopped by {name}; nothing was started")
        interrupted = number == signal.SIGINT
        error.exit_code = ExitCode.INTERRUPTED if interrupted else ExitCode.TERMINATED
        raise error

    with handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), stop):
        yield


# ---- the first failure --------------------------------------------------------------------


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def write_error_file(result: JobResult, environ: Mapping[str, str]) -> str:
    """Write the failure of a job that has one; return why that was impossible, "" otherwise."""
    name = environ.get(ERROR_FILE)
    if not name or result.exit_code == 0:
        return ""
    message, trace = result.reason, ""
    failure = result.failure
    if failure is not None:
        lines = last_words(failure.log_tail)
        trace = "\n".join(lines)
        message = lines[-1] if lines else describe_failure(failure)
    known = {"py_callstack": trace, "timestamp": str(int(result.ended))}
    if failure is not None:
        known |= {"rank": str(failure.rank), "host": failure.host, "worker": failure.worker}
    told = {"message": message, "extraInfo": known, "errorCode": result.exit_code}
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        with open(open_named(name), "wb") as stream:
            stream.write(msgspec.json.encode({"message": told}))
    except OSError as error:
        return f"cannot write {ERROR_FILE} {name}: {error.strerror}"
    return ""
