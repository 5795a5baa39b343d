"""The one loop of a driver: an event comes out of the mailbox, its machine decides, we carry out.

Each event is numbered, timed and handed to the machine that it is for; the executor carries out
the decisions, in their order, before the next event. Events of kinds that many senders send at
about the same time are handled together. Runs in the driver's thread. Times are seconds.
"""

import queue
import time
from collections.abc import Callable
from typing import Any

from elastic_driver import contract
from elastic_driver.core import events as ev
from elastic_driver.core.decisions import Announce, CheckHosts, EndJob
from elastic_driver.core.job import Job
from elastic_driver.core.machine import stamped
from elastic_driver.errors import ElasticError, ExitCode, assert_never
from elastic_driver.policies.messages import KeysRead, MachineName, Reply, RequestDropped
from elastic_driver.policies.nodecheck.checker import CheckEnded, NodeChecker
from elastic_driver.policies.nodecheck.messages import TaskEnded
from elastic_driver.policies.nodecheck.report import CheckReport
from elastic_driver.policies.shard_messages import ShardBatch, ShardRequest, WorkerEnded
from elastic_driver.policies.shards import DataSets
from elastic_driver.policies.stragglers import RoundPublished, Stragglers
from elastic_driver.policies.tf_cluster import TfCluster
from elastic_driver.policies.tf_messages import TfRequest
from elastic_driver.runtime.checks import NodeChecks, impossible
from elastic_driver.runtime.executor import Executor
from elastic_driver.runtime.host_lists import Hosts
from elastic_driver.runtime.mailbox import (
    CheckAsked,
    JobBegins,
    LeaseLapsed,
    MachineEvent,
    Mailbox,
    Message,
    StatusAsked,
    StopNow,
)
from rendezvous.server import RendezvousServer

MAX_TOGETHER = 1000  # events that are handled together
AGENT_EXIT_S = 3.0  # for agents to report and exit, after their workers' grace
_SPIN_GUARD_S = 0.01  # the least time between two ticks


def machine_of(event: MachineEvent) -> MachineName:  # noqa: RET503 - every case is named
    """Return the name of the machine that an event is for."""
    match event:
        case ShardRequest() | WorkerEnded() | TfRequest() | RequestDropped():
            return event.machine
        case KeysRead() | RoundPublished() | TaskEnded():
            return event.machine
        case (
            ev.WorkerReady(worker=worker)
            | ev.WorkerStepped(worker=worker)
            | ev.WorkerStarted(worker=worker)
            | ev.WorkerExited(worker=worker)
            | ev.WorkerStalled(worker=worker)
            | ev.WorkerResumed(worker=worker)
            | ev.WorkerStack(worker=worker)
            | ev.WorkerSaved(worker=worker)
            | ev.WorkerLeaving(worker=worker)
            | ev.WorkerSilent(worker=worker)
            | ev.WorkerLost(worker=worker)
        ):
            return "check" if contract.is_worker_of_check(worker) else "job"
        case (
            ev.AgentReady(incarnation=number)
            | ev.AgentLost(incarnation=number)
            | ev.HostLeaving(incarnation=number)
        ):
            return "check" if number >= contract.FIRST_OF_CHECKS else "job"
        case ev.HostsDiscovered() | ev.DiscoveryFailed() | ev.HostsChecked() | ev.ScaleRequested():
            return "job"
        case ev.DrainRequested() | ev.DrainCancelled() | ev.JobLeaving() | ev.StopRequested():
            return "job"
        case ev.StacksRequested() | ev.ProgressReported() | ev.RankSlow() | ev.RankRecovered():
            return "job"
        case ev.EventBatch() | ev.Tick():
            return "job"
        case _:
            assert_never(event)


