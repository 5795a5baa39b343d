"""The resources of one driver: its files, journal, server and backend, opened and freed in order.

`open` takes the run's folder, the journal of an earlier driver, the port and the backend, in this
order; `close` frees them in the reverse order. Times are seconds.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from elastic_driver import contract
from elastic_driver.brain.store.address import Address
from elastic_driver.errors import ClusterError, TakenOverError
from elastic_driver.features.goodput.driver import RunLedger
from elastic_driver.job.decisions import EndJob
from elastic_driver.job.events import LeaseExpired
from elastic_driver.kernel.machine import ForMachine
from elastic_driver.runtime import mailbox as mail
from elastic_driver.runtime.api import DriverRoutes, job_access
from elastic_driver.runtime.backend import Backend, MakeBackend, ReportsConnections
from elastic_driver.runtime.brain_link import BrainReports
from elastic_driver.runtime.discovery import HostDiscovery
from elastic_driver.runtime.endpoint import (
    Identity,
    all_hear,
    await_port,
    choose_identity,
    first_documents,
    listen,
    ports_to_try,
    tell_agents,
)
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.executor import Executor
from elastic_driver.runtime.host_checks import HostChecks
from elastic_driver.runtime.job_record import JobRecord
from elastic_driver.runtime.journal.journal_file import Head, JournalStore
from elastic_driver.runtime.journal.replay import ResumedRun
from elastic_driver.runtime.journal.writer import Journal
from elastic_driver.runtime.library_logs import described, logs_shown
from elastic_driver.runtime.machine_api import DriverPort
from elastic_driver.runtime.mailbox import RunClock
from elastic_driver.runtime.metrics import JobTimes
from elastic_driver.runtime.output_routes import AgentsOutput, LogRoutes, without_numbers
from elastic_driver.runtime.probes import Suspects
from elastic_driver.runtime.reporter import Reporter
from elastic_driver.runtime.results import JobResult
from elastic_driver.runtime.run_dir import RunDir
from elastic_driver.runtime.status_routes import Nodes
from elastic_driver.runtime.worker_logs import MIB, WorkerLogs
from elastic_driver.settings import DriverOptions, Settings
from elastic_driver.words.orders import JobSpec
from rendezvous.auth import Role, make_token, read_credentials, read_token_file
from rendezvous.errors import CertificateError, RendezvousError
from rendezvous.server import Callbacks, RendezvousServer, ServerTls, Succession


@dataclass(kw_only=True, eq=False)
class DriverSetup:
    """The job of a driver, and the parts that it is made of; nothing is opened yet."""

    settings: Settings
    spec: JobSpec  # of the job's workers
    discovery: HostDiscovery
    starter: MakeBackend  # makes the backend once the rendezvous has an address
    run_dir: RunDir  # not yet created
    reporter: Reporter
    options: DriverOptions = field(default_factory=DriverOptions)
    checks: HostChecks | None = None  # None: nodes are never checked
    joined: Nodes | None = None  # takes in nodes; `discovery` and `starter` ask it
    secrets: tuple[str, ...] = ()  # taken like the operator's token
    argv: tuple[str, ...] = ()  # the command line, for a driver that goes on with the run
    cwd: str = ""  # its folder
    resumed: ResumedRun | None = None  # the run of a driver that has died, to go on with
    store: JournalStore | None = None  # of the journal; None: a file in the run's folder
    environ: Mapping[str, str] = field(default_factory=dict)  # the variables of `elasticrun`
    statistics: Address | None = None  # the database; None: no statistics are kept
    brain: BrainReports | None = None  # for the Brain that grants hosts; None: there is no Brain

    @property
    def term(self) -> int:
        """The number of this driver among those of the run, from 1."""
        return 1 if self.resumed is None else self.resumed.term + 1


class _Driver(DriverPort, Protocol):
    """The driver, as its resources use it."""

    def post(self, event: ForMachine) -> bool:
        """Put an event into the mailbox; False when it is full, or there is no job for it."""


class DriverResources:
    """The resources of one driver (see the module); the HTTP routes call `driver`."""

    def __init__(self, setup: DriverSetup, mailbox: mail.DriverMailbox, driver: _Driver) -> None:
        if setup.resumed is not None:
            setup.settings = setup.resumed.settings
        self._setup, self._mailbox = setup, mailbox
        clock, note = time.time, setup.reporter.note
        self.log = EventLog(setup.run_dir.events_file, clock=clock, on_broken=note)
        self.clock = RunClock(None if setup.resumed is None else setup.resumed.at)
        self.journal = Journal(
            setup.run_dir.journal_file,
            setup.spec.run_id,
            store=setup.store,
            clock=self.clock,
            on_taken_over=self._taken_over,
        )
        if setup.store is not None:
            setup.store.on_taken_over = self._taken_over
        setup.run_dir.lock.on_lost = lambda reason: self._taken_over(TakenOverError(reason))
        former = {} if setup.resumed is None else setup.resumed.keys
        output = AgentsOutput(setup.reporter.note, keep=self._keep, kept=former)
        self.times = JobTimes()
        most = setup.spec.keep_output * MIB
        self._logs = WorkerLogs(setup.run_dir.output_folder, most, setup.reporter.note)
        logs = LogRoutes(self._logs)
        self.routes = DriverRoutes(
            driver, self.log, setup.joined, output, logs=logs, times=self.times
        )
        self.server: RendezvousServer | None = None
        self._suspects = Suspects(driver.post)
        self._began = 0.0  # unix seconds
        self._closing = contextlib.ExitStack()  # frees what was opened, the newest first
        self._end: EndJob | None = None  # of the job, before everything is closed
        self._begun = False  # the job
        self._replaced = False  # another driver goes on with the job
        self._result: JobResult | None = None  # of that job, once its end is logged

    @property
    def began(self) -> float:
        """The time of the run's beginning, in unix seconds."""
        return self._began

    # ---- opening -------------------------------------------------------------------------

    def open(self) -> Executor:
        """Open everything but the job's own files; return what carries out decisions.

        Raises ElasticError if that is impossible; `free` is to be called then.
        """
        setup = self._setup
        self._closing.enter_context(logs_shown(setup.reporter.logged))
        self._began = time.time() if setup.resumed is None else setup.resumed.began
        setup.run_dir.create(anew=setup.resumed is None)
        self._closing.callback(self._close_run_dir)
        with self._startup_errors():
            token, identity = self._make_credentials()
            if setup.resumed is not None:
                self._closing.callback(self.journal.close)
                self.open_journal()
                self.journal.await_open()
            server = self.server = self._open_server(token, identity)
        self._closing.callback(self.log.close)
        self._closing.callback(self._logs.close)
        self._closing.callback(self.journal.close)
        for nodes in (setup.joined, setup.checks):
            if nodes is not None:
                nodes.open(server, token)
        if setup.checks is not None:
            setup.checks.begin_term(setup.term)
            self._closing.callback(setup.checks.stop)
        return self._make_executor(server)

    def open_journal(self) -> None:
        """Open the journal, as this driver of the run."""
        setup, clock = self._setup, self.clock
        began = setup.spec.run_id, setup.argv, setup.cwd
        if setup.resumed is None:
            head = Head(*began, at=clock(), unix_offset=clock.unix_offset)
        else:
            head = Head(*began, setup.term, setup.resumed.n, setup.resumed.at, clock.unix_offset)
        self.journal.open(head)

    def publish(self) -> None:
        """Open the event log, and write the address for other programs."""
        with self._startup_errors():
            self.log.open()
            assert self.server is not None  # noqa: S101 - `open` comes first
            self._setup.run_dir.write_endpoint(self.server.url, self._began)

    def on_close(self, free: Callable[[], object]) -> None:
        """Have `free` called before everything that is open now is freed."""
        self._closing.callback(free)

    @contextlib.contextmanager
    def _startup_errors(self) -> Iterator[None]:
        """Turn errors of files and of the rendezvous into messages for the user."""
        try:
            yield
        except OSError as error:
            what = f"{error.filename or self._setup.run_dir.path}: {error.strerror}"
            raise ClusterError(f"the driver cannot start: {what}") from error
        except CertificateError:  # a mistake of the user, as it is told
            raise
        except RendezvousError as error:
            raise ClusterError(f"the driver cannot start: {error}") from error

    def _make_credentials(self) -> tuple[str, Identity]:
        """Return the job's token and the server's identity, and write what clients need.

        Agents that give up remove the former driver's token.
        """
        run_dir = self._setup.run_dir
        goes_on = self._setup.resumed is not None and run_dir.token_file.exists()
        former = read_credentials(run_dir.token_file) if goes_on else None
        identity = choose_identity(self._setup.options, run_dir.certificate, former)
        token = make_token() if former is None else former.token
        run_dir.write_tokens(token, identity.known_by)
        return token, identity

    def _open_server(self, token: str, identity: Identity) -> RendezvousServer:
        """Return a server that listens, and holds the driver's term and the job's specification."""
        setup, routes = self._setup, self.routes
        run, host = setup.resumed, setup.options.bind_host
        kept = {} if run is None else without_numbers(run.keys)
        ports = ports_to_try(
            setup.options.bind_port,
            0 if run is None else run.port,
            setup.options.any_port,
            resumed=run is not None,
            all_hear=run is None or all_hear(run.job),
        )
        if run is not None:
            await_port(host, ports[0])
        server = RendezvousServer(
            host,
            ports if len(ports) > 1 else ports[0],
            token=token,
            tls=ServerTls(
                certificate=identity.certificate,
                known_by=identity.known_by,
                also_plain=identity.also_plain,
            ),
            others=dict.fromkeys(setup.secrets, Role.OPERATOR),
            callbacks=Callbacks(
                on_lease_expired=self._lease_expired,
                on_client_left=self._suspects.client_left,
                on_failed=self._cannot_serve,
            ),
            routes=routes.add_to,
            posts=routes.posts,
            succession=Succession(
                first_revision=setup.term << 40,  # clients have seen older revisions only
                first=partial(first_documents, setup.term, setup.spec, kept),
                on_changes=lambda values: self._mailbox.put(mail.KeysChanged(values)),
                passing=contract.PASSING_SCOPES,
            ),
            limits=setup.options.limit,
            access=job_access(routes.rounds),
        )
        say = None if run is None else setup.reporter.note
        listen(server, ports, setup.spec.run_id, say)
        self._closing.callback(server.stop)
        self._suspects.server, self._suspects.token = server, token
        return server

    def _make_executor(self, server: RendezvousServer) -> Executor:
        setup = self._setup
        starter = setup.starter(server.url, setup.run_dir.token_file)
        if isinstance(starter, ReportsConnections):
            starter.report_connections(partial(self._suspects.found, "backend"))
        record = JobRecord(
            log=self.log,
            reporter=setup.reporter,
            clock=self.clock,
            times=self.times,
            ledger=RunLedger(None if setup.resumed is None else setup.run_dir.events_file),
        )
        executor = Executor(
            server=server,
            rounds=self.routes.rounds,
            starter=starter,
            record=record,
            checks=setup.checks,
            suspects=self._suspects,
            post=self._mailbox.put,
        )
        # Every worker's output has been forwarded once the starter is closed.
        self._closing.callback(self._log_end, record)
        self._closing.callback(self._close_starter, starter)
        return executor

    # ---- while it is open ----------------------------------------------------------------

    def tell_agents(self, run: ResumedRun) -> None:
        """Tell the agents of an earlier driver the address of this one."""
        setup = self._setup
        if self.server is not None:
            told = tell_agents(
                list(run.job.fleet.agents.values()),
                run_id=setup.spec.run_id,
                term=setup.term,
                url=self.server.url,
                token=read_token_file(setup.run_dir.token_file),
                within=setup.settings.heartbeat_timeout,
            )
            self.server.spawn(told)

    def _keep(self, values: dict[str, bytes | None], kept: Callable[[], None]) -> None:
        """Keep values for the next driver; `kept` is called, by any thread, when they are."""
        self._mailbox.put(mail.KeysChanged(values, kept))

    def _taken_over(self, error: TakenOverError) -> None:
        """End without touching the job; any thread may call it."""
        self._mailbox.put(mail.TakenOver(error))

    def _cannot_serve(self, error: Exception) -> None:
        """End without touching the job: nobody can reach this driver any more."""
        hint = "this driver ends; the workers go on, and wait for the next one (--resume)"
        self._taken_over(TakenOverError(f"the rendezvous has ended ({described(error)}); {hint}"))

    def _lease_expired(self, key: str) -> None:
        """Pass an expired lease on; called by the server's thread."""
        if self._setup.joined is not None:
            self._setup.joined.lease_expired(key)
        self._suspects.lease_expired(key)
        if (lease := contract.lease_owner(key)) is not None:
            self._mailbox.put(LeaseExpired(*lease, self._setup.settings.heartbeat_timeout))

    # ---- closing -------------------------------------------------------------------------

    def close(self, end: EndJob, *, begun: bool, replaced: bool) -> JobResult | None:
        """Free everything; return the result of a job that has begun and ended here.

        `replaced`: another driver goes on with the job, its agents and its folder.
        """
        self._end, self._begun, self._replaced = end, begun, replaced
        self.free()
        return self._result

    def free(self) -> None:
        """Free what is open, the newest first. May be called again."""
        self._closing.close()

    def _close_starter(self, starter: Backend) -> None:
        if not self._replaced:  # the agents belong to the next driver
            starter.close(0.0)

    def _close_run_dir(self) -> None:
        """Remove the files of a job that is over; the next driver needs those of another."""
        if self._replaced or (self._end is None and self._setup.resumed is not None):
            self._setup.run_dir.leave()
        else:
            self._setup.run_dir.close()

    def _log_end(self, record: JobRecord) -> None:
        if self._begun and self._end is not None and not self._replaced:
            self._result = record.job_ended(self._end)
            self.journal.job_ended(self._end.exit_code, self._end.reason)
