"""The node check's method: short tasks in changing pairs find faulty and slow nodes.

Round 1 runs the task in pairs (an odd node joins the last pair). If nothing failed and the
times agree, the check is over. Otherwise every suspect is paired with a node *proved good*,
the slowest suspect with the fastest good node, until all is known or the rounds are used up. A
suspect is never judged by what happened beside another suspect, as long as a good node exists.

A node is good or slow by its own best times, one for computing and one for the network. In a group
of three the task times each pair by itself and a node reports its best time, so that a slow third
node does not make the other two look slow.

`NodeCheck.plan()` returns the next groups, `report()` takes their results, `verdicts()` judges.
Pure: `checker` (or the simulation) runs the tasks. Times are seconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from msgspec import Struct

from elastic_driver.kernel.tables import saved, set_defaults
from elastic_driver.policies.nodecheck.evidence import Evidence, GroupResult, Measurement, failed

_TRIES_WITHOUT_GOOD = 3  # with three pairings of four nodes, each has been with every other

Group = tuple[str, ...]


class Verdict(str, Enum):
    """The result of the check for a node."""

    GOOD = "good"
    STRAGGLER = "straggler"  # it works, but far slower than the others
    FAULTY = "faulty"
    UNDECIDED = "undecided"  # there was no proof; never a reason to exclude the node


class NodeVerdict(Struct, frozen=True):
    """A node's verdict, with its reason in words and everything that was measured."""

    node: str
    verdict: Verdict
    reason: str
    compute: float | None  # its best times; None: not measured
    network: float | None
    history: tuple[Measurement, ...]  # one for each round it took part in


@dataclass(init=False)
class NodeCheck:
    """One check of some nodes: it plans rounds, takes in their results and judges.

    Args:
        nodes: names, at least one and without repeats, in the order of the first round's pairs.
        known: verdicts of an earlier check of the same cluster. The times of its good nodes count
            in what is usual; with them a node that is checked alone can be slow.
    """

    nodes: tuple[str, ...] = saved(())
    _known: tuple[list[float], list[float]] = saved(factory=lambda: ([], []), name="known")
    _rounds: list[tuple[GroupResult, ...]] = saved(factory=list, name="rounds")
    _gone: dict[str, str] = saved(factory=dict, name="gone")
    _next: tuple[Group, ...] | None = saved(None, name="next")

    def __init__(self, nodes: Sequence[str], *, known: Sequence[NodeVerdict] = ()) -> None:
        set_defaults(self)
        self.nodes = tuple(nodes)
        good = [v for v in known if v.verdict is Verdict.GOOD and v.node not in nodes]
        self._known = (
            [v.compute for v in good if v.compute is not None],
            [v.network for v in good if v.network is not None],
        )

    @property
    def rounds(self) -> tuple[tuple[GroupResult, ...], ...]:
        """The results so far, by round."""
        return tuple(self._rounds)

    @property
    def round_limit(self) -> int:
        """The most rounds: two, and one each time the number of nodes doubles."""
        return 2 + (len(self.nodes) - 1).bit_length()

    def plan(self) -> tuple[Group, ...]:
        """Return the groups of the next round; () once the check is over."""
        if self._next is None:
            self._next = self._plan()
        return self._next

    def report(self, measurements: Iterable[Measurement]) -> None:
        """Take the results of the planned round; a node without one has failed."""
        results = {m.node: m for m in measurements}
        for_node = {n: results.get(n) or failed(n, "no result") for n in self.nodes}
        members = (tuple(for_node[node] for node in group) for group in self.plan())
        self._rounds.append(tuple(map(GroupResult, members)))
        self._next = None

    def give_up(self, node: str, reason: str) -> None:
        """Call a node faulty that cannot take part any more; this explains failures beside it.

        A planned round stays as it is.
        """
        self._gone.setdefault(node, reason)

    def verdicts(self) -> tuple[NodeVerdict, ...]:
        """Return the verdict for every node, in the given order; final once `plan()` is ()."""
        evidence, found = self._evidence(), []
        for node in self.nodes:
            verdict, reason = self._verdict(evidence, node)
            times = evidence.compute.get(node), evidence.network.get(node)
            found.append(NodeVerdict(node, verdict, reason, *times, evidence.history(node)))
        return tuple(found)

    # ---- planning ------------------------------------------------------------------------

    def _plan(self) -> tuple[Group, ...]:
        if not self._rounds:
            nodes = [n for n in self.nodes if n not in self._gone]
            pairs = [tuple(nodes[i : i + 2]) for i in range(0, len(nodes), 2)]
            if len(nodes) % 2 and len(pairs) > 1:  # the odd node joins the last pair
                pairs[-2:] = [pairs[-2] + pairs[-1]]
            return tuple(pairs)
        if len(self._rounds) >= self.round_limit:
            return ()
        evidence = self._evidence()
        suspects = evidence.suspects
        if not evidence.good:
            hopeless = len(self.nodes) > 3 and len(self._rounds) >= _TRIES_WITHOUT_GOOD
            return () if hopeless else _pair_anew(suspects, evidence)
        doubtful = list(suspects)
        good = (n for n in self.nodes if n in evidence.good)
        doubtful += [n for n in good if evidence.timed_too_little(n)]
        groups, left = _slow_with_fast(doubtful, evidence)
        anew = _pair_anew([n for n in left if n in suspects], evidence)
        again = [(n,) for n in left if n not in suspects and evidence.slow_alone(n)]
        return (*groups, *anew, *again) or _pair_without_hub(evidence)

    def _evidence(self) -> Evidence:
        return Evidence(self.nodes, self._rounds, self._gone, self._known)

    # ---- judging -------------------------------------------------------------------------

    def _verdict(self, evidence: Evidence, node: str) -> tuple[Verdict, str]:
        if node in evidence.faulty:
            return Verdict.FAULTY, evidence.faulty[node]
        if not evidence.history(node):
            return Verdict.UNDECIDED, "it was not checked"
        if node in evidence.suspects:
            return self._verdict_on_suspect(evidence, node)
        if evidence.is_slow(node):
            reason = evidence.describe_slowness(node)
            if evidence.timed_too_little(node):
                return Verdict.UNDECIDED, f"{reason}, but not yet beside a fast node"
            return Verdict.STRAGGLER, reason
        return Verdict.GOOD, ""

    def _verdict_on_suspect(self, evidence: Evidence, node: str) -> tuple[Verdict, str]:
        """Judge a suspect by its partners' results: no good node was left to test it with."""
        if not self.plan() and node in evidence.likely:
            return Verdict.FAULTY, evidence.likely[node]
        partners = evidence.unexplained_partners(node)
        if not self.plan() and len(partners) > 1:
            return Verdict.FAULTY, f"failed with {' and with '.join(partners)}"
        alone = " (alone it passes)" if node in evidence.passed_alone else ""
        return Verdict.UNDECIDED, f"failed{alone}, and no node proved good was there to tell"


