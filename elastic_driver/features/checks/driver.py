"""Node checks of a run: their agents' backend, and their results.

One check runs at a time, before the job or during it for hosts that come later. The machine
(`features.checks.machine`) decides; `NodeChecks` gives its agents a folder and a backend, adds its
report to earlier ones, and keeps the results in files. `CheckPart` runs the machine. Called by the
driver's thread, except where noted. Times are seconds.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import field

from elastic_driver import contract
from elastic_driver.contract import PortRange
from elastic_driver.errors import ClusterError, ElasticError
from elastic_driver.features.checks.machine import CheckEnded, CheckLimits, NodeChecker
from elastic_driver.features.checks.messages import TASK_SETTINGS, TaskSettings
from elastic_driver.features.checks.report import CheckReport
from elastic_driver.job.decisions import Announce, CheckHosts
from elastic_driver.job.events import HostResult, HostsChecked
from elastic_driver.runtime.backend import Backend, MakeBackend
from elastic_driver.runtime.discovery import Hosts
from elastic_driver.runtime.driver_parts import DriverThread
from elastic_driver.runtime.host_checks import CheckAnswer, Checking, Say
from elastic_driver.runtime.run_dir import RunDir
from elastic_driver.words import host_log_events as host_log
from elastic_driver.words.orders import JobSpec, encode
from rendezvous.auth import write_token_file
from rendezvous.server import RendezvousServer
from rendezvous.wire import UNREADABLE, Set

if TYPE_CHECKING:
    from elastic_driver.job.job import Job
    from elastic_driver.kernel.kernel import Handler
    from elastic_driver.runtime.resources import DriverSetup

PACKAGES = Path(__file__).resolve().parents[3]
TASK = (sys.executable, "-m", "elastic_driver.features.checks.worker.task_process")
# Modules that the task imports; the one for the model takes as long as all others.
PRELOAD = ("elastic_driver.features.checks.worker.measure",)
PRELOAD_MODEL = (*PRELOAD, "torch._dynamo")
CHECKS_OF_A_TERM = 1000  # more than one driver makes
STOP_S = 10.0  # for a check that is abandoned to end its agents


class CheckSettings(CheckLimits, frozen=True, kw_only=True):
    """The settings of a run's node checks."""

    exclude_stragglers: bool = False  # keep slow nodes out of the job
    every_slot: bool = True  # a process for each slot; otherwise one for each host
    heartbeat_timeout: float = 30.0
    task: TaskSettings = TaskSettings()
    command: tuple[str, ...] = TASK  # what a process of a task runs
    warm: int | None = None  # processes that have imported torch in advance, as `JobSpec.warm`
    ports: PortRange | None = None  # --ports
    env: dict[str, str] = field(default_factory=dict)  # added to the agents' environment for it

    def spec(self, run_id: str) -> JobSpec:
        """Return the specification of the job that a check's agents run."""
        return JobSpec(
            run_id=run_id,
            command=self.command,
            cwd=str(PACKAGES),
            env=self.env,
            heartbeat_timeout=self.heartbeat_timeout,
            max_restarts=0,
            local_ranks_filter=(),  # what tasks print is for the report, not for the terminal
            warm=self.warm,
            ports=self.ports,
            preload=PRELOAD_MODEL if self.task.model else PRELOAD,
            rehearse=False,  # a task warms up by itself before it measures
        )


