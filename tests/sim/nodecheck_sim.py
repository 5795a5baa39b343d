"""How well the node check judges clusters whose faults are known.

Each seed is a cluster with faulty and slow nodes, noisy clocks, passing slowness and a few
failures that are nobody's fault. Our check and the plain two-round rule judge the same cluster;
`python -m tests.sim.nodecheck_sim` prints precision, recall and F1 over all bad nodes, and the
rounds used.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median

from elastic_driver.features.checks.evidence import Group, Measurement, NodeCheck, Verdict, failed

NOISE = 0.08  # standard deviation of the logarithm of a time
PASSING_SLOWNESS = 0.01  # a healthy node is slow in one round, by another job or a page cache
PASSING_FAILURE = 0.005  # a group fails though its members are healthy
SIZES = (2, 3, 4, 6, 16, 64, 256, 1000)
RATES = (0.0, 0.05, 0.1, 0.2)

Judged = tuple[set[str], set[str], int]  # faulty, stragglers, rounds


@dataclass
class SimulatedCluster:
    """Nodes of which a share is bad: half of those faulty, the others slow (one way or both)."""

    size: int
    rate: float
    seed: int
    faulty: set[str] = field(default_factory=set)
    compute: dict[str, float] = field(default_factory=dict)
    network: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = Random(f"{self.seed}/{self.size}/{self.rate}")
        self.nodes = [f"n{i}" for i in range(self.size)]
        for node in self.nodes:
            if self.random.random() >= self.rate:
                continue
            slowness = self.random.uniform(2.6, 8.0)
            match self.random.choice(["faulty", "faulty", "faulty", "compute", "network", "both"]):
                case "faulty":
                    self.faulty.add(node)
                case "compute":
                    self.compute[node] = slowness
                case "network":
                    self.network[node] = slowness
                case _:
                    self.compute[node] = self.network[node] = slowness

    @property
    def slow(self) -> set[str]:
        """The nodes that are slow for good."""
        return set(self.compute) | set(self.network)

    @property
    def untellable(self) -> set[str]:
        """Slow nodes beside which nothing is fast, so that no measurement tells them apart.

        Computing shows beside one node that computes fast. A link has two ends: it takes two
        nodes with fast ones to show that the third's is slow.
        """
        sound = [node for node in self.nodes if node not in self.faulty]
        computing = any(node not in self.compute for node in sound)
        links = sum(node not in self.network for node in sound) > 1
        told = set(self.compute if computing else ()) | set(self.network if links else ())
        return self.slow - told

    def run(self, groups: Iterable[Group]) -> list[Measurement]:
        """One round of tasks."""
        return [m for group in groups for m in self._task(group)]

    def _task(self, group: Group) -> list[Measurement]:
        broken = bool(self.faulty & set(group))
        if broken or (len(group) > 1 and self.random.random() < PASSING_FAILURE):
            return [failed(node, "the task failed") for node in group]
        busy = {n: self._passing() for n in group}
        links = {
            (a, b): max(self.network.get(a, 1.0) * busy[a], self.network.get(b, 1.0) * busy[b])
            * self._noise()
            for a in group
            for b in group
            if a < b
        }
        return [
            Measurement(
                node,
                self.compute.get(node, 1.0) * busy[node] * self._noise(),
                min((seconds for pair, seconds in links.items() if node in pair), default=0.0),
            )
            for node in group
        ]

    def _passing(self) -> float:
        slow = self.random.random() < PASSING_SLOWNESS
        return self.random.uniform(2.0, 5.0) if slow else 1.0

    def _noise(self) -> float:
        return self.random.lognormvariate(0.0, NOISE)


def our_check(cluster: SimulatedCluster) -> Judged:
    """The check of this project."""
    check = NodeCheck(cluster.nodes)
    while groups := check.plan():
        check.report(cluster.run(groups))
    verdicts = check.verdicts()
    return (
        {v.node for v in verdicts if v.verdict is Verdict.FAULTY},
        {v.node for v in verdicts if v.verdict is Verdict.STRAGGLER},
        len(check.rounds),
    )


def two_round_rule(cluster: SimulatedCluster) -> Judged:
    """The plain rule: neighbours, then fastest with slowest; faulty is who failed twice.

    Straggler: the better of two total times is above twice the median of all.
    """
    first = _round(cluster, NodeCheck(cluster.nodes).plan())
    ordered = sorted(cluster.nodes, key=lambda n: first[n].compute + first[n].network)
    groups = [
        (ordered[i], ordered[-1 - i]) if i != len(ordered) - 1 - i else (ordered[i],)
        for i in range((len(ordered) + 1) // 2)
    ]
    if not any(m.failure for m in first.values()):
        usual = median(m.compute + m.network for m in first.values())
        if all(m.compute + m.network <= 2 * usual for m in first.values()):
            return set(), set(), 1
    second = _round(cluster, groups)
    faulty = {n for n in cluster.nodes if first[n].failure and second[n].failure}
    best = {
        n: min(m.compute + m.network for m in (first[n], second[n]))
        for n in cluster.nodes
        if n not in faulty
    }
    if not best:
        return faulty, set(), 2
    usual = median(best.values())
    return faulty, {n for n, seconds in best.items() if seconds > 2 * usual}, 2


def _round(cluster: SimulatedCluster, groups: Sequence[Group]) -> dict[str, Measurement]:
    return {m.node: m for m in cluster.run(groups)}


@dataclass
class Score:
    """Right and wrong verdicts, counted over clusters."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, cluster: SimulatedCluster, judged: Judged, *, tellable: bool = False) -> None:
        """Count one cluster; a bad node under the wrong name is a miss and a false alarm.

        With `tellable`, the nodes that no rule could name are left out.
        """
        left_out = cluster.untellable if tellable else set()
        faulty, slow, rounds = judged[0] - left_out, judged[1] - left_out, judged[2]
        right = len(faulty & cluster.faulty) + len(slow & cluster.slow)
        self.counts["right"] += right
        self.counts["called"] += len(faulty) + len(slow)
        self.counts["bad"] += len(cluster.faulty) + len(cluster.slow - left_out)
        self.counts["healthy faulty"] += len(faulty - cluster.faulty - cluster.slow)
        self.counts["rounds"] += rounds
        self.counts["clusters"] += 1

    @property
    def precision(self) -> float:
        """The share of the named that are bad (1 where nobody is named)."""
        return self._share("right", "called")

    @property
    def recall(self) -> float:
        """The share of the bad that are named (1 where there are none)."""
        return self._share("right", "bad")

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both else 0.0

    @property
    def rounds(self) -> float:
        """Rounds a cluster took, in the mean."""
        return self._share("rounds", "clusters")

    def _share(self, part: str, whole: str) -> float:
        return self.counts[part] / self.counts[whole] if self.counts[whole] else 1.0


