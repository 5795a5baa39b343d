"""Checks of hosts while the job runs, and what all checks of a run have found.

The core decides which hosts are checked (`core.rules.rechecks`); here a thread runs the check
beside the job, with agents and a rendezvous of its own, and posts what came of it. One check at a
time.
What is known of each node, with its whole history, is shown by `/v1/status` and kept in a file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from elastic_driver.core.decisions import CheckHosts
from elastic_driver.core.events import HostResult, HostsChecked
from elastic_driver.errors import ClusterError, ElasticError
from elastic_driver.policies.nodecheck.check import NodeVerdict
from elastic_driver.policies.nodecheck.report import CheckReport
from elastic_driver.runtime.host_lists import Hosts
from elastic_driver.runtime.node_checks import NodeChecker

STOP_S = 10.0  # for a check that is cancelled to end its agents

MakeChecker = Callable[[Hosts, tuple[NodeVerdict, ...]], NodeChecker]


class HostChecks:
    """The node checks of one run; `first` was made before the job.

    Args:
        first: what that one found.
        make: a checker for some hosts, that knows earlier verdicts.
        exclude_stragglers: whether a slow host is kept out, too.
        file: where the findings of this run are kept; None: nowhere.
        keep: adds one check's findings to what is kept beyond this run.
        say: told in a line what came of a check, and what went wrong with one.
    """

    def __init__(
        self,
        first: CheckReport,
        make: MakeChecker,
        *,
        exclude_stragglers: bool,
        file: Path | None,
        keep: Callable[[CheckReport], None],
        say: Callable[[str], None],
    ) -> None:
        self._keep_history = keep
        self._make, self._exclude, self._file, self._say = make, exclude_stragglers, file, say
        self._lock = threading.Lock()  # guards the rest
        self._report = first  # replaced, never changed
        self._checker: NodeChecker | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    @property
    def report(self) -> CheckReport:
        """The newest verdict on every node that was ever checked, with all its measurements."""
        return self._report

    def start(self, decision: CheckHosts, post: Callable[[HostsChecked], None]) -> None:
        """Check hosts in the background; `post` is called once, mostly by another thread.

        While a check is going on a second one is refused: it would want the same folder, and the
        processors whose speed the first one measures.
        """
        with self._lock:
            if self._stopped:
                return
            refused = self._begin(decision, post)
        if refused is not None:
            post(_impossible(decision, refused))

    def _begin(
        self, decision: CheckHosts, post: Callable[[HostsChecked], None]
    ) -> ElasticError | None:
        """Start the thread; or why that cannot be done."""
        if self._thread is not None and self._thread.is_alive():
            return ClusterError("another check is going on")
        try:
            self._checker = checker = self._make(decision.hosts, self._report.nodes)
        except ElasticError as error:
            return error
        self._thread = threading.Thread(
            target=self._run, args=(checker, decision, post), name="host-check", daemon=True
        )
        self._thread.start()
        return None

    def stop(self) -> None:
        """End a check that is going on, and everything it started. Idempotent."""
        with self._lock:
            self._stopped = True
            checker, thread = self._checker, self._thread
        if checker is not None and thread is not None and thread.is_alive():
            checker.cancel()
            thread.join(STOP_S)

    def _run(
        self, checker: NodeChecker, decision: CheckHosts, post: Callable[[HostsChecked], None]
    ) -> None:
        """The thread. Whatever happens, the job hears of it: it holds the hosts until then."""
        try:
            found = checker.run()
        except ElasticError as error:
            answer = _impossible(decision, error)
        except Exception as error:  # a full disk, or a bug: the hosts wait all the same
            self._tell(f"the check of hosts broke down: {type(error).__name__}: {error}")
            answer = _impossible(decision, error)
        else:
            answer = self._take(decision, found)
        with self._lock:
            stopped, self._thread = self._stopped, None
        if not stopped:
            post(answer)

    def _take(self, decision: CheckHosts, found: CheckReport) -> HostsChecked:
        excluded = found.excluded(stragglers=self._exclude)
        with self._lock:  # what comes after the end is no longer this job's
            if not self._stopped:
                self._report = merged(self._report, found)
                self._keep()
                self._keep_history(found)
                self._say(found.summary())
        return HostsChecked(
            tuple(
                HostResult(n.node, n.node not in excluded, excluded.get(n.node, _words(n)))
                for n in found.nodes
            ),
            decision.number,
        )

    def _tell(self, line: str) -> None:
        with self._lock:
            if not self._stopped:
                self._say(line)

    def _keep(self) -> None:
        if self._file is None:
            return
        try:
            self._file.write_bytes(msgspec.json.encode(self._report) + b"\n")
        except OSError as error:
            self._say(f"cannot keep what the check found in {self._file}: {error.strerror}")


def merged(before: CheckReport, after: CheckReport) -> CheckReport:
    """Both checks as one: newer verdicts replace older ones, and measurements add up."""
    nodes = {node.node: node for node in before.nodes}
    for node in after.nodes:
        known = nodes.get(node.node)
        history = node.history if known is None else known.history + node.history
        nodes[node.node] = msgspec.structs.replace(node, history=history)
    return CheckReport(
        rounds=before.rounds + after.rounds,
        seconds=before.seconds + after.seconds,
        nodes=tuple(nodes.values()),
        checked_at=time.time(),
        task=after.task,
        before=before.before,
    )


def _impossible(decision: CheckHosts, error: Exception) -> HostsChecked:
    """Nothing is known of the hosts; the core has them checked again after a cool-down."""
    reason = f"it could not be made: {error}"
    results = tuple(HostResult(host, False, reason) for host, _ in decision.hosts)
    return HostsChecked(results, decision.number)


def _words(node: NodeVerdict) -> str:
    return f"{node.verdict.value}: {node.reason}" if node.reason else node.verdict.value
