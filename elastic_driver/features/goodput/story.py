"""The story of a job, as its event log tells it: its ledger, its worlds over time, its end. Pure.

`elasticctl report` reads it from a log, and a driver tells the end of it to the user. Times are
unix seconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic_driver.features.goodput.ledger import Ledger
from elastic_driver.words import log_events as log
from elastic_driver.words.log_lines import LogLine, read_line

WIDTH = 60  # columns of the picture
MOST_WORLDS = 10_000  # beyond that, every other one is left out
_BLOCKS = " ▁▂▃▄▅▆▇█"


class World(NamedTuple):
    """From `t` on (unix seconds), the world had so many workers."""

    t: float
    size: int


@dataclass
class Story:
    """A job, as its event log tells it."""

    ledger: Ledger = field(default_factory=Ledger)
    worlds: list[World] = field(default_factory=list)
    rounds: int = 0
    resumed: int = 0  # how often another driver went on
    end: LogLine | None = None  # of the job; None: it runs, or its driver has died
    _counted: int | None = None  # the newest round in `rounds`

    @property
    def exit_code(self) -> int | None:
        """The exit status of a job that is over."""
        what = None if self.end is None else self.end.what
        return what.exit_code if isinstance(what, log.JobEnd) else None

    def feed(self, line: LogLine) -> None:
        """Take in the next line of the log."""
        started = self.ledger.processes
        self.ledger.feed(line)
        if isinstance(line.what, log.ProcessesStarted | log.RoundCompleted):
            self.rounds += line.round is None or line.round != self._counted
            self._counted = line.round
        self.resumed += isinstance(line.what, log.DriverResumed)
        if isinstance(line.what, log.JobEnd):
            self.end = line
        size, since = 0 if self.end else self.ledger.workers, self.ledger.running_since
        plain = not (self.ledger.elastic or self.ledger.processes)
        if started and plain and since is not None:  # that it is a plain script shows now
            self._world(max(since, self._latest), started)
        self._world(line.t, size)

    def _world(self, t: float, size: int) -> None:
        if size != (self.worlds[-1].size if self.worlds else 0):
            self.worlds.append(World(t, size))
            if len(self.worlds) > MOST_WORLDS:
                del self.worlds[1:-1:2]

    @property
    def _latest(self) -> float:
        return self.worlds[-1].t if self.worlds else 0.0


def read_story(lines: Iterable[bytes]) -> Story:
    """Return the story of the last run in an event log."""
    story = Story()
    for line in lines:
        read = read_line(line)
        if read is None:
            continue
        if isinstance(read.what, log.JobStarted):  # the run id was used again
            story = Story()
        story.feed(read)
    return story


def picture(worlds: Sequence[World], began: float, ended: float, width: int = WIDTH) -> str:
    """Return the size of the world over time, one block for each of `width` equal parts.

    A part shows the mean of its time; only one without any worker is empty.
    """
    most = max((world.size for world in worlds), default=0)
    if not most or ended <= began:
        return ""
    part = (ended - began) / width
    sums = [0.0] * width
    for world, until in zip(worlds, [*(w.t for w in worlds[1:]), ended], strict=True):
        first = min(width - 1, max(0, int((world.t - began) / part)))
        last = min(width - 1, max(0, int((until - began) / part)))
        for n in range(first, last + 1):
            begin, end = began + n * part, began + (n + 1) * part
            sums[n] += world.size * max(0.0, min(until, end) - max(world.t, begin))
    return "".join(_block(total / part / most) for total in sums)


def _block(share: float) -> str:
    return _BLOCKS[max(1, round(share * 8))] if share > 0 else _BLOCKS[0]