@dataclass
class NodeChecks:
    """The node checks of one run (`host_checks.HostChecks`)."""

    settings: CheckSettings
    _: KW_ONLY
    make_backend: MakeBackend  # for the agents of one check
    folder: RunDir  # for the token and the address that these agents are given
    file: Path | None = None  # for the results of this run; None: they are not kept
    keep: Callable[[CheckReport], None] = lambda _report: None  # keeps a report beyond this run
    # The same for the check before the job; returns its report with remarks on earlier checks.
    remember: Callable[[CheckReport], CheckReport] = lambda report: report
    say: Say = lambda _line: None
    report: CheckReport | None = None  # of all checks; replaced, never changed
    backend: Backend | None = None  # of the present check
    stopped: bool = False
    _number: int = 0  # checks begun so far
    _server: RendezvousServer | None = None
    _token: str = ""
    _answer: CheckAnswer = lambda _found: None
    _ending: threading.Thread | None = None

    def open(self, server: RendezvousServer, token: str) -> None:
        """Take the rendezvous that the agents of all checks use."""
        self._server, self._token = server, token

    def begin_term(self, term: int) -> None:
        """Number checks anew: agents of an earlier driver's checks may still live."""
        self._number = (term - 1) * CHECKS_OF_A_TERM

    def begin(self, hosts: Hosts, answer: CheckAnswer) -> NodeChecker:
        """Return the machine of a new check; its agents can be started from now on.

        `answer` is later called with the report, in another thread. Raises ElasticError if the
        check cannot be made, and while another check is going on: both would use the same folder,
        and each would slow down the processors that the other measures.
        """
        if self.stopped or self.backend is not None or self._server is None:
            raise ClusterError("another check is going on")
        settings, known = self.settings, self.report.nodes if self.report else ()
        checked = tuple((host, n if settings.every_slot else 1) for host, n in hosts if n > 0)
        if not checked:
            raise ClusterError("there are no hosts to check; does the source of hosts name any?")
        self.folder.create()
        write_token_file(self.folder.token_file, self._token, self._server.known_by)
        self.folder.write_endpoint(self._server.url, time.time())
        spec, task = settings.spec(self.folder.run_id), settings.task
        documents = ((contract.CHECK_SPEC, spec), (TASK_SETTINGS, task))
        self._server.post([Set(key, encode(document)) for key, document in documents])
        self.backend = self.make_backend(self._server.url, self.folder.token_file)
        limits = msgspec.convert(settings, CheckLimits, from_attributes=True)
        self._answer, number, self._number = answer, self._number, self._number + 1
        return NodeChecker(checked, number=number, limits=limits, task=task.summary, known=known)

    def end(self, report: CheckReport) -> None:
        """End the agents' backend and answer with the report, in a thread."""
        report = msgspec.structs.replace(report, checked_at=time.time())

        def work() -> None:
            try:
                self._close()
            except Exception as error:  # the report is right all the same
                self.say(f"the agents of the node check could not be ended: {error}")
            if not self.stopped:
                self._answer(report)

        self._ending = threading.Thread(target=work, name="check-end", daemon=True)
        self._ending.start()

    def stop(self) -> None:
        """End a check that is going on, and everything it started; no other begins. Idempotent."""
        self.stopped = True
        if self._ending is not None:
            self._ending.join(STOP_S)
        self._close()

    def _close(self) -> None:
        if self.backend is not None:
            try:
                self.backend.close(0.0)
                self.folder.close()
            finally:
                self.backend = None

    def verdict(self, asked: CheckHosts, found: CheckReport | Exception) -> HostsChecked:
        """Return the answer for the job, and keep the report of a check that the job asked for.

        If the check could not be made, no host passes, and the job asks again.
        """
        if isinstance(found, Exception):
            reason = f"it could not be made: {found}"
            results = [HostResult(host, False, reason) for host, _ in asked.hosts]
            return HostsChecked(tuple(results), asked.number)
        before = self.report
        self.report = found if before is None else merged(before, found)
        self._write()
        self.keep(found)
        for line in found.render().splitlines() if before is None else [found.summary()]:
            self.say(line)
        excluded = found.excluded(stragglers=self.settings.exclude_stragglers)
        results = []
        for node in found.nodes:
            words = f"{node.verdict.value}: {node.reason}" if node.reason else node.verdict.value
            bad = excluded.get(node.node)
            results.append(HostResult(node.node, bad is None, bad or words))
        return HostsChecked(tuple(results), asked.number)

    # ---- the check before the job; called by the main thread ------------------------------

    def excluded(self, report: CheckReport | None) -> dict[str, str]:
        """See `HostChecks.excluded`."""
        stragglers = self.settings.exclude_stragglers
        return {} if report is None else report.excluded(stragglers=stragglers)

    def begin_with(self, report: CheckReport) -> None:
        """See `HostChecks.begin_with`."""
        self.report = report
        if self.file is not None:
            self.file.write_bytes(msgspec.json.encode(report) + b"\n")

    def go_on(self) -> None:
        """See `HostChecks.go_on`."""
        self.report = None
        if self.file is not None:
            with contextlib.suppress(OSError, *UNREADABLE):
                self.report = msgspec.json.decode(self.file.read_bytes(), type=CheckReport)

    def _write(self) -> None:
        try:
            if self.file is not None:
                self.file.write_bytes(msgspec.json.encode(self.report) + b"\n")
        except OSError as error:
            self.say(f"cannot keep what the check found in {self.file}: {error.strerror}")


