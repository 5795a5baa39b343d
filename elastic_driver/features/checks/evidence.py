"""The method of a node check: short tasks in changing pairs find faulty and slow nodes.

`NodeCheck.plan()` returns the next groups, `report()` takes their results, `verdicts()` judges. It
builds an `Evidence` from all rounds so far, and decides from it what runs next.

The rules. A node is *proved good* when a task it shared with another node has passed. It is
*faulty* when it failed alone, or beside a node proved good in an earlier round. If its partner
proves good only later, it is *likely* faulty: it is tried once more, because the first failure may
have been an accident. A failure beside a faulty node is *explained* and says nothing. If two nodes
proved good fail together, one of them has changed: both are suspects again.

Round 1 runs the task in pairs (an odd node joins the last pair). If nothing failed and the
times agree, the check is over. Otherwise every suspect is paired with a node *proved good*,
the slowest suspect with the fastest good node, until all is known or the rounds are used up. A
suspect is never judged by what happened beside another suspect, as long as a good node exists.

A node is good or slow by its own best times, one for computing and one for the network. In a group
of three the task times each pair by itself and a node reports its best time, so that a slow third
node does not make the other two look slow.

Pure: `machine` (or the simulation) runs the tasks. Times are seconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from msgspec import Struct

from elastic_driver.arithmetic import usual
from elastic_driver.kernel.tables import saved, set_defaults

SLOW_FACTOR = 2.0  # a node is slow above this many times the usual time
FAILED_S = 3600.0  # the time that a failed task counts as, in seconds
_MEASUREMENTS = 2  # measurements that must agree before a node is called slow


class Measurement(Struct, frozen=True):
    """The measurement of one node in one round."""

    node: str
    compute: float  # seconds for the matrix multiplications
    network: float  # seconds for the exchange with its (fastest) partner
    failure: str = ""  # the reason why the task failed; empty: it passed
    bandwidth: float | None = None  # bytes a second of the exchange's payload
    latency: float | None = None  # seconds for the smallest exchange
    linked: bool = True  # False: both on one network stack, so `network` is no link's time


class GroupResult(Struct, frozen=True):
    """A group's task in one round."""

    members: tuple[Measurement, ...]

    @property
    def passed(self) -> bool:
        """True if the task passed on every member."""
        return not any(m.failure for m in self.members)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its nodes."""
        return tuple(m.node for m in self.members)


def failed(node: str, reason: str) -> Measurement:
    """Return the measurement of a task that failed or ran out of time."""
    return Measurement(node, FAILED_S, FAILED_S, failure=reason or "failed")


class Evidence:
    """The conclusions from the rounds so far; computed once, then only read.

    Args:
        nodes: all nodes, in the order of the verdicts.
        rounds: the results by round.
        gone: nodes that cannot take part any more, with reasons.
        known: best times of good nodes of an earlier check, computing and network.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        rounds: Sequence[Sequence[GroupResult]],
        gone: Mapping[str, str],
        known: tuple[Sequence[float], Sequence[float]] = ((), ()),
    ) -> None:
        self._groups: dict[str, list[GroupResult]] = {node: [] for node in nodes}
        self._good_before: dict[str, list[frozenset[str]]] = {node: [] for node in nodes}
        self.good: set[str] = set()
        for groups in rounds:
            self._take_in(groups)
        self.good -= gone.keys()
        self.passed_alone = {n for n in nodes if any(self._alone(n, passed=True))}
        self.faulty = dict(gone)
        self.likely: dict[str, str] = {}  # faulty, if there is no further round
        self._find_faulty()
        self.good |= {n for n in self.passed_alone if self._all_explained(n)}
        self.suspects = tuple(
            n for n in nodes if self._groups[n] and n not in self.good and n not in self.faulty
        )
        times = {n: [m.compute for m in self.history(n) if not m.failure] for n in nodes}
        self.compute = {node: min(own) for node, own in times.items() if own}
        self.network = {node: min(own) for node in nodes if (own := self._network_times(node))}
        compute, network = (*self.compute.values(), *known[0]), (*self.network.values(), *known[1])
        self._usual_compute = usual(compute, SLOW_FACTOR) if compute else 0.0
        self._usual_network = usual(network, SLOW_FACTOR) if network else 0.0
        slow = SLOW_FACTOR * self._usual_compute
        self._slow_compute = {node for node, time in self.compute.items() if time > slow}
        slow = SLOW_FACTOR * self._usual_network
        self._slow_network = {node for node, time in self.network.items() if time > slow}

    def _take_in(self, groups: Sequence[GroupResult]) -> None:
        """Record a round: the nodes that it proves good, and those that are suspects again."""
        before = frozenset(self.good)
        for group in groups:
            if len(group.members) > 1 and group.passed:
                self.good.update(group.names)
            elif len(group.members) > 1 and before.issuperset(group.names):
                self.good.difference_update(group.names)
            for name in group.names:
                self._groups[name].append(group)
                self._good_before[name].append(before)

    # ---- failures ------------------------------------------------------------------------

    def _alone(self, node: str, *, passed: bool) -> list[GroupResult]:
        groups = self._groups[node]
        return [g for g in groups if len(g.members) == 1 and g.passed is passed]

    def _find_faulty(self) -> None:
        for node in self._groups:
            if node in self.good or node in self.faulty:
                continue
            failures = [m.failure for m in self.history(node) if m.failure]
            why = failures[-1] if failures else "its partner lost it"
            if self._alone(node, passed=False):
                self.faulty[node] = f"failed alone: {why}"
                continue
            for group, before in zip(self._groups[node], self._good_before[node], strict=True):
                others = [name for name in group.names if name != node]
                if not group.passed and others and self.good.issuperset(others):
                    found = self.faulty if before.issuperset(others) else self.likely
                    found[node] = f"failed with {' and '.join(others)}, proved good: {why}"

    def _all_explained(self, node: str) -> bool:
        failures = [g for g in self._groups[node] if not g.passed]
        return all(self.faulty.keys() & (set(g.names) - {node}) for g in failures)

    def unexplained_partners(self, node: str) -> list[str]:
        """Return the nodes it failed with in groups of two that are not certainly faulty."""
        failures = [g.names for g in self._groups[node] if not g.passed and len(g.members) == 2]
        partners = dict.fromkeys(name for names in failures for name in names if name != node)
        return [name for name in partners if name not in self.faulty]

    # ---- partners ------------------------------------------------------------------------

    def partners_of(self, node: str, *, in_pairs: bool = False) -> set[str]:
        """Return the nodes that shared a group with it, or (`in_pairs`) a group of two."""
        groups = [g for g in self._groups[node] if not in_pairs or len(g.members) == 2]
        return {name for group in groups for name in group.names} - {node}

    def history(self, node: str) -> tuple[Measurement, ...]:
        """Return the node's measurements by round."""
        return tuple(m for g in self._groups[node] for m in g.members if m.node == node)

    # ---- times ---------------------------------------------------------------------------

    def _network_times(self, node: str) -> list[float]:
        """Return its times in groups that passed, over real links.

        Data between two names on one network stack only goes through memory: compared with that,
        every link would be slow.
        """
        return [m.network for g in self._linked(node) for m in g.members if m.node == node]

    def _linked(self, node: str) -> list[GroupResult]:
        """Return its groups that passed and whose exchange went over a link."""
        groups = [g for g in self._groups[node] if g.passed and len(g.members) > 1]
        return [g for g in groups if any(m.node == node and m.linked for m in g.members)]

    @property
    def hub(self) -> str | None:
        """The node that is in every pair whose link was timed; None if there is none."""
        groups = [set(g.names) for node in self.network for g in self._linked(node)]
        pairs = all(len(group) == 2 for group in groups)
        common = set.intersection(*groups) if groups and pairs else set()
        return min(common, default=None)

    def time(self, node: str) -> float:
        """Return the sum of its best times, for sorting; FAILED_S for a node that never passed."""
        if node not in self.good:
            return FAILED_S
        return self.compute.get(node, 0.0) + self.network.get(node, 0.0)

    def is_slow(self, node: str) -> bool:
        """Return True if either of its best times is too long."""
        return node in self._slow_compute or node in self._slow_network

    def timed_too_little(self, node: str) -> bool:
        """Return True if fewer than two measurements show that the node itself is slow.

        One measurement may be disturbed by chance, and beside a slow partner every network is slow.
        """
        passed = [group for group in self._groups[node] if group.passed]
        beside_fast = [g for g in passed if not self._slow_network.issuperset({*g.names} - {node})]
        slow = node in self._slow_network and len(beside_fast) < _MEASUREMENTS
        return slow or self.slow_alone(node)

    def slow_alone(self, node: str) -> bool:
        """Return True if it computes too slowly and was timed too little; no partner is needed."""
        passed = sum(group.passed for group in self._groups[node])
        return node in self._slow_compute and passed < _MEASUREMENTS

    def describe_slowness(self, node: str) -> str:
        """Describe how slow it is."""
        said = []
        for what, slow, own, usually in (
            ("computing", self._slow_compute, self.compute, self._usual_compute),
            ("network", self._slow_network, self.network, self._usual_network),
        ):
            if node in slow:
                times = own[node] / usually
                said.append(f"{what} takes {own[node]:.3g} s, {times:.1f} times the usual")
        return "; ".join(said)


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