class DriverLoop:
    """Runs a driver's machines; all methods belong to the driver's thread."""

    def __init__(
        self,
        mailbox: Mailbox,
        executor: Executor,
        server: RendezvousServer,
        *,
        token: str,
        lease: float,
        checks: NodeChecks | None,
        status: Callable[[], bytes],
        answer: Callable[[list[Reply]], None],
        debug: bool,
    ) -> None:
        """Start nothing.

        Args:
            mailbox: where events come from.
            executor: carries out decisions.
            server: the rendezvous.
            token: the job's, for the agents of node checks too.
            lease: seconds that a member of TensorFlow's cluster may be silent.
            checks: how nodes are checked; None: never.
            status: returns the status document.
            answer: answers the requests whose machines have replied.
            debug: whether the machines' invariants are checked after each event.
        """
        self.end: EndJob | None = None  # the job is over: the agents shut down
        self.job: Job | None = None  # None: not begun yet
        self.stragglers = Stragglers()
        self.checker: NodeChecker | None = None
        self._machines: dict[MachineName, Any] = {
            "stragglers": self.stragglers,
            "shards": DataSets(),
            "tf": TfCluster(lease),
        }
        self._deadlines: dict[MachineName, float | None] = {}
        self._mailbox, self._executor, self._server = mailbox, executor, server
        self._token, self._checks, self._status = token, checks, status
        self._answer, self._debug = answer, debug
        self._answer_check: CheckAsked | None = None  # whom to tell of the check before the job
        self._stop_now = False
        self._events = 0  # handled so far; an event's number is the cause of what follows from it

    def turn(self, until: float | None = None) -> None:
        """Handle the next message, if one comes before a deadline, and the deadlines passed."""
        deadlines = [due for due in (*self._deadlines.values(), until) if due is not None]
        timeout = None
        if deadlines:
            timeout = max(_SPIN_GUARD_S, min(deadlines) - time.monotonic())
        try:
            message = self._mailbox.get(timeout)
        except queue.Empty:
            pass
        else:
            self._take(message)
        now = time.monotonic()
        for name, due in list(self._deadlines.items()):
            if due is not None and due <= now and name in self._machines:
                self._decide(name, ev.Tick())

    def wind_down(self, grace: float) -> None:
        """Have the agents stop their workers and exit, and wait until they have."""
        deadline = time.monotonic() + grace + AGENT_EXIT_S
        if self.end is not None and not self._stop_now:
            self._executor.shut_down_agents(grace, self.end.reason)
        while not self._stop_now and self._executor.agents and time.monotonic() < deadline:
            self.turn(deadline)

    # ---- messages ------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        match message:
            case StatusAsked(reply):
                reply(self._status())
            case StopNow():
                self._stop_now = True
                self.end = self.end or EndJob(int(ExitCode.INTERRUPTED), "asked to stop twice")
            case JobBegins(job):
                self._begin_job(job)
            case CheckAsked(hosts):
                self._answer_check = message
                try:
                    self._begin_check(hosts, None)
                except Exception as error:  # it is the asking thread's
                    message.answer(error)
            case LeaseLapsed(key):
                event = self._executor.lease_expired(key)
                if event is not None:
                    self._hand_over(event)
            case _:
                self._hand_over(message)

    def _hand_over(self, event: MachineEvent) -> None:
        """Hand an event, and those behind it that are handled with it, to their machine."""
        if isinstance(event, ShardRequest):
            together = self._mailbox.following((ShardRequest,), MAX_TOGETHER)
            self._decide("shards", ShardBatch((event, *together)))
            return
        name = machine_of(event)
        if name == "job" and self.job is not None and self.end is None:
            self._hand_to_job(event)
        elif name == "job":
            self._without_a_job(event)
        else:
            if name == "check":
                self._executor.note_check(event)
            self._decide(name, event)

    def _hand_to_job(self, event: MachineEvent) -> None:
        if isinstance(event, ev.TOGETHER):
            following = self._mailbox.following(ev.TOGETHER, MAX_TOGETHER)
            own = [each for each in following if machine_of(each) == "job"]
            for each in (event, *own):
                self._note(each)
            self._decide("job", ev.EventBatch((event, *own)) if own else event)
            for each in following:
                if each not in own:
                    self._decide("check", each)
        else:
            self._note(event)
            self._decide("job", event)

    def _without_a_job(self, event: MachineEvent) -> None:
        """Take in an event for a job that is over, or has not begun."""
        match event:
            case ev.WorkerExited():
                self._executor.worker_exited_late(event)
            case ev.AgentLost():
                self._executor.agent_lost(event)
            case ev.StopRequested(reason, exit_code):
                self.end = self.end or EndJob(exit_code, reason)
            case _:
                pass

    def _note(self, event: MachineEvent) -> None:
        """Tell the executor and the shard ledgers of an event that is for the job."""
        match event:
            case ev.WorkerStarted() | ev.WorkerLost():
                self._decide("shards", event)
            case ev.AgentLost():
                self._executor.agent_lost(event)
                self._decide("shards", event)
            case ev.WorkerExited(worker=worker):
                expected = self._executor.was_told_to_stop(worker)
                planned = expected or event.exit_code == 0 or event.victim
                reason = None if planned else f"exit code {event.exit_code}"
                self._decide("shards", WorkerEnded(worker, reason))
            case _:
                pass
        self._executor.note(event)

    # ---- machines ------------------------------------------------------------------------

    def _decide(self, name: MachineName, event: MachineEvent | ShardBatch) -> None:
        """Number an event, have its machine decide, and carry out what it decides."""
        machine = self._machines.get(name)
        if machine is None:
            return  # what it was for is over
        self._events += 1
        now = time.monotonic()
        # A journal writes the event here: numbered and timed, before anything follows from it.
        decisions = machine.handle(event, now)
        if isinstance(event, KeysRead):
            self._executor.look_seconds = time.monotonic() - now
        self._deadlines[name] = machine.deadline()
        if self._debug:
            violated = machine.check()
            if violated:
                raise AssertionError(f"after {event}: {'; '.join(violated)}")
        replies = [decision for decision in decisions if isinstance(decision, Reply)]
        if len(replies) < len(decisions):
            self._carry_out(stamped(decisions, self._events))
        if replies:  # no record is kept of them, so they need no number
            self._answer(replies)

    def _carry_out(self, decisions: list[Any]) -> None:
        for decision in decisions:
            match decision:
                case Reply():
                    pass  # all replies are sent together
                case EndJob():
                    self.end, self._deadlines["job"] = decision, None
                    break
                case CheckHosts():
                    self._check_hosts(decision)
                case CheckEnded(report=report):
                    self._end_check(report)
                case _:
                    self._executor.execute(decision)

    def _begin_job(self, job: Job) -> None:
        self.job = self._machines["job"] = job
        self._executor.execute(Announce("job_started", f"run {self._executor.run_id}"))
        if self._checks is not None and self._checks.report is not None:
            self._executor.execute(Announce("nodes_checked", self._checks.report.summary()))

    def _begin_check(self, hosts: Hosts, asked: CheckHosts | None) -> None:
        if self._checks is None:
            raise AssertionError("hosts are checked only in jobs that began with a check")
        self.checker = self._checks.begin(hosts, self._server, self._token, asked)
        self._machines["check"] = self.checker
        self._deadlines["check"] = time.monotonic()  # the first tick begins

    def _check_hosts(self, asked: CheckHosts) -> None:
        try:
            self._begin_check(asked.hosts, asked)
        except (ElasticError, OSError) as error:  # the hosts wait: the job is answered anyway
            self._mailbox.put(impossible(asked, error))

    def _end_check(self, report: CheckReport) -> None:
        self.checker = None
        del self._machines["check"], self._deadlines["check"]
        if self._checks is not None:
            self._checks.end(report, self._checked)

    def _checked(self, report: CheckReport, answer: ev.HostsChecked | None) -> None:
        """Hand a check's findings on; called by the thread that has ended it."""
        if answer is not None:
            self._mailbox.put(answer)
        elif self._answer_check is not None:
            self._answer_check.answer(report)
