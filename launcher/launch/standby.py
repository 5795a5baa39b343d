"""`elasticrun --standby`: waits beside a driver on another host, and goes on with its job.

A standby copies the journal from etcd a few times a second. When the key of the driver is gone,
because its host has lost power or network for longer than the lease, one standby takes the key and
becomes the driver (docs/standby.md).
"""

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from elastic_driver.errors import ClusterError, ElasticError, ExitCode, TakenOverError, UsageError
from elastic_driver.runtime.journal.etcd import EtcdError
from elastic_driver.runtime.journal.follower import About, RunState
from elastic_driver.runtime.journal.resume import ResumedRun, load_run
from elastic_driver.runtime.results import JobResult
from elastic_driver.runtime.run_dir import RunDir
from launcher.edge import handled
from launcher.launch import hosts as where
from launcher.launch import resume, submit
from launcher.launch.etcd_run import LOOK_S, EtcdRun, result_of
from launcher.options.table import OPTIONS
from launcher.options.values import CommandLine, resolve_again

# Options of the standby itself; all others are those of the job.
_OWN = (
    *("run_id", "state_dir", "journal", "standby", "driver_lease", "rdzv_endpoint"),
    *("log_format", "verbose", "quiet"),
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GoOn: TypeAlias = Callable[[CommandLine, tuple[RunDir, ResumedRun], EtcdRun], JobResult | int]


class _Taken(NamedTuple):
    """The run that this process has taken, and the command line that began it."""

    run: ResumedRun
    line: CommandLine


def stand_by(
    given: CommandLine,
    run_dir: RunDir,
    environ: Mapping[str, str],
    *,
    go_on: GoOn,
    say: Callable[[str], None],
) -> JobResult | int:
    """Wait until the job is over, or this process goes on with it; return the job's result.

    `go_on` runs the driver; `say` shows a line to the user. Raises UsageError for options that have
    no meaning here, or a job that no other host can go on with.
    """
    _check(given)
    assert submit  # noqa: S101 - its imports take a second, and are done before it is needed
    try:
        run_dir.take()
    except ElasticError as error:
        hint = "a standby needs a --state-dir that no other driver or standby of this run uses"
        raise UsageError(f"{error}; {hint}") from error
    try:
        with EtcdRun(given.options, environ, run_dir, say) as etcd:
            with handled(_SIGNALS, _stop):
                found = _wait(etcd, run_dir, given, environ, say)
            if isinstance(found, JobResult):
                say(f"run {run_dir.run_id} is over: {found.reason}")
                return found
            return go_on(found.line, (run_dir, found.run), etcd)
    finally:
        run_dir.close()  # the copy of the token is no use without this process


def _check(given: CommandLine) -> None:
    options = given.options
    if options.run_id is None or not options.in_etcd:
        raise UsageError("--standby needs --run-id ID and --journal etcd://…, those of the job")
    if given.command:
        raise UsageError("--standby takes no command: it goes on with the job of --run-id")
    for option in OPTIONS:
        if given.level(option.field) > 1 and option.field not in _OWN:
            raise UsageError(
                f"{option.long} cannot be given with --standby: the job goes on with its own"
            )


def _stop(number: int) -> None:
    name = signal.Signals(number).name
    error = ClusterError(f"the standby was ended by {name}; the job goes on without it")
    interrupted = number == signal.SIGINT
    error.exit_code = ExitCode.INTERRUPTED if interrupted else ExitCode.TERMINATED
    raise error


def _wait(
    etcd: EtcdRun,
    run_dir: RunDir,
    given: CommandLine,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> JobResult | _Taken:
    """Return the result of the job, or the run once this process has taken it."""
    said, began = "", -1.0
    while True:
        try:
            state = etcd.copy()
            if state is not None and state.end is not None:
                return result_of(state.end)
            if state is not None and state.about.began != began:
                began = state.about.began
                _check_job(state.about, environ)
            if state is not None and state.driver is None and state.is_copied:
                return _take(etcd, run_dir, given, environ)
            now = _describe(state)
        except TakenOverError as error:
            now = str(error)  # another standby was faster
        except EtcdError as error:
            now = str(error)
        if now != said:
            said = now
            say(f"standby for run {given.options.run_id}: {now}")
        time.sleep(LOOK_S)


def _describe(state: RunState | None) -> str:
    if state is None:
        return "waits for the job to begin"
    if state.driver is None:
        return f"driver {state.term} is gone, and its job has not begun"
    return f"waits beside {state.driver}"


def _check_job(about: About, environ: Mapping[str, str]) -> None:
    """Raise UsageError now if this host could not go on with the job later."""
    if not Path(about.cwd).is_dir():
        raise UsageError(
            f"the working folder {about.cwd} of run {about.run_id} is not on this host"
        )
    line = resolve_again(about.argv, environ)
    role = where.decide_role(line, environ, lambda _host, _port: True)
    if role is not None and (isinstance(role, where.Join) or role.own):
        raise UsageError(
            f"run {about.run_id} has a server that trains, too, so its driver cannot move to "
            "another host; resume it there (--resume)"
        )


def _take(etcd: EtcdRun, run_dir: RunDir, given: CommandLine, environ: Mapping[str, str]) -> _Taken:
    """Become the driver; raises `TakenOverError` if another standby does so."""
    run = replace(load_run(run_dir.journal_file), url="")  # its address is not of this host
    etcd.take(run)
    line = resume.line_of(run, given, environ)
    return _Taken(run, line.having("rdzv_endpoint", given.settings["rdzv_endpoint"]))
