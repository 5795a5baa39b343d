"""The machine that finds hosts with more workers than processors (`--auto-scale`, `--brain`).

All ranks wait for the slowest one in each step. If the workers of a host wait for its processors,
and so compute longer than those of other hosts, one worker fewer there may make the job faster. It
takes one worker at a time, and each time looks again for as long. Pure. Times are seconds.
"""

from statistics import median

from elastic_driver.features.sizes.messages import HostLoad, LoadsSeen, PriorFound, SpeedSeen
from elastic_driver.job.decisions import Announce
from elastic_driver.job.events import HostStarved, Tick
from elastic_driver.kernel.machine import Declaration
from elastic_driver.kernel.services import SendEvent

LASTS_S = 30.0  # for so long a host is starved before it loses a worker
BUSY = 0.9  # of its processors, at least
WAITED = 0.4  # of the time, in which a process waited for a processor, at least
SLOWER = 1.2  # times as long as those of the other hosts, at least


class Starvation:
    """Watches the load of the hosts of one job."""

    def __init__(self) -> None:
        self._round = 0
        self._since: dict[str, float] = {}  # hosts that are starved

    def handle(self, event: LoadsSeen | Tick, now: float) -> list[SendEvent]:
        """Take in the load of the hosts; take a worker from one that is starved for long."""
        if not isinstance(event, LoadsSeen):
            return []
        if event.held or event.round != self._round:
            self._round, self._since = event.round, {}
        ratios = {} if event.held else _starved(event.hosts)
        self._since = {host: self._since.get(host, now) for host in ratios}
        late = [host for host, since in self._since.items() if now - since >= LASTS_S]
        if not late:
            return []
        worst = max(late, key=ratios.__getitem__)
        load = next(load for load in event.hosts if load.host == worst)
        self._since = {}
        busy = f"its processors were {load.cpu:.0%} busy for {LASTS_S:g} s"
        reason = f"{busy}, and its workers compute {ratios[worst]:.1f} times as long as others"
        return [SendEvent(HostStarved(worst, load.workers - 1, reason), reason)]

    def deadline(self) -> float | None:
        """See `Machine.deadline`: this machine only acts when it is told of loads."""
        return None

    def check(self) -> list[str]:
        """See `Machine.check`."""
        return []


def _starved(hosts: tuple[HostLoad, ...]) -> dict[str, float]:
    """Return the hosts whose workers wait for processors, and how much longer they compute."""
    found = {}
    for load in hosts:
        others = [each.compute for each in hosts if each.host != load.host]
        waits = load.pressure is None or load.pressure >= WAITED
        if load.workers < 2 or load.cpu < BUSY or not waits or not others:
            continue
        usual = median(others)
        if usual > 0 and load.compute >= SLOWER * usual:
            found[load.host] = load.compute / usual
    return found


MACHINES = (
    # `autoscaler.AutoScaler`, whose module loads SciPy: most jobs do without.
    Declaration(
        name="scaling",
        events=SpeedSeen | PriorFound | Tick,
        decisions=SendEvent | Announce,
    ),
    Declaration(name="starvation", events=LoadsSeen | Tick, decisions=SendEvent),
)
