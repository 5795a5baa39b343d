"""A run whose journal is in etcd, as one process of `elasticrun` has it: a driver, or a standby.

A driver copies what etcd has into the run's folder and goes on from there as any driver does. So
etcd decides whether the run goes on, and the folder is only a copy.

`elasticrun --standby` waits beside a driver on another host, and goes on with its job. It copies
the journal from etcd a few times a second. When the key of the driver is gone, because its host has
lost power or network for longer than the lease, one standby takes the key and becomes the driver
(docs/standby.md).
"""

import contextlib
import signal
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, TypeAlias

from elastic_driver.errors import ClusterError, ElasticError, ExitCode, TakenOverError, UsageError
from elastic_driver.runtime.journal import follower as mirror
from elastic_driver.runtime.journal.etcd import PLAIN_VARIABLE, EtcdClient, EtcdError, read_access
from elastic_driver.runtime.journal.follower import About, Ended, EtcdStore, Follower, RunState
from elastic_driver.runtime.journal.journal_file import SqliteStore
from elastic_driver.runtime.journal.replay import ResumedRun, load_run
from elastic_driver.runtime.journal.tenure import Tenure, new_key
from elastic_driver.runtime.results import JobResult
from elastic_driver.runtime.run_dir import RunDir
from launcher.edge import handled
from launcher.launch import host_source as where
from launcher.launch import resume
from launcher.launch.host_source import JoinedHosts
from launcher.launch.plan import LaunchPlan
from launcher.launch.resume import take_unfinished
from launcher.options.given import CommandLine, resolve_again
from launcher.options.table import OPTIONS, LaunchOptions

LOOK_S = 0.1  # between two looks at the key of the driver
_LATE_S = 3.0  # for etcd to delete a key whose lease is over


