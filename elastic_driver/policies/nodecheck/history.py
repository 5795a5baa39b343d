"""The history of node checks over many runs, in bounded memory.

`runtime.checks` keeps one in the state folder; the table of a check and
`elasticctl check --history` show it. No node is excluded because of its history: it may have been
repaired, and its name may belong to another machine today. Pure; times are unix seconds.
"""

from collections import Counter
from collections.abc import Collection
from datetime import datetime, timezone
from statistics import median

import msgspec
from msgspec import Struct

from elastic_driver.policies.nodecheck.check import SLOW_FACTOR, NodeVerdict, Verdict
from elastic_driver.policies.nodecheck.report import CheckReport, align, seconds

KEPT = 20  # checks of a node; the oldest are dropped
MOST_NODES = 5000  # those not checked for longest are dropped
SHOWN = 5  # checks of a node in `remark`
_REASON_CHARS = 300
_COMPARABLE = 3  # good checks, to compare with


class PastCheck(Struct, frozen=True):
    """The result of one check for a node."""

    checked_at: float
    verdict: Verdict
    reason: str = ""
    compute: float | None = None  # seconds
    network: float | None = None
    task: str = ""  # times of the same task compare


class CheckHistory(Struct, frozen=True):
    """Node → its checks, the newest last."""

    nodes: dict[str, tuple[PastCheck, ...]] = {}

    def with_report(self, report: CheckReport, now: float) -> "CheckHistory":
        """Return the history with another check added; without nodes that were not measured."""
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
            said[found.node] = "; ".join(
                filter(None, (remark(past), pace(found, report.task, past)))
            )
        return {node: words for node, words in said.items() if words}

    def render(self, names: Collection[str] = ()) -> str:
        """Return a table with a line for each node (of `names`, or all) and its last verdict."""
        rows = [["node", "last check", "checks", *(v.value for v in Verdict), "compute", "network"]]
        rows[0].append("")
        for node in sorted(names or self.nodes):
            past = self.nodes.get(node, ())
            counts = Counter(check.verdict for check in past)
            row = [node, _when(past), str(len(past)), *(str(counts[v] or "–") for v in Verdict)]
            last = past[-1] if past else None
            times = (last.compute, last.network) if last is not None else (None, None)
            bad = last is not None and last.verdict is not Verdict.GOOD
            words = f"{last.verdict.value}: {last.reason}" if last is not None and bad else ""
            rows.append([*row, *map(seconds, times), words])
        return "\n".join(align(rows))


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

    Only this shows two nodes that are equally slow, or the slow link of two. Empty up to
    SLOW_FACTOR times, or if too few checks are known.
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


def decode(written: bytes) -> CheckHistory:
    """Decode a history; raises msgspec.DecodeError (or its subclass ValidationError)."""
    return msgspec.json.decode(written, type=CheckHistory)


def _when(past: tuple[PastCheck, ...]) -> str:
    if not past:
        return "never"
    return datetime.fromtimestamp(past[-1].checked_at, timezone.utc).strftime("%Y-%m-%d %H:%MZ")
