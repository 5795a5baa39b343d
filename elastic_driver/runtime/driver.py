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
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from elastic_driver.errors import ClusterError, ExitCode, TakenOverError
from elastic_driver.features import chapters
from elastic_driver.job.decisions import EndJob
from elastic_driver.job.events import StopRequested
from elastic_driver.job.job import Job
from elastic_driver.kernel.machine import ForMachine
from elastic_driver.options import masked
from elastic_driver.runtime import mailbox as mail
from elastic_driver.runtime.discovery import DiscoveryThread, HostDiscovery, Hosts
from elastic_driver.runtime.driver_parts import Companion, DriverPart, Run
from elastic_driver.runtime.executor import Executor
from elastic_driver.runtime.host_checks import Report
from elastic_driver.runtime.loop import DriverLoop
from elastic_driver.runtime.machine_api import Request
from elastic_driver.runtime.reporter import Change
from elastic_driver.runtime.resources import DriverResources, DriverSetup
from elastic_driver.runtime.results import JobResult
from elastic_driver.settings import Settings
from elastic_driver.words.progress import History, Measured

MAX_MAIL = 100_000  # waiting messages; beyond that, requests are refused with 503
SIGNAL_SLICE_S = 0.5  # the longest time until a signal is handled


class JobNow(NamedTuple):
    """A job in a few numbers, for the line at the bottom of a terminal."""

    workers: int  # of the present world
    aim: int  # the workers that the job aims at
    measured: Measured  # without workers and hosts
    change: Change | None  # the newest
    processes: int = 0  # that were started for a world which there is not yet


