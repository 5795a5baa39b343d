"""The report of a node check, as a document and as a table for people. Pure."""

from collections.abc import Sequence

from msgspec import Struct

from elastic_driver.policies.nodecheck.check import Measurement, NodeVerdict, Verdict

_LEFT = 1  # columns from the left that are aligned left: the node's name
_SHOWN_NODES = 8


class CheckReport(Struct, frozen=True, kw_only=True):
    """The results of a check; kept as JSON beside the event log, and shown by `/v1/status`."""

    state: str = "done"  # checking | done
    rounds: int
    seconds: float  # how long it has taken
    task_seconds: float = 0.0  # of these, the tasks' own: from all are up to the last one's end
    nodes: tuple[NodeVerdict, ...]
    checked_at: float | None = None  # unix seconds at its end
    task: str = ""  # what was run; times of the same task compare
    before: dict[str, str] = {}  # node → what earlier checks make remarkable about it

    def named(self, *verdicts: Verdict) -> tuple[str, ...]:
        """Return the nodes with one of these verdicts."""
        return tuple(node.node for node in self.nodes if node.verdict in verdicts)

    def excluded(self, *, stragglers: bool) -> dict[str, str]:
        """Return the nodes that must not train, with reasons: the faulty and, if asked, stragglers.

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
        head = ["node", "verdict", "compute", "network"]
        measured = any(_bandwidth(node) is not None for node in self.nodes)
        if measured:
            head += ["bandwidth", "latency"]
        rows = [[*head, ""]]
        for node in self.nodes:
            row = [node.node, node.verdict.value, seconds(node.compute), seconds(_network(node))]
            if measured:
                row += [_rate(_bandwidth(node)), seconds(_latency(node))]
            said = (node.reason, self.before.get(node.node, ""))
            rows.append([*row, "; ".join(filter(None, said))])
        return "\n".join([*align(rows), self.summary()])


def _network(node: NodeVerdict) -> float | None:
    """Return its best exchange time; one within a network stack is shown but never judged."""
    within = [m.network for m in _passed(node) if not m.linked]
    return node.network if node.network is not None else min(within, default=None)


def _bandwidth(node: NodeVerdict) -> float | None:
    return max((m.bandwidth for m in _passed(node) if m.bandwidth is not None), default=None)


def _latency(node: NodeVerdict) -> float | None:
    return min((m.latency for m in _passed(node) if m.latency is not None), default=None)


def _passed(node: NodeVerdict) -> list[Measurement]:
    return [m for m in node.history if not m.failure]


def seconds(time: float | None) -> str:
    """Format a time for people; a dash if it was not measured."""
    if time is None:
        return "–"
    return f"{time:.2f} s" if time >= 1 else f"{time * 1e3:.3g} ms"


def _rate(bytes_a_second: float | None) -> str:
    return "–" if bytes_a_second is None else f"{bytes_a_second / 1e9:.3g} GB/s"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with aligned columns; the last cell is free text."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i <= _LEFT else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines
