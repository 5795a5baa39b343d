"""The subcommands that read a run's journal: `elasticctl replay` and `elasticctl explain`.

The run may be going on, or be over. Each function takes the words after its name and returns an
exit status; errors are raised.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from elastic_driver.core.decisions import Announce
from elastic_driver.errors import UsageError
from elastic_driver.runtime.journal.replay import NEWEST, Replay, Step
from elastic_driver.runtime.run_dir import JOURNAL_FILE
from launcher.ctl_commands import explain as sentences
from launcher.ctl_commands import show
from launcher.ctl_commands.find import file_of_run
from launcher.ctl_commands.running import CommandParser

_REPLAY = (
    "Replay a journal through the machines of the driver: every event, what was decided upon it "
    "and why, and the job as it was at the end."
)
_EXPLAIN = "Say in sentences what happened to a rank or to a host, and because of which event."
_APART = ("cause", "what")  # of an event of the log, in JSON


def _parser(name: str, text: str, example: str) -> CommandParser:
    return CommandParser(
        prog=f"elasticctl {name}",
        description=text,
        epilog=f"Example: elasticctl {example}",
        allow_abbrev=False,
    )


def replay_parser() -> CommandParser:
    """Return the parser of `elasticctl replay`."""
    parser = _parser("replay", _REPLAY, "replay --run-id nightly --at 120")
    parser.add_argument("journal", type=Path, nargs="?", help="the file, or the run's folder")
    parser.add_argument("--at", type=int, default=NEWEST, metavar="N", help="stop after event N")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    return _with_run(parser)


def replay(words: Sequence[str]) -> int:
    """Show the events of a journal with the decisions, and the job after the last of them."""
    given = replay_parser().parse_args(list(words))
    with contextlib.closing(Replay(_file(given))) as found:
        for step in found.steps(given.at):
            print(_json(step, found) if given.json else _text(step, found), flush=True)
        status = _document(found)
        if given.json:
            print(msgspec.json.encode({"status": status}).decode())
        else:
            document = show.read_job(msgspec.json.encode(status))
            print(f"\n{show.job(document, found.unix(found.now))}")
    return 0


def explain_parser() -> CommandParser:
    """Return the parser of `elasticctl explain`."""
    parser = _parser("explain", _EXPLAIN, "explain host n3")
    parser.add_argument("what", choices=("rank", "host"), help="whose story it is")
    parser.add_argument("name", metavar="R|H", help="the number of the rank, the name of the host")
    parser.add_argument("--journal", type=Path, help="the file, or the run's folder")
    return _with_run(parser)


def explain(words: Sequence[str]) -> int:
    """Show what happened to a rank or a host, and why."""
    given = explain_parser().parse_args(list(words))
    if given.what == "rank" and not given.name.isdecimal():
        raise UsageError(f"a rank is a number from 0, not {given.name!r}")
    with contextlib.closing(Replay(_file(given))) as found:
        steps = list(found.steps())
        if given.what == "rank":
            subject = sentences.of_rank(int(given.name), steps)
        else:
            subject = sentences.Subject(None, given.name, frozenset())
        lines = list(sentences.chain(subject, steps, found.unix))
        if not lines or (subject.host is None and not subject.workers):
            raise UsageError(f"run {found.run_id}: nothing is known of {given.what} {given.name}")
        print(f"run {found.run_id}, {given.what} {given.name}")
        print("\n".join(lines))
    return 0


def _with_run(parser: CommandParser) -> CommandParser:
    """Add the options that choose a run; return the parser."""
    which = parser.add_argument_group("which run (default: the only one running, else the newest)")
    which.add_argument("--run-id", metavar="ID", help="the job's name")
    which.add_argument("--state-dir", metavar="D", type=Path, help="the folder of all runs")
    return parser


def _file(given: Any) -> Path:
    """Return the journal to read; raises UsageError if there is none."""
    return file_of_run(given.journal, JOURNAL_FILE, "a journal", given.state_dir, given.run_id)


def _text(step: Step, found: Replay) -> str:
    when = show.clock(found.unix(step.at))
    head = f"{when} event {step.n} ({step.machine}): {sentences.of_event(step.event)}"
    return "\n".join([head, *(f"    {sentences.of_decision(d)}" for d in step.decisions)])


def _json(step: Step, found: Replay) -> str:
    facts = {"n": step.n, "t": found.unix(step.at), "machine": step.machine}
    decided = {"event": step.event, "decisions": [_published(each) for each in step.decisions]}
    return msgspec.json.encode({**facts, **decided}).decode()


def _published(decision: Any) -> Any:
    """Return a decision as it is shown as JSON: a line of the log with its fields apart."""
    if not isinstance(decision, Announce):
        return decision
    told = {"type": "announce", "event": decision.event}
    places = {name: value for name, value in asdict(decision).items() if name not in _APART}
    return {**told, **places, "detail": decision.what.facts(), "cause": decision.cause}


def _document(found: Replay) -> dict[str, Any]:
    """Return the job in the form of `GET /v1/status`; its times are those of the run."""
    head = {"run_id": found.run_id, "endpoint": str(found.path)}
    status = msgspec.to_builtins(found.job.status(found.now))
    return {**head, "started": found.unix(found.began), **status}
