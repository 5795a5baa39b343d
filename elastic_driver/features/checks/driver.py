"""Node checks of a run: their agents' backend, their results, and the history of all runs.

One check runs at a time, before the job or during it for hosts that come later. The machine
(`features.checks.machine`) decides; this module gives its agents a folder and a backend, adds
its report to earlier ones, and keeps the results in files. Called by the driver's thread, except
where noted. Times are seconds.
"""

import contextlib
import errno
import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import field

from elastic_driver import contract
from elastic_driver.contract import PortRange
from elastic_driver.errors import ClusterError
from elastic_driver.features.checks.machine import CheckLimits, NodeChecker
from elastic_driver.features.checks.messages import TASK_SETTINGS, TaskSettings
from elastic_driver.features.checks.report import CheckHistory, CheckReport
from elastic_driver.job.decisions import CheckHosts
from elastic_driver.job.events import HostResult, HostsChecked
from elastic_driver.runtime.backend import Backend, MakeBackend
from elastic_driver.runtime.discovery import Hosts
from elastic_driver.runtime.run_dir import RunDir
from elastic_driver.words.orders import JobSpec, encode
from rendezvous.auth import write_token_file
from rendezvous.own_files import open_own, write_own
from rendezvous.server import RendezvousServer
from rendezvous.wire import UNREADABLE, Set

PACKAGES = Path(__file__).resolve().parents[3]
TASK = (sys.executable, "-m", "elastic_driver.features.checks.worker.serve")
# Modules that the task imports; the one for the model takes as long as all others.
PRELOAD = ("elastic_driver.features.checks.worker.measure",)
PRELOAD_MODEL = (*PRELOAD, "torch._dynamo")
FILE = "_node-checks.json"
MAX_BYTES = 64 * 1024 * 1024  # far more than the bounds of `CheckHistory` allow
LOCK_S = 2.0  # then it is written all the same: at worst another run's check is missing
_LOOK_AGAIN_S = 0.02
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


CheckAnswer: TypeAlias = Callable[[CheckReport | Exception], None]


@dataclass
class NodeChecks:
    """The node checks of one run."""

    settings: CheckSettings
    _: KW_ONLY
    make_backend: MakeBackend  # for the agents of one check
    folder: RunDir  # for the token and the address that these agents are given
    file: Path | None = None  # for the results of this run; None: they are not kept
    keep: Callable[[CheckReport], None] = lambda _report: None  # keeps a report beyond this run
    say: Callable[[str], None] = lambda _line: None  # shows the user a line
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


class CheckHistoryFile:
    """The history of all node checks of a state folder, `<state-dir>/_node-checks.json`.

    No run can have this name. The file is readable by its owner only and written atomically.
    Several runs may end a check at the same time: they take turns by a lock on the folder, if the
    file system has locks. A file that cannot be decoded is renamed and reported; no check fails
    because of its history. Times are unix seconds.

    Args:
        state_dir: the folder; made when there is something to keep.
        say: shows the user a line about a file that cannot be read or written.
    """

    def __init__(self, state_dir: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = state_dir.expanduser().absolute(), say
        self.path = self._folder / FILE

    def read(self) -> CheckHistory:
        """Return the history; an empty one if there is no file, or no usable one."""
        try:
            with open(open_own(self.path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                if (owner := os.fstat(file.fileno()).st_uid) != os.geteuid():
                    raise PermissionError(errno.EPERM, f"it belongs to user {owner}")
                content = file.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise msgspec.DecodeError(f"it is larger than {MAX_BYTES} bytes")
            return msgspec.json.decode(content, type=CheckHistory)
        except FileNotFoundError:
            pass
        except UNREADABLE as error:
            aside = self.path.with_name(f"{FILE}.bad-{time.time():.0f}")
            with contextlib.suppress(OSError):
                self.path.replace(aside)
            self._say(f"{self.path} is no history of checks ({error}), and is now {aside.name}")
        except OSError as error:
            self._say(f"cannot read the checks before this one in {self.path}: {error.strerror}")
        return CheckHistory()

    def add(self, report: CheckReport) -> None:
        """Add a check's report."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                history = self.read().with_report(report, time.time())
                write_own(self.path, msgspec.json.encode(history) + b"\n")
        except OSError as error:
            self._say(f"cannot keep what the check found in {self.path}: {error.strerror}")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        until, locked = time.monotonic() + LOCK_S, False
        try:
            while not locked and time.monotonic() < until:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    locked = True
                except BlockingIOError:
                    time.sleep(_LOOK_AGAIN_S)
                except OSError:  # this file system has no locks
                    break
            yield
        finally:
            os.close(descriptor)  # and with it the lock
