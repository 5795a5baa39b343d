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
from elastic_driver.core.documents import JobSpec, encode
from elastic_driver.core.events import LeaseExpired, StopRequested
from elastic_driver.core.job import Job
from elastic_driver.errors import ClusterError, ExitCode
from elastic_driver.policies.nodecheck.report import CheckReport
from elastic_driver.runtime import mailbox as mail
from elastic_driver.runtime.api import DriverRoutes
from elastic_driver.runtime.backend import MakeBackend, ReportsConnections
from elastic_driver.runtime.checks import NodeChecks
from elastic_driver.runtime.discovery import DiscoveryThread, HostDiscovery
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.executor import Executor
from elastic_driver.runtime.host_lists import Hosts
from elastic_driver.runtime.joined import JoinedNodes
from elastic_driver.runtime.journal.writer import Journal
from elastic_driver.runtime.loop import DriverLoop
from elastic_driver.runtime.machine_api import SHARDS_PATH
from elastic_driver.runtime.output import AgentsOutput
from elastic_driver.runtime.reporter import Reporter
from elastic_driver.runtime.results import JobResult
from elastic_driver.runtime.run_dir import RunDir
from elastic_driver.runtime.suspects import Suspects
from elastic_driver.settings import DriverOptions, Settings
from rendezvous.auth import make_token, write_token_file
from rendezvous.errors import RendezvousError
from rendezvous.server import RendezvousServer
from rendezvous.wire import EVENTS_PATH, Set

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

    def __post_init__(self) -> None:
        clock, note = time.time, self.reporter.note
        self._log = EventLog(self.run_dir.events_file, clock=clock, on_broken=note)
        self._mailbox = mail.Mailbox()
        self._suspects = Suspects(self.post)
        self._server: RendezvousServer | None = None
        self._loop: DriverLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = contextlib.ExitStack()  # frees what was opened, the newest first
        self._end: EndJob | None = None  # of the job, before everything is closed
        self._result: JobResult | None = None  # of a job that has begun, once its end is logged
        self._outcome: JobResult | None = None  # after everything is closed
        self._begun = False  # the job
        self._serving = False  # there is no job, and none will begin
        self._stop_asked = False
        self._began = 0.0  # unix seconds

    # ---- life ----------------------------------------------------------------------------

    def open(self) -> None:
        """Create the run's files, open the rendezvous and start the loop; no job begins yet.

        Raises ElasticError if that is impossible; nothing is left behind then.
        """
        self._began = time.time()
        self.run_dir.create()
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

        Opens the driver first if that was not done. Raises ElasticError as `open` does.
        """
        if self._thread is None:
            self.open()
        self.settings = settings or self.settings
        self._publish()
        self._begun = True
        self._mailbox.put(mail.JobBegins(Job(self.settings), self.spec.run_id))
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
        if self._outcome is not None or len(self._mailbox) >= MAX_MAIL:
            return False
        if not self._begun and event.machine == "job":
            return False
        self._mailbox.put(event)
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

    def _make_loop(self) -> DriverLoop:
        """Open everything but the job's own files; `_closing` frees what was opened."""
        routes = DriverRoutes(self, self._log, self.joined, AgentsOutput(self.reporter.note))
        self._closing.callback(self.run_dir.close)
        with self._startup_errors():
            token, take_shards = make_token(), routes.requests.take_shard_request
            write_token_file(self.run_dir.token_file, token)
            self._server = RendezvousServer(
                self.options.bind_host,
                self.options.bind_port,
                token=token,
                others=self.secrets if self.joined is None else self.joined.secrets,
                on_lease_expired=self._lease_expired,
                on_client_left=self._client_left,
                routes=routes.add_to,
                posts={EVENTS_PATH: routes.take_event, SHARDS_PATH: take_shards},
            )
            self._closing.callback(self._server.start().stop)
            self._suspects.server = self._server
            self._server.apply([Set(contract.JOB_SPEC, encode(self.spec))])
        self._closing.callback(self._log.close)
        journal = Journal(self.run_dir.journal_file, self.spec.run_id)
        self._closing.callback(journal.close)
        for nodes in (self.joined, self.checks):
            if nodes is not None:
                nodes.open(self._server, token)
        if self.checks is not None:
            self._closing.callback(self.checks.stop)
        starter = self.starter(self.endpoint, self.run_dir.token_file)
        if isinstance(starter, ReportsConnections):
            starter.report_connections(partial(self._suspects.found, "backend"))
        executor = Executor(
            server=self._server,
            starter=starter,
            log=self._log,
            reporter=self.reporter,
            checks=self.checks,
            suspects=self._suspects,
            post=self._mailbox.put,
        )
        # Every worker's output has been forwarded once the starter is closed.
        self._closing.callback(self._log_end, executor)
        self._closing.callback(starter.close, 0.0)
        return DriverLoop(
            mailbox=self._mailbox,
            executor=executor,
            lease=self.settings.heartbeat_timeout,
            checks=self.checks,
            status=self._status,
            answer=routes.requests.answer,
            journal=journal,
            debug=self.options.debug,
        )

    def _lease_expired(self, key: str) -> None:
        """Pass an expired lease on; called by the server's thread."""
        if self.joined is not None:
            self.joined.lease_expired(key)
        if (agent := contract.heartbeat_owner(key)) is not None:
            self._suspects.found("silent", *agent)
        if (lease := contract.lease_owner(key)) is not None:
            self._mailbox.put(LeaseExpired(*lease, self.settings.heartbeat_timeout))

    def _client_left(self, key: str) -> None:
        """Report an agent whose connection has closed, by its lease; called by the server."""
        lease = contract.lease_owner(key)
        if lease is not None and lease[0] == "agent":
            self._suspects.found("disconnected", *contract.agent_named(lease[1]))

    def _log_end(self, executor: Executor) -> None:
        if self._begun and self._end is not None:
            self._result = executor.job_ended(self._end)

    # ---- the driver's thread -------------------------------------------------------------

    def _run_loop(self, loop: DriverLoop) -> None:
        """Handle messages until the job ends, or a bug of ours ends it."""
        try:
            while loop.end is None:
                loop.turn()
            loop.wind_down(self.settings.stop_grace)
            end = loop.end
        except BaseException:  # nothing may leave agents behind, and nothing is swallowed
            self.reporter.bug(traceback.format_exc())
            end = EndJob(int(ExitCode.BUG), "a bug of the driver ended it")
        self._end = end
        try:
            if self.joined is not None:
                self.joined.job_ends(end.exit_code, end.reason)
            self._closing.close()
        except BaseException:
            self.reporter.bug(traceback.format_exc())
            end = EndJob(int(ExitCode.BUG), "a bug of the driver showed while it ended")
            self._result = None
        finally:
            result = JobResult(exit_code=end.exit_code, reason=end.reason, ended=time.time())
            self._outcome = self._result or result

    def _status(self) -> bytes:
        """Return the run, the job and what was measured as JSON; before the job, the check."""
        loop = self._loop
        checks = None if self.checks is None else self.checks.report
        if loop is None or (loop.job is None and not self._serving):
            checker = None if loop is None else loop.checker
            return msgspec.json.encode(checker.report(time.monotonic()) if checker else checks)
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
            **msgspec.to_builtins(loop.job.status(time.monotonic())),
            "step": loop.stragglers.step,
            "slow": loop.stragglers.status(),
            "events": self._log.counts(),
            "node_check": checks,
        }
        document["counters"]["false_alarms"] = loop.stragglers.false_alarms
        return msgspec.json.encode(document)
