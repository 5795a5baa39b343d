"""The process of a Brain: a mailbox, one loop that runs the machine, and what carries it out.

Reports of jobs, leases that end, hosts that are found and plans of algorithms are messages. The
loop numbers an event, hands it to the machine (`brain.cluster`), writes the machine's state to disk
and only then publishes grants: a Brain that is killed at any moment has promised nothing that the
next one does not know. Writes are some time apart, so that many reports at once delay nobody. The
jobs train on without a Brain, so nothing here ends them. Times are unix seconds.
"""

import contextlib
import queue
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from elastic_driver.brain.algorithm import HostView
from elastic_driver.brain.algorithms import Algorithms
from elastic_driver.brain.cluster import BrainEvent, Cluster
from elastic_driver.brain.grants import Grant, Receipts, grant_key
from elastic_driver.brain.messages import (
    AskAlgorithm,
    HostsFound,
    JobDropped,
    JobEnded,
    JobForgotten,
    JobHeard,
    JobSilent,
    ProbeDriver,
    PublishGrant,
    Tell,
    WithdrawGrant,
)
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.core.driver_events import DiscoveryFailed, HostsDiscovered, Tick
from elastic_driver.kernel.machine import stamped
from elastic_driver.rights import job_access
from elastic_driver.runtime.discovery import DiscoveryThread
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.library_logs import logs_shown
from elastic_driver.runtime.mailbox import Mailbox
from launcher.brain.database import HostFigures, Priors
from launcher.brain.driver_probes import Drivers
from launcher.brain.intake import Intake
from launcher.brain.routes import BrainRoutes, job_of_lease
from launcher.brain.setup import BrainSetup, State
from launcher.brain.status import is_silent, status_document
from rendezvous.server import RendezvousServer
from rendezvous.serving import Callbacks, ServerTls, Succession
from rendezvous.wire import Delete, Set

LONGEST_WAIT_S = 1.0
SPIN_GUARD_S = 0.01  # the least time between two ticks
KEEP_S = 5.0  # between two writes of what the machine has only measured
APART_S = 0.2  # between any two writes
AGAIN_S = 1.0  # before the next attempt to write, after one that failed