def check_journal(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Raise UsageError if the journal of this job cannot be kept in etcd."""
    if plan.options.run_id is None:
        raise UsageError(f"--journal {plan.options.journal} needs --run-id: the job's name in etcd")
    if isinstance(plan.hosts, JoinedHosts) and plan.hosts.own:
        raise UsageError(
            "--journal etcd://… is not for a server that trains, as its own workers are lost with "
            "it; begin the job with --serve on one host, and --join on every host that trains"
        )
    read_access(plan.options.journal, environ, insecure=plan.driver.insecure)


class EtcdRun(contextlib.AbstractContextManager["EtcdRun"]):
    """One run. Every method may raise EtcdError if etcd does not answer; one thread uses it."""

    def __init__(
        self,
        options: LaunchOptions,
        environ: Mapping[str, str],
        run_dir: RunDir,
        say: Callable[[str], None],
        *,
        insecure: bool = False,
    ) -> None:
        """Take nothing yet; raises UsageError for an address or a file that cannot be used."""
        access = read_access(options.journal, environ, insecure=insecure)
        if access.is_plain_here:
            say(
                f"{access} is asked without TLS: other users of this machine can read the job's "
                "token there, and control the job; name etcd's CA in ELASTIC_ETCD_CA, or set "
                f"{PLAIN_VARIABLE}=1 if nobody else logs in here"
            )
        self._client = EtcdClient(access)
        self._run_dir = run_dir
        self._lease_s = options.driver_lease
        self._say = say
        files = run_dir.journal_file, run_dir.token_file
        self._follower = Follower(self._client.clone(), run_dir.run_id, *files)
        self._store: EtcdStore | None = None  # as the driver of the run

    def copy(self) -> RunState | None:
        """Copy what is new into the run's folder, which is locked; return the state of the run."""
        try:
            return self._follower.copy()
        except (OSError, sqlite3.Error) as error:
            where = self._run_dir.journal_file
            raise ClusterError(f"cannot copy the journal from etcd to {where}: {error}") from error

    def find(
        self, line: CommandLine, cwd: str, former: ResumedRun | None
    ) -> ResumedRun | JobResult | None:
        """Return the run to go on with, its result if it is over; None: a job begins.

        `former`: the run that --resume has found in the folder. Raises as `fetch` and
        `resume.take_unfinished` do.
        """
        if self._store is not None:  # a standby has taken the run
            return former
        ended = self.fetch()
        if ended is not None:
            return ended if former is not None or line.options.resume else None
        if former is not None:
            return load_run(self._run_dir.journal_file)
        return take_unfinished(line, self._run_dir, cwd, alone=False)

    def fetch(self) -> JobResult | None:
        """Make the run's folder say what etcd says; return the result of a run that is over.

        Waits for the lease of a driver that has died a moment ago. Raises UsageError if the run has
        a driver, or the folder has an unfinished run that etcd does not know.
        """
        self._run_dir.take()
        waited_since = time.monotonic()
        state = self.copy()
        while state is not None and state.driver is not None:
            if time.monotonic() > waited_since + self._lease_s + _LATE_S:
                hint = "give another --run-id, stop that job first, or wait beside it: --standby"
                url = state.driver.url or "no address yet"
                raise UsageError(f"run {self._run_dir.run_id} has {state.driver} ({url}); {hint}")
            time.sleep(LOOK_S)
            state = self.copy()
        if state is None and self._run_dir.unfinished:
            raise UsageError(
                f"run {self._run_dir.run_id} is unfinished in {self._run_dir.path}, and etcd does "
                "not know it; resume it without --journal, or give another --run-id"
            )
        if state is None or not state.is_copied:
            self._run_dir.token_file.unlink(missing_ok=True)  # the folder is of no unfinished run
        return None if state is None or state.end is None else result_of(state.end)

    def take(self, run: ResumedRun | None) -> EtcdStore:
        """Become the driver of the run, or of a new one; return the place of its journal.

        Raises `TakenOverError` if another process does so at the same moment. Idempotent.
        """
        if self._store is not None:
            return self._store
        self._follower.close()
        run_dir, client = self._run_dir, self._client
        term, n, at = (1, 0, 0.0) if run is None else (run.term + 1, run.n, run.at)
        tenure = Tenure(client, run_dir.run_id, new_key(term, n, at), self._lease_s)
        tenure.take(*(mirror.begin_anew(tenure.keys) if run is None else ()))
        local = SqliteStore(run_dir.journal_file)
        self._store = EtcdStore(client, tenure, local, run_dir.token_file, self._say)
        self._store.start()
        return self._store

    def close(self) -> None:
        """Give the run back, if this process is its driver, and close the connections."""
        self._follower.close()
        if self._store is not None:
            self._store.stop()
        self._client.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def result_of(end: Ended) -> JobResult:
    """Return the result of a run that is over."""
    return JobResult(exit_code=end.exit_code, reason=end.reason, ended=end.at)


# ---- a standby ----------------------------------------------------------------------------


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
    _check_options(given)
    import_module("launcher.launch.submit")  # takes a second, which a dead driver must not cost
    try:
        run_dir.take()
    except ElasticError as error:
        hint = "a standby needs a --state-dir that no other driver or standby of this run uses"
        raise UsageError(f"{error}; {hint}") from error
    try:
        with EtcdRun(given.options, environ, run_dir, say) as etcd:
            with handled(_SIGNALS, _stop):
                found = _wait_for_job(etcd, run_dir, given, environ, say)
            if isinstance(found, JobResult):
                say(f"run {run_dir.run_id} is over: {found.reason}")
                return found
            return go_on(found.line, (run_dir, found.run), etcd)
    finally:
        run_dir.close()  # the copy of the token is no use without this process


def _check_options(given: CommandLine) -> None:
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


def _wait_for_job(
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
                return _take_run(etcd, run_dir, given, environ)
            now = _describe_wait(state)
        except TakenOverError as error:
            now = str(error)  # another standby was faster
        except EtcdError as error:
            now = str(error)
        if now != said:
            said = now
            say(f"standby for run {given.options.run_id}: {now}")
        time.sleep(LOOK_S)


def _describe_wait(state: RunState | None) -> str:
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


def _take_run(
    etcd: EtcdRun, run_dir: RunDir, given: CommandLine, environ: Mapping[str, str]
) -> _Taken:
    """Become the driver; raises `TakenOverError` if another standby does so."""
    run = replace(load_run(run_dir.journal_file), url="")  # its address is not of this host
    etcd.take(run)
    line = resume.line_of(run, given, environ)
    return _Taken(run, line.having("rdzv_endpoint", given.settings["rdzv_endpoint"]))
