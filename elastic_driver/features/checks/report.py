"""The report of a node check, as a document and as a table for people, and earlier reports. Pure.

`features.checks.driver` keeps a `CheckHistory` of many runs in the state folder, in bounded memory;
the table of a check and `elasticctl check --history` show it. No node is excluded because of its
history: it may have been repaired, and its name may belong to another machine today.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from datetime import datetime, timezone
from statistics import median

from msgspec import Struct

from elastic_driver.features.checks.evidence import SLOW_FACTOR, Measurement, NodeVerdict, Verdict
from elastic_driver.words import aligned

KEPT = 20  # checks of a node; the oldest are dropped
MOST_NODES = 5000  # those not checked for longest are dropped
SHOWN = 5  # checks of a node in `remark`
_REASON_CHARS = 300
_COMPARABLE = 3  # the fewest good checks to compare with
_SHOWN_NODES = 8


class CheckReport(Struct, frozen=True, kw_only=True):
    """The results of a check; kept as JSON beside the event log, and shown by `/v1/status`."""

    state: str = "done"  # checking | done
    rounds: int
    seconds: float  # that the check has taken
    # Of these, the time from the common start of the tasks to the end of the last one.
    task_seconds: float = 0.0
    nodes: tuple[NodeVerdict, ...]
    checked_at: float | None = None  # unix seconds at its end
    task: str = ""  # describes the task; times of the same task compare
    before: dict[str, str] = {}  # node → remark on its earlier checks

    def named(self, *verdicts: Verdict) -> tuple[str, ...]:
        """Return the nodes with one of these verdicts."""
        return tuple(node.node for node in self.nodes if node.verdict in verdicts)

    def excluded(self, *, stragglers: bool) -> dict[str, str]:
        """Return the nodes that must not train, with reasons: the faulty and, if asked, slow ones.

        An undecided node is never excluded.
        """
        bad = {Verdict.FAULTY, Verdict.STRAGGLER} if stragglers else {Verdict.FAULTY}
        return {n.node: f"{n.verdict.value}: {n.reason}" for n in self.nodes if n.verdict in bad}

    def summary(self) -> str:
        """Return one line: the number of nodes by verdict, and the names of those not good."""
        parts = []
        for verdict in Verdict:
            names = self.named(verdict)
            if not names:
                continue
            shown = ", ".join(names[:_SHOWN_NODES])
            more = f" and {len(names) - _SHOWN_NODES} more" if len(names) > _SHOWN_NODES else ""
            which = "" if verdict is Verdict.GOOD else f" ({shown}{more})"
            parts.append(f"{len(names)} {verdict.value}{which}")
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        took = f"{self.seconds:.1f} s, of which the task {self.task_seconds:.1f} s"
        return f"node check: {', '.join(parts)}; {rounds}, {took}"

    def render(self) -> str:
        """Return a table with a line for each node and the summary below it."""
        rows = [["node", "verdict", "compute", "network", "bandwidth", "latency", ""]]
        rows += [[*_measured(n), _join(n.reason, self.before.get(n.node))] for n in self.nodes]
        if not any(m.bandwidth is not None for n in self.nodes for m in n.history if not m.failure):
            rows = [[*row[:4], row[-1]] for row in rows]
        return "\n".join([*_align(rows), self.summary()])


DOCUMENT = CheckReport  # in the status


def _measured(node: NodeVerdict) -> tuple[str, ...]:
    """Return a node's cells in the table of a check."""
    passed = [m for m in node.history if not m.failure]
    # A time within one network stack is shown but never judged.
    within = min((m.network for m in passed if not m.linked), default=None)
    network = node.network if node.network is not None else within
    bandwidth = max((m.bandwidth for m in passed if m.bandwidth is not None), default=None)
    latency = min((m.latency for m in passed if m.latency is not None), default=None)
    rate = "–" if bandwidth is None else f"{bandwidth / 1e9:.3g} GB/s"
    times = _seconds(node.compute), _seconds(network)
    return node.node, node.verdict.value, *times, rate, _seconds(latency)


def shown_times(measured: Measurement) -> str:
    """Return a node's times in one round, for people."""
    if measured.failure:
        return f"{measured.node} failed ({measured.failure})"
    network = _seconds(measured.network or None)  # 0: it ran alone
    return f"{measured.node} {_seconds(measured.compute)} computing, {network} network"


def _join(*sentences: str | None) -> str:
    return "; ".join(filter(None, sentences))


