"""Moves micro-batches away from slow ranks (`--balance`).

The driver records, for each rank, the cost of one micro-batch and of the rest of a step (without
the time it waited), and the shares in force. The decision is new shares with a reason, or None.
Noise moves nothing: a step must become clearly shorter by the earlier half of the samples, and also
by the later half. After a move, measuring begins again. The sum of the shares never changes, so the
batch and the result of the training stay the same.

Pure. Times are seconds.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import median

from msgspec import Struct

from elastic_driver.arithmetic import usual
from elastic_driver.words.progress import Division

GAIN = 0.15  # the part by which a step has to become shorter
WINDOW = 20  # samples of each rank, in two halves (about two seconds); fewer decide nothing
_HALF = WINDOW // 2


class Move(Struct, frozen=True):
    """A decision: micro-batches of a step by rank, the rank that came last before, the reason."""

    shares: tuple[int, ...]
    last: int
    reason: str


class Cost(Struct, frozen=True):
    """The cost of one rank's step: `one_pass` for each micro-batch, and `rest` once."""

    one_pass: float
    rest: float = 0.0

    def of(self, share: int) -> float:
        """Return the time of a step with `share` micro-batches."""
        return share * self.one_pass + self.rest


def fastest_shares(virtual_workers: int, costs: Sequence[Cost]) -> list[int]:
    """Return the micro-batches of each rank that make a step shortest.

    Each rank keeps at least one: a rank without work could not show that it has recovered. Of equal
    ranks the lower ones take more, as in `allocate_microbatches`. There are at least as many
    micro-batches as ranks, and each takes some time.
    """
    shares = [1] * len(costs)
    # Each further micro-batch goes to the rank that would be done with it first (Graham's list
    # scheduling, optimal for equal jobs on machines of different speed); among several to the
    # slowest of them, so that no more is moved than helps.
    finish = [(cost.of(2), -cost.one_pass, rank) for rank, cost in enumerate(costs)]
    heapq.heapify(finish)
    for _ in range(virtual_workers - len(costs)):
        _, _, rank = finish[0]
        cost = costs[rank]
        shares[rank] += 1
        heapq.heapreplace(finish, (cost.of(shares[rank] + 1), -cost.one_pass, rank))
    return shares


def step_time(shares: Sequence[int], costs: Sequence[Cost]) -> float:
    """Return the time of a step: it ends when the last rank has done its share."""
    return max(cost.of(share) for share, cost in zip(shares, costs, strict=True))


class Balancer:
    """Decides the shares of the ranks in one round; a new round gets a new balancer.

    Args:
        hosts: the host of each rank, for the reasons.
        known: each rank's cost of a step in an earlier round, or None; the first decision uses
            these costs.
    """

    def __init__(self, hosts: Sequence[str], known: Sequence[Cost | None] = ()) -> None:
        self._hosts, self._known = hosts, known or [None for _ in hosts]
        self._divisions: list[Division | None] = [None for _ in hosts]
        self._costs: list[deque[Cost]] = [deque(maxlen=WINDOW) for _ in hosts]
        self._latest = [-1 for _ in hosts]
        self._in_force: tuple[int, ...] = ()
        self._given: tuple[int, ...] = ()

    def costs(self) -> list[Cost | None]:
        """Return each rank's cost of a step; None if too little is known."""
        measured = [_usual(costs) if len(costs) >= _HALF else None for costs in self._costs]
        return [now or before for now, before in zip(measured, self._known, strict=True)]

    def divided(self, rank: int, division: Division) -> None:
        """Record a rank's share."""
        self._divisions[rank] = division

    def measured(self, rank: int, step: int, cost: Cost) -> None:
        """Record a rank's cost of a step, without the time it waited; ignore a repeated step."""
        if step > self._latest[rank] and cost.one_pass > 0:
            self._latest[rank] = step
            self._costs[rank].append(cost)

    def decide(self) -> Move | None:
        """Return new shares if they make a step clearly shorter, else None."""
        said = [division for division in self._divisions if division is not None]
        shares = tuple(division.share for division in said)
        whole = {division.virtual_workers for division in said}
        if len(said) < len(self._hosts) or whole != {sum(shares)}:
            return None  # the ranks' reports contradict each other
        if sum(shares) <= len(shares):  # no rank has one to give away
            return None
        if shares != self._in_force:
            first, self._in_force = not self._in_force, shares
            self._measure_anew()
            known = [cost for cost in self.costs() if cost]
            if not first or not known:
                return None
            # By an earlier round's costs; a rank without one counts as usual.
            costs = [cost or _usual(known) for cost in self.costs()]
            return self._move(costs, [costs])
        if any(len(costs) < WINDOW for costs in self._costs):
            return None
        halves = [
            [_usual(islice(costs, start, start + _HALF)) for costs in self._costs]
            for start in (0, _HALF)
        ]
        return self._move([_usual(costs) for costs in self._costs], halves)

    def _measure_anew(self) -> None:
        for costs in self._costs:
            costs.clear()

    def _move(self, costs: Sequence[Cost], evidence: Sequence[Sequence[Cost]]) -> Move | None:
        """Return the best shares at these costs if all evidence confirms them."""
        now = self._in_force
        best = tuple(fastest_shares(sum(now), costs))
        least = 1 - GAIN
        better = all(step_time(best, each) < least * step_time(now, each) for each in evidence)
        if best == self._given or not better:
            return None
        self._given = best
        self._measure_anew()  # older samples belong to the older shares
        last = max(range(len(now)), key=lambda rank: costs[rank].of(now[rank]))
        passes = [cost.one_pass for cost in costs]
        return Move(
            best,
            last,
            f"rank {last} on {self._hosts[last]} came last, with {now[last]} micro-batches of "
            f"{passes[last]:.3g} s where {usual(passes, 1.5):.3g} s are usual: it trains "
            f"{best[last]} of them now, which makes a step of {step_time(now, costs):.3g} s "
            f"one of {step_time(best, costs):.3g} s",
        )


def _usual(costs: Iterable[Cost]) -> Cost:
    """Return the median costs."""
    several = list(costs)
    return Cost(median(c.one_pass for c in several), median(c.rest for c in several))