class ElasticDriver:
    """Runs one job. `run()` is `start()`, wait, and `stop()`."""

    def __init__(self, setup: DriverSetup) -> None:
        self._setup, self.reporter = setup, setup.reporter
        self._mailbox: mail.DriverMailbox = mail.Mailbox()
        self._resources = DriverResources(setup, self._mailbox, self)
        self._loop: DriverLoop | None = None
        self.companions: list[Companion] = []  # of the features, once the job has begun
        self._parts: list[DriverPart] = []  # of the features
        self._thread: threading.Thread | None = None
        self._outcome: JobResult | None = None  # after everything is closed
        self._begun = False  # the job
        self._takes_events = False  # the loop has `JobBegins`; it loses what comes before
        self._serving = False  # there is no job, and none will begin
        self._deaf = False  # no event is handled any more
        self._stop_asked = False

    # ---- life ----------------------------------------------------------------------------

    def open(self) -> None:
        """Create the run's files, open the rendezvous and start the loop; no job begins yet.

        Raises ElasticError if that is impossible; nothing is left behind then.
        """
        try:
            loop = self._loop = self._make_loop(self._resources.open())
            run = threading.Thread(target=self._run_loop, args=(loop,), name="driver", daemon=True)
            run.start()
        except BaseException:
            self._resources.free()
            self.reporter.close()
            raise
        self._thread = run

    def check(self, hosts: Hosts) -> Report:
        """Check hosts before the job; raises ElasticError if that cannot begin."""
        answers: queue.SimpleQueue[Report | Exception] = queue.SimpleQueue()
        loop = self._loop
        if loop is None:
            raise RuntimeError("a driver is opened before it checks hosts")
        self._mailbox.put(mail.Called(lambda: loop.checking.check(hosts, answers.put)))
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
        setup, resources = self._setup, self._resources
        if setup.resumed is None:
            setup.settings = settings or setup.settings
            resources.open_journal()
        self._publish(job=True)
        resources.journal.serves_at(self.endpoint)
        job = Job(setup.settings) if setup.resumed is None else setup.resumed.job
        self._begun = True
        if setup.resumed is not None:
            resources.tell_agents(setup.resumed)
        self._mailbox.put(mail.JobBegins(job, setup.spec.run_id))
        self._takes_events = True
        self._begin_companions()
        self._find_hosts(discovery or setup.discovery)

    def _find_hosts(self, source: HostDiscovery) -> None:
        """Have the Brain, or else this source, say which hosts the job may use."""
        brain, interval = self._setup.brain, self._setup.options.discovery_interval
        if brain is not None:
            brain.link.attach(lambda grant: self._mailbox.put(brain.event_of(grant)))
            return
        thread = DiscoveryThread(source, interval=interval, post=self._mailbox.put)
        self._resources.on_close(thread.stop)
        thread.start()

    def _begin_companions(self) -> None:
        """Have the features begin what runs beside the job."""
        run = Run(
            run_id=self._setup.spec.run_id,
            began=self._resources.began,
            environ=self._setup.environ,
            log=self._resources.log,
            say=self.reporter.note,
        )
        begun = (chapter.begin(run) for chapter in chapters("companion"))
        self.companions = [each for each in begun if each is not None]

    def serve(self) -> None:
        """Answer TensorFlow's nodes without a job, until `request_stop`.

        Raises ElasticError as `open` does.
        """
        self._serving = True
        self.open()
        self._publish(job=False)

    def _publish(self, *, job: bool) -> None:
        """Open the event log, and write the address for other programs; `job`: one begins."""
        try:
            self._resources.publish()
            if job:
                self._setup.run_dir.job_begins()
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

    @property
    def stop_asked(self) -> bool:
        """Whether `request_stop` was called: the next call kills at once."""
        return self._stop_asked

    # ---- for the HTTP routes -------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The rendezvous' URL, once started."""
        if self._resources.server is None:
            raise RuntimeError("the driver has no endpoint before it is started")
        return self._resources.server.url

    @property
    def size_bounds(self) -> tuple[int, int | None]:
        """The fewest and (None: no limit) the most workers the job may have."""
        return self._setup.settings.min_np, self._setup.settings.max_np

    def post(self, event: ForMachine) -> bool:
        """Put an event into the mailbox; False when it is full, or there is no job for it."""
        taken = self._takes(event)
        if taken:
            self._mailbox.put(event)
        return taken

    def _takes(self, event: ForMachine) -> bool:
        if self._outcome is not None or len(self._mailbox) >= MAX_MAIL:
            return False
        # Until `JobBegins` a driver that resumes has none of the machines of the one before it.
        return self._takes_events or (event.machine != "job" and self._setup.resumed is None)

    def deliver(self, event: Request, acknowledge: Callable[[], None]) -> bool:
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

    def history(self, since: float) -> History:
        """Return how the job has trained since then (unix seconds), in the last hour."""
        return History() if self._loop is None else self._loop.measuring.history(since)

    def now(self) -> JobNow | None:
        """Return the job in a few numbers; None before it begins. Any thread may ask."""
        loop = self._loop
        if loop is None or loop.job is None:
            return None
        ledger, change = loop.executor.record.ledger.ledger, self.reporter.last_change
        now = ledger.workers, ledger.aim
        return JobNow(*now, loop.measuring.job, change, ledger.processes)

    # ---- the driver's thread -------------------------------------------------------------

    def _make_loop(self, executor: Executor) -> DriverLoop:
        setup, resources = self._setup, self._resources
        made = (chapter for chapter in chapters("driver") if hasattr(chapter, "part"))
        self._parts = [chapter.part(setup, resources.began) for chapter in made]
        return DriverLoop(
            mailbox=self._mailbox,
            executor=executor,
            lease=setup.settings.heartbeat_timeout,
            status=self._status,
            answer=resources.routes.requests.answer,
            acknowledge=resources.routes.events.acknowledge,
            journal=resources.journal,
            clock=resources.clock,
            resumed=setup.resumed,
            brain=setup.brain,
            parts=self._parts,
            debug=setup.options.debug,
        )

    def _run_loop(self, loop: DriverLoop) -> None:
        """Handle messages until the job ends, or a bug of ours ends it."""
        reporter, replaced, logged = self.reporter, False, None
        try:
            while loop.end is None:
                with self._resources.log.together():
                    loop.turn()
            loop.wind_down(self._setup.settings.stop_grace)
            end = loop.end
        except TakenOverError as error:
            replaced = True
            reporter.note(str(error))
            end = EndJob(int(error.exit_code), str(error))
        except BaseException:  # nothing may leave agents behind, and nothing is swallowed
            reporter.bug(traceback.format_exc())
            end = EndJob(int(ExitCode.BUG), "a bug of the driver ended it")
        self._deaf = not replaced
        try:
            self._acknowledge_the_rest()
            if self._setup.joined is not None and not replaced:
                self._setup.joined.job_ends(end.exit_code, end.reason)
            logged = self._resources.close(end, begun=self._begun, replaced=replaced)
            if self._setup.brain is not None:
                self._setup.brain.end(None if replaced else end.exit_code)
            for part in self._parts:
                part.close(None if replaced else end.exit_code)
            for companion in self.companions:
                companion.close()
        except BaseException:
            reporter.bug(traceback.format_exc())
            end = EndJob(int(ExitCode.BUG), "a bug of the driver showed while it ended")
        finally:
            reporter.close()
            result = JobResult(exit_code=end.exit_code, reason=end.reason, ended=time.time())
            self._outcome = logged or result

    def _acknowledge_the_rest(self) -> None:
        """Answer the senders of events that came too late: the job is over, and needs them no more.

        The senders of events that another driver needs get no answer, and send them to it.
        """
        acts: list[Callable[[], None]] = []
        unanswered = [] if self._loop is None or not self._deaf else self._loop.unanswered
        while unanswered:  # each once: a thread of the server may do this, too
            with contextlib.suppress(IndexError):
                acts.append(unanswered.pop(0))
        with contextlib.suppress(queue.Empty):
            while self._deaf:
                message = self._mailbox.get(0.0)
                if isinstance(message, mail.Delivered):
                    acts.append(message.acknowledge)
        if acts and self._loop is not None:
            self._loop.acknowledge(acts)

    def _status(self) -> bytes:
        """Return the run, the job and what was measured as JSON; before the job, the check."""
        loop, setup, resources = self._loop, self._setup, self._resources
        head: dict[str, Any] = {
            "run_id": setup.spec.run_id,
            "endpoint": self.endpoint,
            "started": resources.began,
        }
        if loop is None or (loop.job is None and not self._serving):
            shown: dict[str, Any] = {"state": "starting", "node_check": None}
            for part in self._parts:
                shown = part.before_job() or shown
            return msgspec.json.encode({**head, **shown})
        document: dict[str, Any] = {**head, **loop.views()}
        if loop.job is None:
            return msgspec.json.encode({**document, "state": "serving"})
        document |= {
            "command": masked(setup.spec.command),
            **msgspec.to_builtins(loop.job.status(resources.clock())),
            "step": loop.watch.step,
            "slow": loop.watch.status(),
            "events": resources.log.counts(),
            "goodput": loop.executor.record.ledger.document(time.time()),
        }
        for part in self._parts:
            document |= part.status()
        document["counters"]["false_alarms"] = loop.watch.false_alarms
        document["counters"]["slot_seconds"] = loop.executor.record.ledger.counters(time.time())
        return msgspec.json.encode(document)
