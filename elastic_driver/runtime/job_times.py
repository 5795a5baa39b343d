"""Histograms of a job's durations: steps, rounds and recoveries. Times are seconds.

The driver's thread writes them, `GET /metrics` reads them. Each driver of a run begins with empty
ones, which Prometheus takes for the restart of a counter.
"""

from elastic_driver.job.decisions import Announce
from elastic_driver.words import log_events as log
from elastic_driver.words.orders import World
from rendezvous.answers import Histogram

STEP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
CHANGE_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class JobTimes:
    """The histograms of one driver; all times are those of the driver's clock.

    A step counts once, with the time that the usual rank reported last; steps that are done again
    after a failure do not count. A round counts from `round_opened` to `round_completed`. A
    recovery counts from the loss of a member of the world to the first step that is committed in a
    later round; scripts that commit no steps have none.
    """

    def __init__(self) -> None:
        self.steps = Histogram(STEP_BOUNDS)
        self.rounds, self.recoveries = Histogram(CHANGE_BOUNDS), Histogram(CHANGE_BOUNDS)
        self._step: int | None = None  # the newest that was counted
        self._opened: float | None = None  # when the round was opened that is not complete
        self._lost: tuple[float, int] | None = None  # when, in which round; no step since then

    def announced(self, event: Announce, world: World | None, now: float) -> None:
        """Record an event of the log; `world` is the newest that was published."""
        match event.what:
            case log.RoundOpened():
                self._opened = now
            case log.RoundCompleted() if self._opened is not None:
                self.rounds.observe(now - self._opened)
                self._opened = None
            case what if what.is_loss and world is not None and self._lost is None:
                if any(member.worker == event.worker for member in world.members):
                    self._lost = now, world.round

    def stepped(self, round_id: int, now: float) -> None:
        """Record that a worker has committed its first step of a round."""
        if self._lost is not None and round_id > self._lost[1]:
            self.recoveries.observe(now - self._lost[0])
            self._lost = None

    def progressed(self, step: int, step_time: float) -> None:
        """Record that `step` steps are committed, each of the last ones in `step_time`."""
        if self._step is not None and step > self._step and step_time > 0:
            self.steps.observe(step_time, step - self._step)
        self._step = step if self._step is None else max(step, self._step)
