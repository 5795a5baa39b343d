"""`elasticctl report`: the story of a job that runs or is over, from its event log alone.

`text` and `document` show the story (`features/goodput/story.py`). Neither needs a driver.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from elastic_driver import contract
from elastic_driver.errors import ElasticError, UsageError
from elastic_driver.features import chapters
from elastic_driver.features.goodput.story import Story, picture, read_story
from elastic_driver.runtime.results import read_result
from elastic_driver.runtime.run_dir import EVENTS_FILE
from elastic_driver.runtime.status_document import GoodputStatus
from elastic_driver.words import counted
from launcher.ctl_commands import job_text
from launcher.ctl_commands.find import PROBE_S, Where, file_of_run, find
from launcher.ctl_commands.running import CommandParser
from launcher.readable import count, duration
from rendezvous.errors import RendezvousError

_REPORT = (
    "Tell the story of a job from its event log: duration, steps, world size over time, failures, "
    "steps that were trained again, and where the time of its worker slots went (docs/goodput.md)."
)


class _Now(msgspec.Struct):
    step: int | None = None


def report_parser() -> CommandParser:
    """Return the parser of `elasticctl report`."""
    example = "Example: elasticctl report --run-id nightly --html -o nightly.html"
    parser = CommandParser(
        prog="elasticctl report", description=_REPORT, epilog=example, allow_abbrev=False
    )
    parser.add_argument("log", type=Path, nargs="?", help="the event log, or the run's folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", action="store_true", help="write a page that needs no driver")
    file_help = "the page's file (default: RUN.html here)"
    parser.add_argument("-o", "--output", metavar="F", type=Path, help=file_help)
    which = parser.add_argument_group("which run (default: the only one running, else the newest)")
    which.add_argument("--run-id", metavar="ID", help="the job's name")
    which.add_argument("--state-dir", metavar="D", type=Path, help="the folder of all runs")
    return parser


def report(words: Sequence[str]) -> int:
    """Print the story of a job."""
    given = report_parser().parse_args(list(words))
    path = file_of_run(given.log, EVENTS_FILE, "events", given.state_dir, given.run_id)
    try:
        with path.open("rb") as lines:
            story = read_story(lines)
    except FileNotFoundError:
        raise UsageError(f"there is no event log {path}; is it in another --state-dir?") from None
    except OSError as error:
        raise UsageError(f"cannot read the event log {path}: {error.strerror}") from None
    if story.ledger.began is None:
        raise UsageError(f"{path} has no events of a job; is it another file?")
    now = time.time()
    why = ""
    if story.end is None:  # the log has the step of the last change
        step, why = _step_now(path.parent)
        story.ledger.step = max(story.ledger.step, step or 0)
    if given.html:
        name = path.absolute().parent.name if path.name == EVENTS_FILE else path.stem
        into = given.output or Path(f"{name}.html")
        pages = chapters("html")  # imports aiohttp
        if not pages:
            raise UsageError("the page is not installed; leave out --html")
        pages[0].write(into, name, path, document(story, path, now))
        print(into)
    elif given.json:
        print(msgspec.json.encode(document(story, path, now)).decode())
    else:
        print(text(story, path, now, silent=why))
    return 0


def _step_now(run: Path) -> tuple[int | None, str]:
    """Return the step that a job has come to, from its driver, or why that does not answer."""
    try:
        job = find(Where(run.parent.absolute(), run.absolute().name))
        with job.client(PROBE_S) as client:
            now = msgspec.json.decode(client.get_bytes(contract.STATUS_PATH), type=_Now)
            return now.step, ""
    except (ElasticError, RendezvousError) as error:
        return None, str(error).partition("; how it went")[0]


def document(story: Story, path: Path, now: float) -> dict[str, Any]:
    """Return the story as `--json` prints it; `now`: unix seconds, for a job that runs."""
    ledger, end = story.ledger, story.end
    state = "unfinished" if end is None else end.event.removeprefix("job_")
    return {
        "state": state,
        "exit_code": story.exit_code,
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


def text(story: Story, path: Path, now: float, silent: str = "") -> str:
    """Return the story in some lines; `now`: unix seconds, for a job that runs.

    `silent`: why the driver of a job that has no end in the log does not answer.
    """
    ledger, end = story.ledger, story.end
    wall = ledger.wall(now)
    began = ledger.began or now
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
    state = f"no end in the log: {job_text.printable(silent)}" if silent else "not over yet"
    if end is not None:
        result = read_result(path)
        state = job_text.how_it_ended(story.exit_code, None if result is None else result.failure)
    why = "" if end is None else f": {job_text.printable(end.reason)}"
    most = max((world.size for world in story.worlds), default=0)
    redone = f", {count(ledger.steps_redone)} of them trained again" * bool(ledger.steps_redone)
    drivers = f"; another driver went on {counted(story.resumed, 'time')}" * bool(story.resumed)
    shares = ledger.document(now)
    figures = GoodputStatus(shares["seconds"], shares["goodput"])
    drawn = f"workers, 0 to {most}: {picture(story.worlds, began, began + wall)}"
    steps = f"{'at least ' * bool(silent)}{counted(ledger.step, 'step')}"
    failures = counted(ledger.failures, "worker failure")
    lines = [
        f"began {since}, {duration(wall)}, {state}{why}",
        f"{steps}{redone}; {failures}, {counted(story.rounds, 'round')}{drivers}",
        *([drawn] if most else []),
        *job_text.goodput(figures),
        f"slots on average: {shares['slots']:.4g}; events: {path}",
    ]
    return "\n".join(lines)
