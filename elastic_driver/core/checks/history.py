"""What the checks of many runs have found out about each node, in bounded memory.

`runtime.check_history` keeps one in the state folder; the table of a check and
`elasticctl check --history` show it. Nobody is excluded for what stands here: a node may have been
repaired, and a name may stand for another machine today. Pure; times are unix seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from datetime import datetime, timezone

import msgspec
from msgspec import Struct

from elastic_driver.core.checks.report import CheckReport, align, seconds
from elastic_driver.core.nodecheck import NodeVerdict, Verdict

KEPT = 20  # checks of a node; the oldest are dropped
MOST_NODES = 5000  # those not checked for longest are dropped
SHOWN = 5  # checks of a node in `remark`
_REASON_CHARS = 300


class PastCheck(Struct, frozen=True):
    """What one check found out about a node."""

    checked_at: float
    verdict: Verdict
    reason: str = ""
    compute: float | None = None  # seconds
    network: float | None = None


class CheckHistory(Struct, frozen=True):
    """Node → its checks, the newest last."""

    nodes: dict[str, tuple[PastCheck, ...]] = {}

    def with_report(self, report: CheckReport, now: float) -> CheckHistory:
        """The same with another check added; what was never measured is not counted."""
        nodes = dict(self.nodes)
        for found in report.nodes:
            if found.history or found.verdict is Verdict.FAULTY:
                nodes[found.node] = (*nodes.pop(found.node, ()), _past(found, now))[-KEPT:]
        newest = sorted(nodes, key=lambda node: nodes[node][-1].checked_at)[-MOST_NODES:]
        return CheckHistory({node: nodes[node] for node in newest})

    def remarks(self, names: Collection[str]) -> dict[str, str]:
        """What is to be said of those among `names` who were not always good."""
        said = {name: remark(self.nodes.get(name, ())) for name in names}
        return {name: words for name, words in said.items() if words}

    def render(self, names: Collection[str] = ()) -> str:
        """A table with a line for each node (of `names`, or of all) and its last verdict."""
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
    """How a node fared in its last checks, in words; empty where it was always good."""
    last = past[-SHOWN:]
    counts = Counter(check.verdict for check in last if check.verdict is not Verdict.GOOD)
    if not counts:
        return ""
    of = f"its last {len(last)} checks" if len(last) > 1 else "its last check"
    parts = [f"{verdict.value} in {number}" for verdict, number in counts.most_common()]
    return f"before: {', '.join(parts)} of {of}"


def decode(written: bytes) -> CheckHistory:
    """What was kept; raises msgspec.DecodeError (a ValidationError too) for anything else."""
    return msgspec.json.decode(written, type=CheckHistory)


def _past(found: NodeVerdict, now: float) -> PastCheck:
    reason = found.reason[:_REASON_CHARS]
    return PastCheck(now, found.verdict, reason, found.compute, found.network)


def _when(past: tuple[PastCheck, ...]) -> str:
    if not past:
        return "never"
    return datetime.fromtimestamp(past[-1].checked_at, timezone.utc).strftime("%Y-%m-%d %H:%MZ")