def play(
    judge: Callable[[SimulatedCluster], Judged],
    size: int,
    rate: float,
    seeds: Iterable[int],
    *,
    tellable: bool = False,
) -> Score:
    """The score of a rule over clusters of one size and rate of bad nodes."""
    score = Score()
    for seed in seeds:
        cluster = SimulatedCluster(size, rate, seed)
        score.add(cluster, judge(cluster), tellable=tellable)
    return score


def seeds_for(size: int, nodes: int) -> range:
    """As many clusters as make up about `nodes` nodes."""
    return range(max(3, nodes // size))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim.nodecheck_sim", description="Compare node checks by simulation."
    )
    parser.add_argument("--nodes", type=int, default=6000, help="nodes simulated for each line")
    nodes = parser.parse_args().nodes
    print(f"{'':>5} {'':>5}   {'this check':^35}   {'two-round rule':^35}")
    head = f"{'prec':>6} {'recall':>6} {'F1':>6} {'rounds':>6} {'blamed':>7}"
    print(f"{'nodes':>5} {'bad':>5}   {head}   {head}")
    for size in SIZES:
        for rate in RATES:
            line = f"{size:>5} {rate:>5.0%}"
            for judge in (our_check, two_round_rule):
                score = play(judge, size, rate, seeds_for(size, nodes))
                blamed = score.counts["healthy faulty"]
                shares = (score.precision, score.recall, score.f1)
                shown = [f"{x:6.3f}" if score.counts["bad"] else f"{'–':>6}" for x in shares]
                line += f"   {' '.join(shown)} {score.rounds:6.2f} {blamed:7d}"
            print(line, flush=True)
    print("bad: chance of a node to be faulty or slow; blamed: healthy nodes called faulty")


if __name__ == "__main__":
    main()
