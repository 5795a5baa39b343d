"""The process of a Brain: a mailbox, one loop that runs the machine, and what carries it out.

Reports of jobs, leases that end, hosts that are found and plans of algorithms are messages. The
loop hands an event to the kernel, which numbers it, has the machine decide (`brain.cluster`), and
calls the handlers of its decisions. Grants are published and withdrawn only once the machine's
state is on the disk: a Brain that is killed at any moment has promised nothing that the next one
does not know. Writes are some time apart, so that many reports at once delay nobody. The
jobs train on without a Brain, so nothing here ends them. Times are unix seconds.
"""

import contextlib
import queue
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from elastic_driver.brain import brain_events as log
from elastic_driver.brain.algorithm import HostView
from elastic_driver.brain.algorithms import Algorithms
from elastic_driver.brain.cluster import DECLARATION, NAME, BrainEvent, Cluster
from elastic_driver.brain.grants import Receipts, grant_key
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
from elastic_driver.job.events import DiscoveryFailed, HostsDiscovered, Tick
from elastic_driver.kernel.kernel import Catalog, Handler, Kernel
from elastic_driver.runtime.api import job_access
from elastic_driver.runtime.discovery import DiscoveryThread
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.library_logs import logs_shown
from elastic_driver.runtime.mailbox import Mailbox
from launcher.brain.driver_probes import Drivers
from launcher.brain.routes import (
    BrainRoutes,
    Intake,
    is_silent,
    job_of_lease,
    status_document,
)
from launcher.brain.setup import BrainSetup, State
from launcher.brain.statistics_reader import HostFigures, Priors
from rendezvous.server import Callbacks, RendezvousServer, ServerTls, Succession
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


