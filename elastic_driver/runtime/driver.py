"""The driver: events into the core, decisions out, until the job is over.

One mailbox, one thread that reads it: whatever happens (an agent's word, a lease, discovery, a
signal, time) becomes an event there, `Job.handle` decides, `execution.Executor` acts, in that
order, one event after the other. The other threads (server, discovery, whoever calls
`request_stop`) only put messages into the mailbox.

`elasticrun` makes one per job: `ElasticDriver(…).run()`. The constructor starts nothing. Times
are seconds.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from elastic_driver import contract
from elastic_driver.core.decisions import Announce, EndJob
from elastic_driver.core.documents import JobSpec, encode
from elastic_driver.core.events import (
    TOGETHER,
    AgentLost,
    Event,
    EventBatch,
    StopRequested,
    Tick,
    WorkerExited,
    WorkerLost,
    WorkerStarted,
)
from elastic_driver.core.job import Job
from elastic_driver.core.machine import stamped
from elastic_driver.errors import ClusterError, ExitCode
from elastic_driver.policies.requests import KeysRead, MachineName
from elastic_driver.policies.shards.datasets import DataSets
from elastic_driver.policies.shards.messages import ShardBatch, ShardRequest, WorkerEnded
from elastic_driver.policies.stragglers.machine import Stragglers
from elastic_driver.policies.tf.cluster import TfCluster
from elastic_driver.runtime.api import DriverRoutes
from elastic_driver.runtime.backend import Backend, MakeBackend
from elastic_driver.runtime.discovery import DiscoveryThread, HostDiscovery
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.executor import Executor
from elastic_driver.runtime.host_checks import HostChecks
from elastic_driver.runtime.joined import JoinedNodes
from elastic_driver.runtime.mailbox import (
    AgentEnded,
    LeaseLapsed,
    MachineEvent,
    Mailbox,
    Message,
    PolicyEvent,
    StatusAsked,
    StopNow,
)
from elastic_driver.runtime.options import DriverOptions, Outcome
from elastic_driver.runtime.reporter import Reporter
from elastic_driver.runtime.run_dir import RunDir
from elastic_driver.settings import Settings
from rendezvous.auth import make_token, write_token_file
from rendezvous.errors import RendezvousError
from rendezvous.server import RendezvousServer
from rendezvous.wire import EVENTS_PATH, Set

MAX_MAIL = 100_000  # waiting messages; more than that, and senders are told to come back later
MAX_TOGETHER = 1000  # events that the core takes in at once
SIGNAL_SLICE_S = 0.5  # the longest that a signal may go unheard
AGENT_EXIT_S = 3.0  # for agents to report and exit, after their workers' grace
_SPIN_GUARD_S = 0.01  # the least time between two ticks


class ElasticDriver:
    """Runs one job. `run()` is `start()`, wait, and `stop()`."""

    def __init__(
        self,
        *,
        settings: Settings,
        spec: JobSpec,
        discovery: HostDiscovery,
        starter: MakeBackend,
        run_dir: RunDir,
        reporter: Reporter,
        options: DriverOptions | None = None,
        checks: HostChecks | None = None,
        joined: JoinedNodes | None = None,
    ) -> None:
        """Starts nothing, opens nothing.

        Args:
            settings: how the job is to behave.
            spec: what its workers run.
            discovery: where hosts come from.
            starter: makes the object that starts agents, once the rendezvous has an address.
            run_dir: the run's folder, not yet created; removed files are this object's to remove.
            reporter: what the user sees.
            options: how the driver itself is to run.
            checks: what the check before the job found, and how hosts are checked again.
            joined: takes in nodes that join by themselves; `discovery` and `starter` ask it.
        """
        self._settings, self._spec, self._run_dir = settings, spec, run_dir
        self._make_starter, self._reporter = starter, reporter
        self._options = options or DriverOptions()
        self._checks, self._joined = checks, joined
        self._mailbox = Mailbox()
        self._job, self._stragglers = Job(settings), Stragglers()
        self._log = EventLog(run_dir.events_file, clock=time.time, on_broken=reporter.note)
        self._discovery = DiscoveryThread(
            discovery, interval=self._options.discovery_interval, post=self._mailbox.put
        )
        self._machines: dict[MachineName, Any] = {
            "job": self._job,
            "stragglers": self._stragglers,
            "shards": DataSets(),
            "tf": TfCluster(settings.heartbeat_timeout),
        }
        self._deadlines: dict[MachineName, float | None] = {}
        self._server: RendezvousServer | None = None
        self._starter: Backend | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._stop_asked = False
        # The driver's thread's own:
        self._end: EndJob | None = None  # the job is over: the agents shut down
        self._stop_now = False
        self._events = 0  # handled so far; the number of one is the cause of what follows from it
        self._began = 0.0  # unix seconds

    # ---- life ----------------------------------------------------------------------------

    def start(self) -> None:
        """Create the run's files, open the rendezvous, begin to look for hosts.

        Raises ElasticError where that is impossible; nothing is left behind then.
        """
        self._began = time.time()
        self._run_dir.create()
        try:
            executor = self._open()
            self._discovery.start()
            thread = threading.Thread(
                target=self._run_loop, args=(executor,), name="driver", daemon=True
            )
            thread.start()
        except BaseException:
            self._close_all()
            raise
        self._thread = thread

    def run(self) -> Outcome:
        """Run the job to its end."""
        self.start()
        try:
            return self.wait()
        finally:
            self.stop()

    def wait(self) -> Outcome:
        """Block until the job is over and everything it started is gone."""
        if self._thread is None:
            raise RuntimeError("a driver is started before it is waited for")
        self._join(self._thread)
        if self._outcome is None:
            raise AssertionError("the mailbox thread always leaves an outcome")
        return self._outcome

    @staticmethod
    def _join(thread: threading.Thread) -> None:
        # In slices: a signal that comes in the moment in which an endless wait begins is only
        # noted, and its handler would not run before the wait is over.
        while thread.is_alive():
            thread.join(SIGNAL_SLICE_S)

    def stop(self) -> None:
        """End a job that still runs, with grace for its workers, and wait. Idempotent."""
        if self._thread is None:
            return
        if self._outcome is None and not self._stop_asked:
            self.request_stop("the driver was stopped", int(ExitCode.TERMINATED))
        self._join(self._thread)

    def request_stop(self, reason: str, exit_code: int) -> None:
        """Ask for the job's end; asked a second time, kill at once. Returns at once.

        May be called by any thread and by a signal handler: SimpleQueue.put is reentrant.
        """
        if self._stop_asked:
            self._mailbox.put(StopNow())
        else:
            self._stop_asked = True
            self._mailbox.put(StopRequested(reason, exit_code))

    # ---- for the HTTP routes -------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The rendezvous' URL, once started."""
        if self._server is None:
            raise RuntimeError("the driver has no endpoint before it is started")
        return self._options.advertise or self._server.url

    @property
    def size_bounds(self) -> tuple[int, int | None]:
        """The fewest and (None: no limit) the most workers the job may have."""
        return self._settings.min_np, self._settings.max_np

    def post(self, event: MachineEvent) -> bool:
        """Put an event into the mailbox; False when it is full or the job is over."""
        if self._outcome is not None or len(self._mailbox) >= MAX_MAIL:
            return False
        self._mailbox.put(event)
        return True

    def ask_status(self, reply: Callable[[bytes], None]) -> None:
        """Have `reply` called by the mailbox thread with the status document."""
        self._mailbox.put(StatusAsked(reply))

    # ---- opening and closing -------------------------------------------------------------

    def _open(self) -> Executor:
        """Everything but the two threads; what fails half-way is closed by `_close_all`."""
        try:
            self._log.open()
            token = make_token()
            write_token_file(self._run_dir.token_file, token)
            routes = DriverRoutes(self, self._log, self._joined)
            self._server = RendezvousServer(
                self._options.bind_host,
                self._options.bind_port,
                token=token,
                others=() if self._joined is None else self._joined.secrets,
                on_lease_expired=self._lease_lapsed,
                routes=routes.add_to,
                posts={EVENTS_PATH: routes.take_event},
            )
            self._server.start()
            self._server.apply([Set(contract.JOB_SPEC, encode(self._spec))])
            if self._joined is not None:
                self._joined.open(self._server, token)
        except OSError as error:
            _cannot_start(f"{error.filename or self._run_dir.path}: {error.strerror}", error)
        except RendezvousError as error:
            _cannot_start(str(error), error)
        self._run_dir.write_endpoint(self.endpoint, self._began)
        self._starter = self._make_starter(self.endpoint, self._run_dir.token_file)
        return Executor(
            server=self._server,
            starter=self._starter,
            log=self._log,
            reporter=self._reporter,
            on_agent_ended=lambda event: self._mailbox.put(AgentEnded(event)),
            heartbeat_timeout=self._settings.heartbeat_timeout,
            checks=self._checks,
            post=self._mailbox.put,
            answer=routes.requests.answer,
        )

    def _lease_lapsed(self, key: str) -> None:
        """Pass an expired lease on; called by the server's thread."""
        if self._joined is not None:
            self._joined.lease_expired(key)
        self._mailbox.put(LeaseLapsed(key))

    def _close_all(self) -> None:
        """Free every resource, whatever state it is in; the last thing the driver does."""
        self._discovery.stop()
        if self._checks is not None:
            self._checks.stop()
        if self._starter is not None:
            self._starter.close(0.0)
        self._log.close()
        if self._server is not None:
            self._server.stop()
        self._run_dir.close()

    # ---- the driver's thread -------------------------------------------------------------

    def _run_loop(self, executor: Executor) -> None:
        """Handle messages until the job machine ends the job, or a bug of ours does."""
        end: EndJob | None = None
        try:
            executor.execute(Announce("job_started", f"run {self._spec.run_id}"))
            if self._checks is not None:
                executor.execute(Announce("nodes_checked", self._checks.report.summary()))
            while (end := self._end) is None:
                self._turn(executor)
            self._wind_down(end, executor)
        except BaseException:  # nothing may leave agents behind, and nothing is swallowed
            self._reporter.bug(traceback.format_exc())
            end = EndJob(int(ExitCode.BUG), "a bug of the driver's ended it")
        try:
            self._discovery.stop()
            if self._joined is not None:
                self._joined.job_ends(end.exit_code, end.reason)
            if self._starter is not None:
                self._starter.close(0.0)
            # Only now has every worker's output been forwarded: these are the last lines.
            executor.job_ended(end)
            self._close_all()
        except BaseException:
            self._reporter.bug(traceback.format_exc())
            end = EndJob(int(ExitCode.BUG), "a bug of the driver's showed while it ended")
        finally:
            self._outcome = Outcome(end.exit_code, end.reason, end.failure)

    def _turn(self, executor: Executor, until: float | None = None) -> None:
        """Handle the next message, if one comes before a deadline, and all deadlines passed."""
        known = (*self._deadlines.values(), until)
        deadlines = [deadline for deadline in known if deadline is not None]
        timeout = None
        if deadlines:
            timeout = max(_SPIN_GUARD_S, min(deadlines) - time.monotonic())
        try:
            message = self._mailbox.get(timeout)
        except queue.Empty:
            pass
        else:
            self._take(message, executor)
        now = time.monotonic()
        for name, due in list(self._deadlines.items()):
            if due is not None and due <= now:
                self._decide(name, Tick(), executor)

    def _take(self, message: Message, executor: Executor) -> None:
        """Handle one message, and those behind it that are handled together with it."""
        event: MachineEvent | None
        match message:
            case StatusAsked(reply):
                reply(self._status())
                return
            case StopNow():
                self._stop_now = True
                self._end = self._end or EndJob(int(ExitCode.INTERRUPTED), "asked to stop twice")
                return
            case LeaseLapsed(key):
                event = executor.lease_expired(key)
            case AgentEnded(lost):
                executor.agent_ended(lost.host, lost.incarnation)
                event = lost
            case _:
                event = message
        if event is not None:
            self._hand_over(event, executor)

    def _hand_over(self, event: MachineEvent, executor: Executor) -> None:
        """Hand an event to the machines that it is for."""
        if isinstance(event, ShardRequest):
            together = self._mailbox.following((ShardRequest,), MAX_TOGETHER)
            self._decide("shards", ShardBatch((event, *together)), executor)
        elif isinstance(event, PolicyEvent):
            self._decide(event.machine, event, executor)
        elif self._end is not None:
            if isinstance(event, WorkerExited):
                executor.worker_exited_late(event)
        elif isinstance(event, TOGETHER):
            following = self._mailbox.following(TOGETHER, MAX_TOGETHER)
            for each in (event, *following):
                self._note(each, executor)
            self._decide("job", EventBatch((event, *following)) if following else event, executor)
        else:
            self._note(event, executor)
            self._decide("job", event, executor)

    def _decide(self, name: MachineName, event: object, executor: Executor) -> None:
        """Number an event, have its machine decide, and carry out what it decides."""
        self._events += 1
        # A journal writes the event here: numbered and timed, before anything follows from it.
        machine = self._machines[name]
        now = time.monotonic()
        decisions = stamped(machine.handle(event, now), self._events)
        if isinstance(event, KeysRead):
            executor.look_seconds = time.monotonic() - now
        self._deadlines[name] = machine.deadline()
        if self._options.debug:
            violated = machine.check()
            if violated:
                raise AssertionError(f"after {event}: {'; '.join(violated)}")
        for decision in decisions:
            if isinstance(decision, EndJob):
                self._end, self._deadlines["job"] = decision, None
                break
            executor.execute(decision)
        executor.send_replies()

    def _note(self, event: Event, executor: Executor) -> None:
        """Tell the executor and the shard ledgers of an event that is for the job."""
        match event:
            case WorkerStarted():
                self._decide("shards", event, executor)
            case WorkerExited(worker=worker):
                planned = executor.was_told_to_stop(worker) or event.exit_code == 0 or event.victim
                reason = None if planned else f"exit code {event.exit_code}"
                self._decide("shards", WorkerEnded(worker, reason), executor)
            case WorkerLost() | AgentLost():
                self._decide("shards", event, executor)
            case _:
                pass
        executor.heard(event)

    def _wind_down(self, end: EndJob, executor: Executor) -> None:
        """Have the agents stop their workers and exit, and wait until they have."""
        grace = self._settings.stop_grace
        deadline = time.monotonic() + grace + AGENT_EXIT_S
        if not self._stop_now:
            executor.shut_down_agents(grace, end.reason)
        while not self._stop_now and executor.agents and time.monotonic() < deadline:
            self._turn(executor, deadline)

    def _status(self) -> bytes:
        """The run, the core's picture of the job, and what was measured, as one JSON object."""
        document = {
            "run_id": self._spec.run_id,
            "endpoint": self.endpoint,
            "started": self._began,
            "command": self._spec.command,
            **msgspec.to_builtins(self._job.status(time.monotonic())),
            "step": self._stragglers.step,
            "slow": self._stragglers.status(),
            "events": self._log.counts(),
            "node_check": None if self._checks is None else self._checks.report,
        }
        document["counters"]["false_alarms"] = self._stragglers.false_alarms
        return msgspec.json.encode(document)


def _cannot_start(problem: str, cause: Exception) -> NoReturn:
    raise ClusterError(f"the driver cannot start: {problem}") from cause