def _seconds(time: float | None) -> str:
    """Format a time for people; a dash if it was not measured."""
    if time is None:
        return "–"
    return f"{time:.2f} s" if time >= 1 else f"{time * 1e3:.3g} ms"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines: names, verdicts and the last cell are words, the others numbers."""
    return aligned(rows, right=range(2, len(rows[0]) - 1))


# ---- earlier checks ---------------------------------------------------------------------


class PastCheck(Struct, frozen=True):
    """The result of one check for a node; `checked_at` is in unix seconds."""

    checked_at: float
    verdict: Verdict
    reason: str = ""
    compute: float | None = None  # seconds
    network: float | None = None
    task: str = ""  # times of the same task compare


class CheckHistory(Struct, frozen=True):
    """The checks of each node, over many runs, the newest last."""

    nodes: dict[str, tuple[PastCheck, ...]] = {}

    def with_report(self, report: CheckReport, now: float) -> "CheckHistory":
        """Return the history with a check added that ended at `now`, in unix seconds.

        Nodes that were not measured are left out.
        """
        nodes = dict(self.nodes)
        for found in report.nodes:
            if found.history or found.verdict is Verdict.FAULTY:
                reason, times = found.reason[:_REASON_CHARS], (found.compute, found.network)
                past = PastCheck(now, found.verdict, reason, *times, report.task)
                nodes[found.node] = (*nodes.pop(found.node, ()), past)[-KEPT:]
        newest = sorted(nodes, key=lambda node: nodes[node][-1].checked_at)[-MOST_NODES:]
        return CheckHistory({node: nodes[node] for node in newest})

    def remarks(self, report: CheckReport) -> dict[str, str]:
        """Return remarks on nodes that were not always good, or became far slower.

        `report` is not in the history yet. A remark is not a verdict.
        """
        said = {}
        for found in report.nodes:
            past = self.nodes.get(found.node, ())
            said[found.node] = _join(remark(past), pace(found, report.task, past))
        return {node: words for node, words in said.items() if words}

    def render(self, names: Collection[str] = ()) -> str:
        """Return a table with a line for each node (of `names`, or all) and its last verdict."""
        verdicts = [verdict.value for verdict in Verdict]
        rows = [["node", "last check", "checks", *verdicts, "compute", "network", ""]]
        for node in sorted(names or self.nodes):
            past = self.nodes.get(node, ())
            counts = Counter(check.verdict for check in past)
            row = [node, _when(past), str(len(past)), *(str(counts[v] or "–") for v in Verdict)]
            last = past[-1] if past else None
            times = (last.compute, last.network) if last is not None else (None, None)
            bad = last is not None and last.verdict is not Verdict.GOOD
            words = f"{last.verdict.value}: {last.reason}" if last is not None and bad else ""
            rows.append([*row, *map(_seconds, times), words])
        return "\n".join(_align(rows))


def remark(past: tuple[PastCheck, ...]) -> str:
    """Describe a node's last checks; empty if it was always good."""
    last = past[-SHOWN:]
    counts = Counter(check.verdict for check in last if check.verdict is not Verdict.GOOD)
    if not counts:
        return ""
    of = f"its last {len(last)} checks" if len(last) > 1 else "its last check"
    parts = [f"{verdict.value} in {number}" for verdict, number in counts.most_common()]
    return f"before: {', '.join(parts)} of {of}"


def pace(found: NodeVerdict, task: str, past: tuple[PastCheck, ...]) -> str:
    """Describe how much slower a node is than in its own good checks of the same task.

    Only this shows two nodes that are equally slow, or the slow link of two nodes. The result is
    empty up to SLOW_FACTOR times, or if too few checks are known.
    """
    good = [check for check in past if check.verdict is Verdict.GOOD and check.task == task]
    said = []
    for what, now, times in (
        ("computing", found.compute, [c.compute for c in good if c.compute]),
        ("network", found.network, [c.network for c in good if c.network]),
    ):
        if now is None or len(times) < _COMPARABLE:
            continue
        ratio = now / median(times)
        if ratio > SLOW_FACTOR:
            said.append(f"{what} takes {ratio:.1f} times what it took before")
    return "; ".join(said)


def _when(past: tuple[PastCheck, ...]) -> str:
    if not past:
        return "never"
    return datetime.fromtimestamp(past[-1].checked_at, timezone.utc).strftime("%Y-%m-%d %H:%MZ")