class Promises:
    """The grants that wait until the Brain's state is on the disk.

    Args:
        save: writes the state; returns whether the disk has it.
        act: publishes or withdraws a grant.
    """

    def __init__(
        self, save: Callable[[], bool], act: Callable[[PublishGrant | WithdrawGrant], None]
    ) -> None:
        self._save, self._act = save, act
        self._waiting: dict[str, PublishGrant | WithdrawGrant] = {}  # of each job the newest
        self._written_at = 0.0
        self.due: float | None = None  # the next attempt to write; None: nothing has changed
        self.failed = False  # the newest attempt

    def add(self, decision: PublishGrant | WithdrawGrant) -> None:
        """Have a grant published or withdrawn once the state is on the disk."""
        self._waiting[decision.job] = decision

    def note_change(self, now: float, *, soon: bool) -> None:
        """Note that the state has changed; `soon`: it is not only something that was measured."""
        due = now + KEEP_S if self.due is None else self.due
        if soon:
            earliest = max(now, self._written_at + APART_S)
            due = earliest if self.failed else min(due, earliest)
        self.due = due

    def keep(self, now: float) -> None:
        """Write the state down, then publish and withdraw the grants, as decided until now."""
        self._written_at = now
        self.failed = not self._save()
        if self.failed:
            self.due = now + AGAIN_S
            return
        self.due = None
        waiting, self._waiting = self._waiting, {}
        for decision in waiting.values():
            self._act(decision)


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
        self._promises = Promises(self._save, self._act)
        self._has_decided = False  # since the time of the next write was set
        self._ahead: int | None = None  # messages that come before the tick that is due
        self._intake = Intake(self._mailbox.put)
        self._receipts = Receipts(setup.token, "")
        self._drivers = Drivers(setup.token, self._mailbox.put)
        self._started = time.time()
        self._kernel = Kernel(
            Catalog([DECLARATION]),
            self._handlers(),
            clock=time.time,
            followers={JobHeard: self._after_report, JobDropped: self._after_drop},
        )

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
        self._kernel.begin(NAME, self._cluster, due=time.time())
        book = state.book or uuid.uuid4().hex
        self._state = msgspec.structs.replace(state, starts=state.starts + 1, book=book)
        self._receipts = Receipts(self._setup.token, book)
        for job in self._cluster.runs():
            self._intake.know(job.name, holds=False)
            if job.claims():
                self._intake.note(job.name, holds=True)
        self._promises.keep(time.time())

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
                    self._promises.keep(time.time())
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
                    self._tell(log.DiscoveryFailed(why=reason))
                case None:
                    pass
                case _:
                    self._decide(message)
            now = time.time()
            if self._tick_is_due(now):
                self._decide(Tick())
            if self._promises.due is not None and self._promises.due <= now:
                self._promises.keep(now)

    def _tick_is_due(self, now: float) -> bool:
        """Return whether it is time for a tick, and what had come by then has been taken in.

        After a pause of this process, reports that have come meanwhile count before silence does.
        """
        if not self._kernel.due(now):
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
        known = (*self._kernel.deadlines.values(), self._promises.due)
        dues = [due for due in known if due is not None]
        left = min(dues) - time.time() if dues else LONGEST_WAIT_S
        return min(LONGEST_WAIT_S, max(SPIN_GUARD_S, left))

    def _decide(self, event: BrainEvent) -> None:
        """Have the machine decide, and carry out what it decides; see `Kernel.decide`."""
        self._kernel.decide(NAME, event, (event,))
        soon = self._has_decided or isinstance(event, JobEnded | JobSilent | HostsFound)
        self._promises.note_change(time.time(), soon=soon)
        self._has_decided = False

    def _handlers(self) -> dict[type[Any], Handler]:
        """Return what carries out each type of decision."""
        handlers: dict[type[Any], Handler] = {
            PublishGrant: self._promise,
            WithdrawGrant: self._withdraw,
            ProbeDriver: self._probe,
            AskAlgorithm: self._ask,
            Tell: lambda decision: self._tell(decision.what, decision.job),
        }
        return {kind: self._noted(handler) for kind, handler in handlers.items()}

    def _noted(self, handler: Handler) -> Handler:
        """Return a handler that also notes that the state is to be written soon."""

        def act(decision: Any) -> None:
            self._has_decided = True
            handler(decision)

        return act

    def _after_report(self, event: JobHeard) -> None:
        if self._priors is not None:
            self._priors.ask(event.job, event.report.kind)
        if event.job not in self._cluster.jobs:
            self._intake.forget(event.job)  # a late report of a run that is over

    def _after_drop(self, event: JobDropped) -> None:
        if event.job in self._cluster.jobs:
            self._intake.know(event.job)  # it has got slots meanwhile

    def _promise(self, decision: PublishGrant) -> None:
        self._promises.add(decision)
        self._intake.note(decision.job, holds=bool(decision.claims))

    def _withdraw(self, decision: WithdrawGrant) -> None:
        self._promises.add(decision)
        self._intake.forget(decision.job)
        if self._priors is not None:
            self._priors.forget(decision.job)

    def _ask(self, decision: AskAlgorithm) -> None:
        view = decision.view if self._priors is None else self._priors.into(decision.view)
        self._algorithms.ask(decision.request, decision.algorithm, view, self._mailbox.put)

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

    def _save(self) -> bool:
        """Write the state down; return whether the disk has it. Failures are told once."""
        folder, failed = self._setup.folder, self._promises.failed
        state = msgspec.structs.replace(self._state, machine=self._cluster.snapshot())
        try:
            folder.save(state)
        except OSError as error:
            if not failed:
                why = str(error.strerror)
                self._tell(log.StateFailed(file=str(folder.state_file), why=why))
            return False
        if failed:
            self._tell(log.StateWritten(file=str(folder.state_file)))
        self._watch_only_jobs()
        return True

    def _act(self, decision: PublishGrant | WithdrawGrant) -> None:
        """Publish or withdraw a grant."""
        if self._server is None:
            return
        key = grant_key(decision.job)
        if isinstance(decision, WithdrawGrant):
            self._server.post([Delete(key)])
            return
        grant = decision.grant
        receipt = self._receipts.of(decision.job, grant, decision.claims)
        proved = msgspec.structs.replace(grant, receipt=receipt)
        self._server.post([Set(key, msgspec.json.encode(proved))])
        self._tell(log.GrantMade(grant=grant), decision.job)

    def _tell(self, what: log.BrainLogEvent, job: str = "") -> None:
        """Log and show what has happened to a job; "": to the Brain."""
        self._log.append(what.name, job=job or None, reason=what.text)
        self._say(f"{job}: {what.text}" if job else what.text)