@dataclass(frozen=True, slots=True)
class StatusAsked:
    """Draw up the status; `reply` takes the JSON document and does not block."""

    reply: Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Forget:
    """An administrator wants a job forgotten; `reply` takes whether it was silent (None: none)."""

    job: str
    reply: Callable[[bool | None], None]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the Brain; its jobs go on."""

    exit_code: int


# A `str` stands for the newest report of that job.
Message: TypeAlias = (
    str | BrainEvent | HostsDiscovered | DiscoveryFailed | StatusAsked | Forget | Stop
)


@dataclass
class _Unkept:
    """The grants that wait until the state is on the disk."""

    grants: dict[str, PublishGrant] = field(default_factory=dict)  # the newest of each job
    due: float | None = None  # the next attempt; None: nothing has changed
    failed: bool = False


class BrainService:
    """Runs one Brain in the thread that calls `run`; `stop` may be called by a signal handler."""

    def __init__(self, setup: BrainSetup) -> None:
        self._setup, self._say = setup, setup.say
        self._mailbox: Mailbox[Message] = Mailbox()
        self._state = State()
        self._cluster = Cluster(setup.algorithm)
        self._algorithms = Algorithms()
        self._log = EventLog(setup.folder.events_file, clock=time.time, on_broken=self._say)
        self._server: RendezvousServer | None = None
        self._priors: Priors | None = None  # None: no database is named
        self._unkept, self._events, self._kept_at = _Unkept(), 0, 0.0
        self._ahead: int | None = None  # messages that come before the tick that is due
        self._intake = Intake(self._mailbox.put)
        self._receipts = Receipts(setup.token, "")
        self._drivers = Drivers(setup.token, self._mailbox.put)
        self._started = time.time()

    # ---- life ----------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until `stop`; return the exit status. Raises ElasticError if it cannot begin."""
        setup = self._setup
        with contextlib.ExitStack() as stack:
            stack.enter_context(logs_shown(lambda line, _of_library: self._say(line)))
            self._load()
            stack.callback(self._algorithms.close)
            self._algorithms.check(setup.algorithm)
            server = self._server = self._open_server()
            stack.callback(server.stop)
            stack.callback(lambda: server.spawn(self._drivers.keep_only({})))
            self._log.open()
            stack.callback(self._log.close)
            setup.folder.write_tokens(setup.token, setup.identity.known_by)
            setup.folder.write_endpoint(server.url)
            token = setup.folder.job_token_file
            self._say(f"the Brain serves at {server.url}; the token for jobs is in {token}")
            hosts = DiscoveryThread(
                setup.discovery, interval=setup.interval, post=self._mailbox.put
            )
            stack.callback(hosts.stop)
            hosts.start()
            if setup.database is not None:
                figures = HostFigures(setup.database, self._mailbox.put, self._say)
                stack.callback(figures.stop)
                figures.start()
            if setup.records is not None:
                self._priors = Priors(setup.records, self._say)
                stack.callback(self._priors.stop)
                self._priors.start()
            return self._loop()

    def stop(self, exit_code: int) -> None:
        """End the Brain soon; its jobs go on."""
        self._mailbox.put(Stop(exit_code))

    def _load(self) -> None:
        state = self._setup.folder.load()
        if state.machine:
            self._cluster = Cluster.restored(state.machine)
            self._cluster.use(self._setup.algorithm)
        book = state.book or uuid.uuid4().hex
        self._state = msgspec.structs.replace(state, starts=state.starts + 1, book=book)
        self._receipts = Receipts(self._setup.token, book)
        for job in self._cluster.runs():
            self._intake.know(job.name, holds=False)
            if job.claims():
                self._intake.note(job.name, holds=True)
        self._keep(time.time())

    def _open_server(self) -> RendezvousServer:
        setup = self._setup
        routes = BrainRoutes(
            self._intake.take,
            lambda reply: self._mailbox.put(StatusAsked(reply)),
            lambda job, reply: self._mailbox.put(Forget(job, reply)),
        )
        return RendezvousServer(
            setup.host,
            setup.port,
            token=setup.token,
            access=job_access(),
            tls=ServerTls(
                certificate=setup.identity.certificate,
                known_by=setup.identity.known_by,
                also_plain=setup.identity.also_plain,
            ),
            callbacks=Callbacks(
                on_lease_expired=self._lease_expired, on_failed=self._server_failed
            ),
            routes=routes.add_to,
            posts={EVENTS_PATH: routes.take_event},
            succession=Succession(
                first_revision=self._state.starts << 40,  # jobs have seen older revisions only
            ),
        ).start()

    def _lease_expired(self, key: str) -> None:
        if (job := job_of_lease(key)) is not None and self._intake.knows(job):
            self._mailbox.put(JobSilent(job))

    def _server_failed(self, error: Exception) -> None:
        self._say(f"the server has ended ({error}); start the Brain again, its jobs go on")
        self._mailbox.put(Stop(70))

    # ---- the loop ------------------------------------------------------------------------

    def _loop(self) -> int:
        while True:
            message = None
            self._intake.release()
            with contextlib.suppress(queue.Empty):
                message = self._mailbox.get(self._patience())
                self._ahead = self._ahead and self._ahead - 1
            match message:
                case str(job):
                    self._decide(self._proved(self._intake.report_of(job)))
                case Stop(exit_code):
                    self._keep(time.time())
                    return exit_code
                case StatusAsked(reply):
                    url = "" if self._server is None else self._server.url
                    reply(status_document(url, self._started, self._cluster))
                case Forget(job, reply):
                    reply(is_silent(self._cluster, job))
                    self._decide(JobForgotten(job))
                case HostsDiscovered(hosts):
                    found = tuple(HostView(name=name, slots=slots) for name, slots in hosts)
                    self._decide(HostsFound(found))
                case DiscoveryFailed(reason):
                    self._tell("discovery_failed", "", f"{reason}; the last known hosts stay")
                case None:
                    pass
                case _:
                    self._decide(message)
            now = time.time()
            if self._tick_is_due(now):
                self._decide(Tick())
            if self._unkept.due is not None and self._unkept.due <= now:
                self._keep(now)

    def _tick_is_due(self, now: float) -> bool:
        """Return whether it is time for a tick, and what had come by then has been taken in.

        After a pause of this process, reports that have come meanwhile count before silence does.
        """
        due = self._cluster.deadline()
        if due is None or due > now:
            self._ahead = None
        elif self._ahead is None:
            self._ahead = len(self._mailbox)
        if self._ahead != 0:
            return False
        self._ahead = None
        return True

    def _proved(self, heard: JobHeard) -> JobHeard:
        """Return a report with what its receipt proves."""
        report = heard.report
        if not report.receipt:
            return heard
        proved = self._receipts.read(report.receipt, heard.job, report.began)
        return msgspec.structs.replace(heard, proved=proved)

    def _patience(self) -> float:
        dues = [due for due in (self._cluster.deadline(), self._unkept.due) if due is not None]
        left = min(dues) - time.time() if dues else LONGEST_WAIT_S
        return min(LONGEST_WAIT_S, max(SPIN_GUARD_S, left))

    def _decide(self, event: BrainEvent) -> None:
        """Number an event, have the machine decide, and carry out what it decides."""
        self._events += 1
        now = time.time()
        decisions: list[Any] = stamped(self._cluster.handle(event, now), self._events)
        if self._priors is not None and isinstance(event, JobHeard):
            self._priors.ask(event.job, event.report.kind)
        if isinstance(event, JobHeard) and event.job not in self._cluster.jobs:
            self._intake.forget(event.job)  # a late report of a run that is over
        if isinstance(event, JobDropped) and event.job in self._cluster.jobs:
            self._intake.know(event.job)  # it has got slots meanwhile
        if self._unkept.due is None:
            self._unkept.due = now + KEEP_S
        for decision in decisions:
            match decision:
                case PublishGrant(job=job, claims=claims):
                    self._unkept.grants[job] = decision
                    self._intake.note(job, holds=bool(claims))
                case WithdrawGrant(job=job):
                    self._withdraw(job)
                case ProbeDriver():
                    self._probe(decision)
                case AskAlgorithm(request=request, algorithm=algorithm, view=view):
                    known = view if self._priors is None else self._priors.into(view)
                    self._algorithms.ask(request, algorithm, known, self._mailbox.put)
                case Tell(event=name, job=job, line=line):
                    self._tell(name, job, line)
        if decisions or isinstance(event, JobEnded | JobSilent | HostsFound):
            soon = max(now, self._kept_at + APART_S)
            self._unkept.due = soon if self._unkept.failed else min(self._unkept.due, soon)

    def _withdraw(self, job: str) -> None:
        self._unkept.grants.pop(job, None)
        self._intake.forget(job)
        if self._priors is not None:
            self._priors.forget(job)
        if self._server is not None:
            self._server.post([Delete(grant_key(job))])

    def _probe(self, asked: ProbeDriver) -> None:
        """Look whether a driver lives, on the server's loop; `DriverProbed` answers."""
        if self._server is not None:
            self._server.spawn(self._drivers.look(asked))

    def _watch_only_jobs(self) -> None:
        """Close the connections to drivers of jobs that are over."""
        if self._server is not None:
            places = {
                (job.name, job.report.began): job.report.liveness for job in self._cluster.runs()
            }
            self._server.spawn(self._drivers.keep_only(places))

    # ---- the disk, before promises -------------------------------------------------------

    def _keep(self, now: float) -> None:
        """Write the state down, then publish the grants that were made until now."""
        unkept, self._kept_at = self._unkept, now
        state = msgspec.structs.replace(self._state, machine=self._cluster.snapshot())
        try:
            self._setup.folder.save(state)
        except OSError as error:
            unkept.due = now + AGAIN_S
            if not unkept.failed:
                unkept.failed = True
                where = self._setup.folder.state_file
                line = f"{where} cannot be written: {error.strerror}; no job gets other slots"
                self._tell("state_failed", "", line)
            return
        if unkept.failed:
            self._tell("state_written", "", f"{self._setup.folder.state_file} is written again")
        self._watch_only_jobs()
        grants, self._unkept = unkept.grants, _Unkept()
        for made in grants.values():
            self._publish(made.job, made.grant, made.claims)

    def _publish(self, job: str, grant: Grant, claims: dict[str, int]) -> None:
        if job not in self._cluster.jobs or self._server is None:
            return
        receipt = self._receipts.of(job, grant, claims)
        proved = msgspec.structs.replace(grant, receipt=receipt)
        self._server.post([Set(grant_key(job), msgspec.json.encode(proved))])
        hosts = ", ".join(f"{host}:{slots}" for host, slots in grant.hosts.items()) or "no slots"
        self._tell("grant", job, f"{hosts} (grant {grant.number}): {grant.reason}")

    def _tell(self, event: str, job: str, line: str) -> None:
        self._log.append(event, job=job or None, reason=line)
        self._say(f"{job}: {line}" if job else line)
