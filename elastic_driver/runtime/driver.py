"""The driver of one run: opens its files and its server, runs its loop, and closes everything.

`elasticrun` makes one per job: `ElasticDriver(…).run()`. With a node check, `open` and `check` come
first. The driver's thread runs the loop (`runtime.loop`); all other threads (server, discovery,
backends, callers of `request_stop`) only put messages into the mailbox. The constructor
starts nothing. Times are seconds.
"""

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from elastic_driver import contract
from elastic_driver.core.decisions import EndJob
from elastic_driver.core.documents import JobSpec
from elastic_driver.core.events import JobEvent, LeaseExpired, StopRequested
from elastic_driver.core.job import Job
from elastic_driver.errors import ClusterError, ExitCode, TakenOverError
from elastic_driver.policies.nodecheck.messages import TaskEnded
from elastic_driver.policies.nodecheck.report import CheckReport
from elastic_driver.runtime import mailbox as mail
from elastic_driver.runtime.api import DriverRoutes
from elastic_driver.runtime.backend import Backend, MakeBackend, ReportsConnections
from elastic_driver.runtime.checks import NodeChecks
from elastic_driver.runtime.clock import RunClock
from elastic_driver.runtime.discovery import DiscoveryThread, HostDiscovery
from elastic_driver.runtime.endpoint import first_documents, listen
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.executor import Executor
from elastic_driver.runtime.host_lists import Hosts
from elastic_driver.runtime.joined import JoinedNodes
from elastic_driver.runtime.journal.resume import ResumedRun
from elastic_driver.runtime.journal.store import Head, JournalStore
from elastic_driver.runtime.journal.writer import Journal
from elastic_driver.runtime.loop import DriverLoop
from elastic_driver.runtime.machine_api import SHARDS_PATH
from elastic_driver.runtime.output import AgentsOutput
from elastic_driver.runtime.reporter import Reporter
from elastic_driver.runtime.results import JobResult
from elastic_driver.runtime.run_dir import RunDir
from elastic_driver.runtime.successor import tell_agents
from elastic_driver.runtime.suspects import Suspects
from elastic_driver.settings import DriverOptions, Settings
from rendezvous.auth import make_token, read_token_file, write_token_file
from rendezvous.errors import RendezvousError
from rendezvous.server import RendezvousServer
from rendezvous.wire import EVENTS_PATH

MAX_MAIL = 100_000  # waiting messages; beyond that, requests are refused with 503
SIGNAL_SLICE_S = 0.5  # the longest time until a signal is handled


