"""`elasticctl report`: the story of a job that runs or is over, from its event log alone.

`read_story` reads a log; `text` and `document` show the story. Neither needs a driver.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from elastic_driver.errors import UsageError
from elastic_driver.policies.goodput import Ledger, LogLine, read_line
from elastic_driver.runtime.run_dir import EVENTS_FILE
from launcher.ctl_commands import show
from launcher.ctl_commands.figures import GoodputFigures, count
from launcher.ctl_commands.find import file_of_run
from launcher.ctl_commands.running import CommandParser

WIDTH = 60  # columns of the picture
_BLOCKS = " ▁▂▃▄▅▆▇█"
_REPORT = (
    "Tell the story of a job from its event log: duration, steps, world size over time, failures, "
    "steps that were trained again, and where the time of its worker slots went (docs/goodput.md)."
)


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

    def feed(self, line: LogLine) -> None:
        """Take in the next line of the log."""
        self.ledger.feed(line)
        self.rounds += line.event == "round_completed"
        self.resumed += line.event == "driver_resumed"
        if line.event in ("job_succeeded", "job_failed"):
            self.end = line
        size = 0 if self.end else self.ledger.workers
        if size != (self.worlds[-1].size if self.worlds else 0):
            self.worlds.append(World(line.t, size))


def report_parser() -> CommandParser:
    """Return the parser of `elasticctl report`."""
    parser = CommandParser(prog="elasticctl report", description=_REPORT, allow_abbrev=False)
    parser.add_argument("log", type=Path, nargs="?", help="the event log, or the run's folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    which = parser.add_argument_group("which run (default: the newest)")
    which.add_argument("--run-id", metavar="ID", help="the job's name")
    which.add_argument("--state-dir", metavar="D", type=Path, help="the folder of all runs")
    return parser


def report(words: Sequence[str]) -> int:
    """Print the story of a job."""
    given = report_parser().parse_args(list(words))
    path = _log_file(given)
    try:
        with path.open("rb") as lines:
            story = read_story(lines)
    except OSError as error:
        raise UsageError(f"cannot read the event log {path}: {error.strerror}") from None
    if story.ledger.began is None:
        raise UsageError(f"{path} has no events of a job; is it another file?")
    now = time.time()
    if given.json:
        print(msgspec.json.encode(document(story, path, now)).decode())
    else:
        print(text(story, path, now))
    return 0


def read_story(lines: Iterable[bytes]) -> Story:
    """Return the story of the last run in an event log."""
    story = Story()
    for line in lines:
        read = read_line(line)
        if read is None:
            continue
        if read.event == "job_started":  # the run id was used again
            story = Story()
        story.feed(read)
    return story


def document(story: Story, path: Path, now: float) -> dict[str, Any]:
    """Return the story as `--json` prints it; `now`: unix seconds, for a job that runs."""
    ledger, end = story.ledger, story.end
    state = "unfinished" if end is None else end.event.removeprefix("job_")
    return {
        "state": state,
        "exit_code": None if end is None else end.exit_code,
        "reason": "" if end is None else end.reason,
        "started": ledger.began,
        "seconds": ledger.wall(now),
        "step": ledger.step,
        "steps_redone": ledger.steps_redone,
        "failures": ledger.failures,
        "rounds": story.rounds,
        "drivers": story.resumed + 1,
        "worlds": [world._asdict() for world in story.worlds],
        "goodput": ledger.document(now),
        "log": str(path),
    }


def text(story: Story, path: Path, now: float) -> str:
    """Return the story in some lines; `now`: unix seconds, for a job that runs."""
    ledger, end = story.ledger, story.end
    wall, began = ledger.wall(now), ledger.began or now
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
    state = "not over yet" if end is None else end.event.removeprefix("job_")
    why = "" if end is None else f": {show.printable(end.reason)}"
    most = max((world.size for world in story.worlds), default=0)
    redone = f", {count(ledger.steps_redone)} of them trained again" * bool(ledger.steps_redone)
    drivers = f"; {story.resumed} times another driver went on" * bool(story.resumed)
    shares = ledger.document(now)
    figures = GoodputFigures(shares["seconds"], shares["goodput"])
    lines = [
        f"began {since}, {show.duration(wall)}, {state}{why}",
        f"{count(ledger.step)} steps{redone}; {count(ledger.failures)} workers lost, "
        f"{count(story.rounds)} rounds{drivers}",
        f"workers, 0 to {most}: {picture(story.worlds, began, began + wall)}",
        *show.goodput(figures),
        f"{shares['slots']:.4g} slots on average; events: {path}",
    ]
    return "\n".join(lines)


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


def _log_file(given: Any) -> Path:
    """Return the log to read; raises UsageError if there is none."""
    return file_of_run(given.log, EVENTS_FILE, "events", given.state_dir, given.run_id)