def _slow_with_fast(doubtful: Sequence[str], evidence: Evidence) -> tuple[list[Group], list[str]]:
    """Pair the slowest node with the fastest good one, and so on; also return the nodes left over.

    A failed task counts as FAILED_S, so failed nodes come first.
    """
    partners = sorted(
        evidence.good.difference(doubtful), key=lambda n: (evidence.is_slow(n), evidence.time(n))
    )
    groups: list[Group] = []
    left: list[str] = []
    for node in sorted(doubtful, key=lambda n: -evidence.time(n)):
        met = evidence.partners_of(node)
        partner = next((p for p in partners if p not in met), partners[0] if partners else None)
        if partner is None:
            left.append(node)
        else:
            partners.remove(partner)
            groups.append((node, partner))
    return groups, left


def _pair_without_hub(evidence: Evidence) -> tuple[Group, ...]:
    """Pair two nodes whose links were timed only beside the same third node.

    If that node is slow, all their times are long, and none stands out.
    """
    hub = evidence.hub
    others = [n for n in evidence.network if n != hub and n in evidence.good] if hub else []
    return (tuple(others[:2]),) if len(others) > 1 else ()


def _pair_anew(suspects: Sequence[str], evidence: Evidence) -> tuple[Group, ...]:
    """Pair suspects that have not been a pair before; the others run alone, once."""
    waiting = sorted(suspects, key=lambda n: len(evidence.partners_of(n, in_pairs=True)))
    groups: list[Group] = []
    while waiting:
        node = waiting.pop(0)
        met = evidence.partners_of(node, in_pairs=True)
        partner = next((other for other in waiting if other not in met), None)
        if partner is not None:
            waiting.remove(partner)
            groups.append((node, partner))
        elif node not in evidence.passed_alone:
            groups.append((node,))
    return tuple(groups)
