"""What the reports of one job say about its speed: step times by size, and the cost of a change.

A size counts as for `--auto-scale` (`policies.scaling.gauge`): after a warm-up, with 20 steps or
more, and an error of 3 %. Pure. Times are seconds.
"""

from dataclasses import dataclass, field
from statistics import fmean

from elastic_driver.brain.algorithm import SpeedAt
from elastic_driver.brain.documents import Speed
from elastic_driver.features.sizes.gauge import Gauge

COSTS_KEPT = 8  # of the newest changes
GAP_S = 3.0  # between two reports, around a change whose cost is measured


@dataclass
class Speeds:
    """The speeds of one job. `found`: the step time of this round, once it is known; 0: not yet."""

    at: dict[tuple[int, int], SpeedAt] = field(default_factory=dict)  # by size and hosts
    costs: list[float] = field(default_factory=list)  # seconds lost by each change of the size
    found: float = 0.0
    gauge: Gauge = field(default_factory=Gauge)
    last: Speed | None = None
    mean: float = 0.0  # of the steps until `last`

    @property
    def change_cost(self) -> float:
        """The seconds that a change of the size costs; 0: none was measured."""
        return fmean(self.costs) if self.costs else 0.0

    def take(self, speed: Speed) -> str:
        """Take in how far the job is; return why a plan is needed ("": it is not)."""
        if speed.steps < 0:
            return ""
        if self.last is None or speed.round != self.last.round:
            self._enter(speed)
        self.gauge.take(speed.steps, speed.at)
        self.last, self.mean = speed, self.gauge.mean
        if self.found:
            return self._watch(speed)
        if not self.gauge.is_known():
            return ""
        self._note(speed)
        return "size measured"

    def _enter(self, speed: Speed) -> None:
        """Begin to measure a new round; note what the change cost."""
        last = self.last
        if last is not None and self.mean and last.worker == speed.worker:
            lost = speed.at - last.at - (speed.steps - last.steps) * self.mean
            # After a longer gap the steps between are partly those of the new size.
            if last.size != speed.size and speed.at - last.at <= max(GAP_S, 3 * self.mean):
                self.costs = [*self.costs, max(0.0, lost)][-COSTS_KEPT:]
        self.gauge, self.found = Gauge(), 0.0

    def _watch(self, speed: Speed) -> str:
        """Look whether the step time has changed since it was measured."""
        if not self.gauge.has_drifted(self.found):
            return ""
        self.at.clear()  # the other sizes are not what they were, either
        self._note(speed)
        return "slowdown"

    def _note(self, speed: Speed) -> None:
        self.found = self.gauge.mean
        self.at[speed.size, speed.hosts] = SpeedAt(
            size=speed.size, hosts=speed.hosts, step_time=self.found, error=self.gauge.error
        )
