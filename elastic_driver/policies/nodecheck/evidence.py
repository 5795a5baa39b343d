"""The conclusions from a node check's rounds so far: good, faulty and slow nodes.

`check` builds an `Evidence` from all rounds and decides from it what runs next. Times are seconds.

The rules. A node is *proved good* when a task it shared with another node has passed. It is
*faulty* when it failed alone, or beside a node proved good in an earlier round. A partner that
proves good only later makes it *likely* faulty: it is tried once more, because the first failure
may have been an accident. A failure beside a node that is faulty is *explained* and says nothing.
Where two nodes proved good fail together, one of them has changed since: both are suspects again.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from elastic_driver.policies.slow_ranks import usual

FAILED_S = 3600.0  # what a task that failed or ran out of time counts as
_MEASUREMENTS = 2  # that have to agree before a node is called slow


class Measurement(Struct, frozen=True):
    """The measurement of one node in one round."""

    node: str
    compute: float  # seconds for the matrix multiplications
    network: float  # seconds for the exchange with its (fastest) partner
    failure: str = ""  # why the task failed; empty: it passed
    bandwidth: float | None = None  # bytes a second of the exchange's payload
    latency: float | None = None  # seconds for the smallest exchange
    linked: bool = True  # False: both on one network stack, so `network` is no link's time


class UsualTimes(Struct, frozen=True):
    """Best times of good nodes of an earlier check."""

    compute: tuple[float, ...] = ()
    network: tuple[float, ...] = ()


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


def _proved_good(rounds: Sequence[Sequence[GroupResult]]) -> list[set[str]]:
    """Return the nodes proved good before each round, and after the last one."""
    stages: list[set[str]] = [set()]
    for groups in rounds:
        before = stages[-1]
        good = set(before)
        stages.append(good)
        for group in groups:
            if len(group.members) < 2:
                continue
            if group.passed:
                good.update(group.names)
            elif before.issuperset(group.names):
                good.difference_update(group.names)
    return stages


class Evidence:
    """The conclusions from the rounds so far; computed once, then only read."""

    def __init__(
        self,
        nodes: Sequence[str],
        rounds: Sequence[Sequence[GroupResult]],
        factor: float,
        gone: Mapping[str, str],
        known: UsualTimes = UsualTimes(),
    ) -> None:
        self._factor = factor
        self._groups: dict[str, list[GroupResult]] = {node: [] for node in nodes}
        self._good_before: dict[str, list[set[str]]] = {node: [] for node in nodes}
        *stages, self.good = _proved_good(rounds)
        for groups, stage in zip(rounds, stages, strict=True):
            for group in groups:
                for name in group.names:
                    self._groups[name].append(group)
                    self._good_before[name].append(stage)
        self.passed_alone = {n for n in nodes if any(self._alone(n, passed=True))}
        self.likely: dict[str, str] = {}  # faulty, if there is no further round
        self.good -= gone.keys()
        self.faulty = dict(gone)
        self._find_faulty()
        self.good |= {n for n in self.passed_alone if self._all_explained(n)}
        self.suspects = tuple(
            n for n in nodes if self._groups[n] and n not in self.good and n not in self.faulty
        )
        times = {n: [m.compute for m in self.history(n) if not m.failure] for n in nodes}
        self.compute = {node: min(own) for node, own in times.items() if own}
        self.network = {node: min(own) for node in nodes if (own := self._network_times(node))}
        compute = (*self.compute.values(), *known.compute)
        network = (*self.network.values(), *known.network)
        self._usual_compute = usual(compute, factor) if compute else 0.0
        self._usual_network = usual(network, factor) if network else 0.0

    # ---- failures ------------------------------------------------------------------------

    def _alone(self, node: str, *, passed: bool) -> list[GroupResult]:
        groups = self._groups[node]
        return [g for g in groups if len(g.members) == 1 and g.passed is passed]

    def _find_faulty(self) -> None:
        for node in self._groups:
            if node in self.good or node in self.faulty:
                continue
            if self._alone(node, passed=False):
                self.faulty[node] = f"failed alone: {self._why(node)}"
                continue
            for group, before in zip(self._groups[node], self._good_before[node], strict=True):
                others = [name for name in group.names if name != node]
                if group.passed or not others or not self.good.issuperset(others):
                    continue
                beside = " and ".join(others)
                reason = f"failed with {beside}, proved good: {self._why(node)}"
                found = self.faulty if before.issuperset(others) else self.likely
                found[node] = reason

    def _all_explained(self, node: str) -> bool:
        failures = [g for g in self._groups[node] if not g.passed]
        return all(self.faulty.keys() & (set(g.names) - {node}) for g in failures)

    def _why(self, node: str) -> str:
        own = [m.failure for m in self.history(node) if m.failure]
        return own[-1] if own else "its partner lost it"

    def unexplained_partners(self, node: str) -> list[str]:
        """Return the partners it failed with that are not certainly faulty."""
        partners: dict[str, None] = {}
        for group in self._groups[node]:
            others = [name for name in group.names if name != node]
            if not group.passed and len(others) == 1 and others[0] not in self.faulty:
                partners[others[0]] = None
        return list(partners)

    # ---- partners ------------------------------------------------------------------------

    def partners_of(self, node: str) -> set[str]:
        """Return the nodes that shared a group with it."""
        return {name for group in self._groups[node] for name in group.names} - {node}

    def pairs_of(self, node: str) -> set[str]:
        """Return the nodes that shared a group of two with it."""
        pairs = [group.names for group in self._groups[node] if len(group.members) == 2]
        return {name for pair in pairs for name in pair} - {node}

    def history(self, node: str) -> tuple[Measurement, ...]:
        """Return the node's measurements by round."""
        return tuple(m for g in self._groups[node] for m in g.members if m.node == node)

    # ---- times ---------------------------------------------------------------------------

    def _network_times(self, node: str) -> list[float]:
        """Return its times in groups that passed, over real links.

        The time between two names on one network stack is that of memory: compared with it every
        link would be slow.
        """
        groups = [g for g in self._groups[node] if g.passed and len(g.members) > 1]
        return [m.network for g in groups for m in g.members if m.node == node and m.linked]

    def time(self, node: str) -> float:
        """Return the sum of its best times, for sorting; FAILED_S for a node that never passed."""
        if node not in self.good:
            return FAILED_S
        return self.compute.get(node, 0.0) + self.network.get(node, 0.0)

    def slow_compute(self, node: str) -> bool:
        """Return True if it computes too slowly."""
        return self.compute.get(node, 0.0) > self._factor * self._usual_compute

    def slow_network(self, node: str) -> bool:
        """Return True if its exchanges take too long."""
        return self.network.get(node, 0.0) > self._factor * self._usual_network

    def is_slow(self, node: str) -> bool:
        """Return True if either of its best times is too long."""
        return self.slow_compute(node) or self.slow_network(node)

    def to_time_again(self) -> tuple[str, ...]:
        """Return the good nodes that are `timed_too_little`."""
        return tuple(n for n in self._groups if n in self.good and self.timed_too_little(n))

    def timed_too_little(self, node: str) -> bool:
        """Return True if fewer than two measurements show that the node itself is slow.

        One may have been disturbed by chance, and beside a slow partner every network is slow.
        """
        passed = [g for g in self._groups[node] if g.passed]
        if self.slow_compute(node) and len(passed) < _MEASUREMENTS:
            return True
        beside_fast = [
            g for g in passed if any(n != node and not self.slow_network(n) for n in g.names)
        ]
        return self.slow_network(node) and len(beside_fast) < _MEASUREMENTS

    def slow_alone(self, node: str) -> bool:
        """Return True if it computes too slowly and was timed too little; no partner is needed."""
        passed = [g for g in self._groups[node] if g.passed]
        return self.slow_compute(node) and len(passed) < _MEASUREMENTS

    def describe_slowness(self, node: str) -> str:
        """Describe how slow it is."""
        said = []
        for what, slow, own, usually in (
            ("computing", self.slow_compute(node), self.compute, self._usual_compute),
            ("network", self.slow_network(node), self.network, self._usual_network),
        ):
            if slow:
                times = own[node] / usually
                said.append(f"{what} takes {own[node]:.3g} s, {times:.1f} times the usual")
        return "; ".join(said)