def merged(before: CheckReport, after: CheckReport) -> CheckReport:
    """Return both checks as one: newer verdicts replace older ones, and measurements add up."""
    nodes = {node.node: node for node in before.nodes}
    for node in after.nodes:
        history = nodes[node.node].history + node.history if node.node in nodes else node.history
        nodes[node.node] = msgspec.structs.replace(node, history=history)
    return msgspec.structs.replace(
        before,
        rounds=before.rounds + after.rounds,
        seconds=before.seconds + after.seconds,
        task_seconds=before.task_seconds + after.task_seconds,
        nodes=tuple(nodes.values()),
        checked_at=time.time(),
        task=after.task,
    )


def part(setup: DriverSetup, _began: float) -> Checking:
    """Return the part of a driver."""
    if setup.checks is None:
        return CheckPart(None, resumed=setup.resumed is not None)
    assert isinstance(setup.checks, NodeChecks)  # noqa: S101 - this feature has made them
    return CheckPart(setup.checks, resumed=setup.resumed is not None)


class CheckPart(Checking):
    """Runs the machine of each check. `checks` None: nodes are never checked."""

    def __init__(self, checks: NodeChecks | None, *, resumed: bool) -> None:
        self._checks, self._resumed = checks, resumed
        self._checker: NodeChecker | None = None

    def attach(self, thread: DriverThread) -> None:
        """See `DriverPart.attach`."""
        self._thread = thread

    def handlers(self) -> Mapping[type[Any], Handler]:
        """See `DriverPart.handlers`."""
        return {CheckEnded: self._end}

    def check(self, hosts: Hosts, answer: CheckAnswer) -> None:
        """See `Checking.check`."""
        if self._checks is None:
            super().check(hosts, answer)
            return
        try:
            self._checker = self._checks.begin(hosts, answer)
        except (ElasticError, OSError) as error:
            answer(error)
        else:
            # The first tick begins.
            self._thread.kernel.begin("check", self._checker, due=self._thread.clock())
            self._thread.journal_states()

    def check_for_job(self, asked: CheckHosts) -> None:
        """See `Checking.check_for_job`."""

        def answer(found: CheckReport | Exception) -> None:
            if self._checks is not None:
                self._thread.post(self._checks.verdict(asked, found))

        self.check(asked.hosts, answer)

    def _end(self, decision: CheckEnded) -> None:
        self._checker = None
        self._thread.kernel.end("check")
        if self._checks is not None:
            self._checks.end(decision.report)

    def job_begins(self, job: Job) -> None:
        """Log what was found before the job."""
        del job
        if self._checks is not None and self._checks.report is not None and not self._resumed:
            summary = self._checks.report.summary()
            self._thread.kernel.act(Announce(host_log.NodesChecked(), summary))

    def before_job(self) -> dict[str, Any]:
        """See `DriverPart.before_job`."""
        if self._checker is not None:
            found: dict[str, Any] = msgspec.to_builtins(self._checker.report(self._thread.clock()))
            return found
        return {"state": "starting", **self.status()}

    def status(self) -> dict[str, Any]:
        """See `DriverPart.status`."""
        return {"node_check": None if self._checks is None else self._checks.report}