@dataclass(kw_only=True, eq=False)
class ElasticDriver:
    """Runs one job. `run()` is `start()`, wait, and `stop()`."""

    settings: Settings
    spec: JobSpec  # of the job's workers
    discovery: HostDiscovery
    starter: MakeBackend  # makes the backend once the rendezvous has an address
    run_dir: RunDir  # not yet created
    reporter: Reporter
    options: DriverOptions = field(default_factory=DriverOptions)
    checks: NodeChecks | None = None  # None: nodes are never checked
    joined: JoinedNodes | None = None  # takes in nodes; `discovery` and `starter` ask it
    secrets: tuple[str, ...] = ()  # taken like the run's token
    argv: tuple[str, ...] = ()  # the command line, for a driver that goes on with the run
    cwd: str = ""  # its folder
    resumed: ResumedRun | None = None  # the run of a driver that has died, to go on with
    store: JournalStore | None = None  # of the journal; None: a file in the run's folder

    def __post_init__(self) -> None:
        clock, note = time.time, self.reporter.note
        self._log = EventLog(self.run_dir.events_file, clock=clock, on_broken=note)
        self._mailbox = mail.Mailbox()
        self._suspects = Suspects(self.post)
        self._server: RendezvousServer | None = None
        self._loop: DriverLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = contextlib.ExitStack()  # frees what was opened, the newest first
        self._clock = RunClock(None if self.resumed is None else self.resumed.at)
        if self.resumed is not None:
            self.settings = self.resumed.settings
        self._journal = Journal(
            self.run_dir.journal_file,
            self.spec.run_id,
            store=self.store,
            clock=self._clock,
            on_taken_over=self._taken_over,
        )
        if self.store is not None:
            self.store.on_taken_over = self._taken_over
        self.run_dir.lock.on_lost = lambda reason: self._taken_over(TakenOverError(reason))
        self._end: EndJob | None = None  # of the job, before everything is closed
        self._result: JobResult | None = None  # of a job that has begun, once its end is logged
        self._outcome: JobResult | None = None  # after everything is closed
        self._begun = False  # the job
        self._serving = False  # there is no job, and none will begin
        self._replaced = False  # another driver goes on with the job
        self._deaf = False  # no event is handled any more
        self._stop_asked = False
        self._began = 0.0  # unix seconds

    # ---- life ----------------------------------------------------------------------------

    def open(self) -> None:
        """Create the run's files, open the rendezvous and start the loop; no job begins yet.

        Raises ElasticError if that is impossible; nothing is left behind then.
        """
        self._began = time.time() if self.resumed is None else self.resumed.began
        self.run_dir.create(anew=self.resumed is None)
        try:
            loop = self._loop = self._make_loop()
            run = threading.Thread(target=self._run_loop, args=(loop,), name="driver", daemon=True)
            run.start()
        except BaseException:
            self._closing.close()
            raise
        self._thread = run

    def check(self, hosts: Hosts) -> CheckReport:
        """Check hosts before the job; raises ElasticError if that cannot begin."""
        answers: queue.SimpleQueue[CheckReport | Exception] = queue.SimpleQueue()
        self._mailbox.put(mail.CheckAsked(hosts, answers.put))
        while self._outcome is None:
            try:
                found = answers.get(timeout=SIGNAL_SLICE_S)
            except queue.Empty:
                continue
            if isinstance(found, Exception):
                raise found
            return found
        raise ClusterError(f"the node check was stopped: {self._outcome.reason}")

    def start(
        self, settings: Settings | None = None, discovery: HostDiscovery | None = None
    ) -> None:
        """Begin the job, with other settings or another source of hosts if they are given.

        Opens the driver first if that was not done. Raises ElasticError as `open` does. A job that
        goes on keeps its settings.
        """
        if self._thread is None:
            self.open()
        if self.resumed is None:
            self.settings = settings or self.settings
            self._journal.open(self._head)
        self._publish()
        self._journal.serves_at(self.endpoint)
        job = Job(self.settings) if self.resumed is None else self.resumed.job
        self._begun = True
        if self.resumed is not None:
            self._tell_agents(self.resumed)
        self._mailbox.put(mail.JobBegins(job, self.spec.run_id))
        source, interval = discovery or self.discovery, self.options.discovery_interval
        thread = DiscoveryThread(source, interval=interval, post=self._mailbox.put)
        self._closing.callback(thread.stop)
        thread.start()

    def serve(self) -> None:
        """Answer TensorFlow's nodes without a job, until `request_stop`.

        Raises ElasticError as `open` does.
        """
        self._serving = True
        self.open()
        self._publish()

    def _publish(self) -> None:
        """Open the event log, and write the address for other programs."""
        try:
            with self._startup_errors():
                self._log.open()
                self.run_dir.write_endpoint(self.endpoint, self._began)
        except BaseException:
            self.abandon()
            raise

    def run(
        self, settings: Settings | None = None, discovery: HostDiscovery | None = None
    ) -> JobResult:
        """Run the job to its end and return its result; see `start`."""
        self.start(settings, discovery)
        try:
            return self.wait()
        finally:
            self.stop()

    def wait(self) -> JobResult:
        """Block until the job is over and everything it started is gone; return its result."""
        self._join()
        if self._outcome is None:
            raise RuntimeError("a driver is started before it is waited for")
        return self._outcome

    def _join(self) -> None:
        # In slices: a signal that comes in the moment in which an endless wait begins is only
        # noted, and its handler would not run before the wait is over.
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(SIGNAL_SLICE_S)

    def stop(self) -> None:
        """End a job that still runs, with grace for its workers, and wait. Idempotent."""
        if self._thread is not None and self._outcome is None and not self._stop_asked:
            self.request_stop("the driver was stopped", int(ExitCode.TERMINATED))
        self._join()

    def abandon(self) -> None:
        """End everything at once, without grace, and wait. Idempotent."""
        self._mailbox.put(mail.StopNow())
        self._join()

    def request_stop(self, reason: str, exit_code: int) -> None:
        """Ask for the job's end; asked a second time, kill at once. Returns at once.

        May be called by any thread and by a signal handler: SimpleQueue.put is reentrant.
        """
        if self._stop_asked:
            self._mailbox.put(mail.StopNow())
        else:
            self._stop_asked = True
            self._mailbox.put(StopRequested(reason, exit_code))

    # ---- for the HTTP routes -------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The rendezvous' URL, once started."""
        if self._server is None:
            raise RuntimeError("the driver has no endpoint before it is started")
        return self._server.url

    @property
    def size_bounds(self) -> tuple[int, int | None]:
        """The fewest and (None: no limit) the most workers the job may have."""
        return self.settings.min_np, self.settings.max_np

    def post(self, event: mail.MachineEvent) -> bool:
        """Put an event into the mailbox; False when it is full, or there is no job for it."""
        taken = self._takes(event)
        if taken:
            self._mailbox.put(event)
        return taken

    def _takes(self, event: mail.MachineEvent) -> bool:
        if self._outcome is not None or len(self._mailbox) >= MAX_MAIL:
            return False
        return self._begun or event.machine != "job"

    def deliver(self, event: JobEvent | TaskEnded, acknowledge: Callable[[], None]) -> bool:
        """Put an event into the mailbox as `post` does; see `DriverPort.deliver`."""
        if not self._takes(event):
            return False
        self._mailbox.put(mail.Delivered(event, acknowledge))
        if self._deaf:
            self._acknowledge_the_rest()
        return True

    def ask_status(self, reply: Callable[[bytes], None]) -> None:
        """Have `reply` called by the mailbox thread with the status document."""
        self._mailbox.put(mail.StatusAsked(reply))

    # ---- opening and closing -------------------------------------------------------------

    @contextlib.contextmanager
    def _startup_errors(self) -> Iterator[None]:
        """Turn errors of files and of the rendezvous into messages for the user."""
        try:
            yield
        except OSError as error:
            what = f"{error.filename or self.run_dir.path}: {error.strerror}"
            raise ClusterError(f"the driver cannot start: {what}") from error
        except RendezvousError as error:
            raise ClusterError(f"the driver cannot start: {error}") from error

    @property
    def _head(self) -> Head:
        """The first lines of this driver's journal."""
        clock, began = self._clock, (self.spec.run_id, self.argv, self.cwd)
        if self.resumed is None:
            return Head(*began, at=clock(), unix_offset=clock.unix_offset)
        return Head(*began, self.term, self.resumed.n, self.resumed.at, clock.unix_offset)

    @property
    def term(self) -> int:
        """The number of this driver among those of the run, from 1."""
        return 1 if self.resumed is None else self.resumed.term + 1

    def _make_loop(self) -> DriverLoop:
        """Open everything but the job's own files; `_closing` frees what was opened."""
        routes = DriverRoutes(self, self._log, self.joined, AgentsOutput(self.reporter.note))
        self._closing.callback(self._close_run_dir)
        with self._startup_errors():
            token = self._make_token()
            if self.resumed is not None:
                self._closing.callback(self._journal.close)
                self._journal.open(self._head)
                self._journal.await_open()
            server = self._server = self._open_server(token, routes)
        self._closing.callback(self._log.close)
        self._closing.callback(self._journal.close)
        for nodes in (self.joined, self.checks):
            if nodes is not None:
                nodes.open(server, token)
        if self.checks is not None:
            self.checks.begin_term(self.term)
            self._closing.callback(self.checks.stop)
        return DriverLoop(
            mailbox=self._mailbox,
            executor=self._make_executor(server),
            lease=self.settings.heartbeat_timeout,
            checks=self.checks,
            status=self._status,
            answer=routes.requests.answer,
            acknowledge=routes.acknowledge,
            journal=self._journal,
            clock=self._clock,
            resumed=self.resumed,
            debug=self.options.debug,
        )

    def _make_token(self) -> str:
        """Return the job's token, in its file; agents that give up remove the former driver's."""
        if self.resumed is not None and self.run_dir.token_file.exists():
            return read_token_file(self.run_dir.token_file)
        token = make_token()
        write_token_file(self.run_dir.token_file, token)
        return token

    def _open_server(self, token: str, routes: DriverRoutes) -> RendezvousServer:
        """Return a server that listens, and holds the driver's term and the job's specification."""
        before, kept = (0, {}) if self.resumed is None else (self.resumed.port, self.resumed.keys)
        server = RendezvousServer(
            self.options.bind_host,
            self.options.bind_port or before,
            token=token,
            others=self.secrets if self.joined is None else self.joined.secrets,
            on_lease_expired=self._lease_expired,
            on_client_left=self._suspects.client_left,
            routes=routes.add_to,
            posts={
                EVENTS_PATH: routes.take_event,
                SHARDS_PATH: routes.requests.take_shard_request,
            },
            first_revision=self.term << 40,  # clients have seen older revisions only
            first=partial(first_documents, self.term, self.spec, kept),
            on_changes=lambda values: self._mailbox.put(mail.KeysChanged(values)),
            passing=contract.PASSING_SCOPES,
        )
        listen(server, self.spec.run_id, again=self.resumed is not None)
        self._closing.callback(server.stop)
        self._suspects.server = server
        return server

    def _tell_agents(self, run: ResumedRun) -> None:
        if self._server is not None:
            told = tell_agents(
                list(run.job.fleet.agents.values()),
                run_id=self.spec.run_id,
                term=self.term,
                url=self.endpoint,
                token=read_token_file(self.run_dir.token_file),
                within=self.settings.heartbeat_timeout,
            )
            self._server.spawn(told)

    def _make_executor(self, server: RendezvousServer) -> Executor:
        starter = self.starter(server.url, self.run_dir.token_file)
        if isinstance(starter, ReportsConnections):
            starter.report_connections(partial(self._suspects.found, "backend"))
        executor = Executor(
            server=server,
            starter=starter,
            log=self._log,
            reporter=self.reporter,
            checks=self.checks,
            suspects=self._suspects,
            post=self._mailbox.put,
            clock=self._clock,
        )
        # Every worker's output has been forwarded once the starter is closed.
        self._closing.callback(self._log_end, executor)
        self._closing.callback(self._close_starter, starter)
        return executor

    def _close_starter(self, starter: Backend) -> None:
        if not self._replaced:  # the agents belong to the next driver
            starter.close(0.0)

    def _taken_over(self, error: TakenOverError) -> None:
        """End without touching the job; any thread may call it."""
        self._mailbox.put(mail.TakenOver(error))

    def _close_run_dir(self) -> None:
        """Remove the files of a job that is over; the next driver needs those of another."""
        if self._replaced or (self._end is None and self.resumed is not None):
            self.run_dir.leave()
        else:
            self.run_dir.close()

    def _lease_expired(self, key: str) -> None:
        """Pass an expired lease on; called by the server's thread."""
        if self.joined is not None:
            self.joined.lease_expired(key)
        self._suspects.lease_expired(key)
        if (lease := contract.lease_owner(key)) is not None:
            self._mailbox.put(LeaseExpired(*lease, self.settings.heartbeat_timeout))

    def _log_end(self, executor: Executor) -> None:
        if self._begun and self._end is not None and not self._replaced:
            self._result = executor.job_ended(self._end)
            self._journal.job_ended(self._end.exit_code, self._end.reason)

    # ---- the driver's thread -------------------------------------------------------------

    def _run_loop(self, loop: DriverLoop) -> None:
        """Handle messages until the job ends, or a bug of ours ends it."""
        try:
            while loop.end is None:
                loop.turn()
            loop.wind_down(self.settings.stop_grace)
            end = loop.end
        except TakenOverError as error:
            self._replaced = True
            self.reporter.note(str(error))
            end = EndJob(int(error.exit_code), str(error))
        except BaseException:  # nothing may leave agents behind, and nothing is swallowed
            self.reporter.bug(traceback.format_exc())
            end = EndJob(int(ExitCode.BUG), "a bug of the driver ended it")
        self._end, self._deaf = end, not self._replaced
        try:
            self._acknowledge_the_rest()
            if self.joined is not None and not self._replaced:
                self.joined.job_ends(end.exit_code, end.reason)
            self._closing.close()
        except BaseException:
            self.reporter.bug(traceback.format_exc())
            end = EndJob(int(ExitCode.BUG), "a bug of the driver showed while it ended")
            self._result = None
        finally:
            result = JobResult(exit_code=end.exit_code, reason=end.reason, ended=time.time())
            self._outcome = self._result or result

    def _acknowledge_the_rest(self) -> None:
        """Answer the senders of events that came too late: the job is over, and needs them no more.

        The senders of events that another driver needs get no answer, and send them to it.
        """
        acts = [] if self._loop is None or not self._deaf else self._loop.unanswered
        with contextlib.suppress(queue.Empty):
            while self._deaf:
                message = self._mailbox.get(0.0)
                if isinstance(message, mail.Delivered):
                    acts.append(message.acknowledge)
        if acts and self._loop is not None:
            self._loop.acknowledge(acts)

    def _status(self) -> bytes:
        """Return the run, the job and what was measured as JSON; before the job, the check."""
        loop = self._loop
        checks = None if self.checks is None else self.checks.report
        if loop is None or (loop.job is None and not self._serving):
            checker = None if loop is None else loop.checker
            return msgspec.json.encode(checker.report(self._clock()) if checker else checks)
        document: dict[str, Any] = {
            "run_id": self.spec.run_id,
            "endpoint": self.endpoint,
            "started": self._began,
            "tf": loop.tf.status(),
        }
        if loop.job is None:
            return msgspec.json.encode({**document, "state": "serving"})
        document |= {
            "command": self.spec.command,
            **msgspec.to_builtins(loop.job.status(self._clock())),
            "step": loop.stragglers.step,
            "slow": loop.stragglers.status(),
            "events": self._log.counts(),
            "node_check": checks,
        }
        document["counters"]["false_alarms"] = loop.stragglers.false_alarms
        return msgspec.json.encode(document)
