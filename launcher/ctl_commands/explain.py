"""The subcommands that read a run's journal: `elasticctl replay` and `elasticctl explain`.

The run may be going on, or be over. The first part is pure: it says in sentences what events and
decisions mean, and what followed from them for a rank or a host. Each subcommand takes the words
after its name and returns an exit status; errors are raised.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import asdict

from elastic_driver.contract import host_of_worker
from elastic_driver.errors import UsageError
from elastic_driver.job import decisions as do
from elastic_driver.job import events as seen
from elastic_driver.job.decisions import Announce
from elastic_driver.job.events import EventBatch
from elastic_driver.job.hangs import name_ranks
from elastic_driver.kernel.machine import InWords
from elastic_driver.runtime.journal.replay import NEWEST, Replay, Step
from elastic_driver.runtime.run_dir import JOURNAL_FILE
from elastic_driver.words import wire_events as ev
from elastic_driver.words.orders import StartWorkerOrder, StopWorkerOrder, World
from launcher.ctl_commands import job_text
from launcher.ctl_commands.find import file_of_run
from launcher.ctl_commands.job_text import clock, printable
from launcher.ctl_commands.running import CommandParser

# ---- sentences ----------------------------------------------------------------------------


MAX_CHARS = 300  # of a sentence
_JOB = "job"  # the machine that all events of workers and agents are for
# Orders, and the events that may follow from them.
_ORDERS = (do.StartAgent, do.StopAgent, do.KillAgent, StartWorkerOrder, StopWorkerOrder)
_FOLLOWS = (ev.AgentReady, seen.AgentLost, ev.WorkerStarted, ev.WorkerExited)


class Subject(NamedTuple):
    """A rank, or a host, with the workers that ever were this rank."""

    rank: int | None
    host: str | None
    workers: frozenset[str]

    def concerns(self, thing: Any) -> bool:
        """Return whether an event, a decision or an order is about the subject."""
        worker = getattr(thing, "worker", None)
        if isinstance(thing, do.EndJob | do.PublishNotice):
            return True
        if isinstance(thing, do.PublishWorld):
            return self.place(thing.world) != ""
        owner = str(worker or getattr(thing, "owner", ""))
        if self.host is None:
            return owner in self.workers
        is_agent = getattr(thing, "kind", "") == "agent"  # of a lease
        there = owner.rpartition(".")[0] if is_agent else host_of_worker(owner)
        return self.host in (getattr(thing, "host", None), there)

    def place(self, world: World) -> str:
        """Return the subject's place in a round, in words; empty: it has none."""
        if self.rank is not None:
            there = world.members[self.rank] if self.rank < world.size else None
            return f"rank {self.rank} is {there.worker}" if there is not None else ""
        ranks = [m.place.rank for m in world.members if m.place.host == self.host]
        return f"{name_ranks(ranks)} on {self.host}" if ranks else ""


def of_rank(rank: int, steps: Iterable[Step]) -> Subject:
    """Return a rank with every worker that was this rank in one of the rounds."""
    worlds = (d.world for step in steps for d in step.decisions if isinstance(d, do.PublishWorld))
    found = frozenset(world.members[rank].worker for world in worlds if rank < world.size)
    return Subject(rank, None, found)


def chain(subject: Subject, steps: Sequence[Step], unix: Callable[[float], float]) -> Iterator[str]:
    """Yield a paragraph for each event that concerned the subject, with what followed.

    `unix` turns machine times into unix seconds.
    """
    ordered: dict[
        tuple[Any, ...], int
    ] = {}  # the last order to a worker or an agent, and its event
    for step in steps:
        events = step.event.events if isinstance(step.event, EventBatch) else (step.event,)
        about = [event for event in events if subject.concerns(event)]
        followed = [d for d in step.decisions if subject.concerns(getattr(d, "order", d))]
        # Other machines hear of the job's events, too; they are told where something follows.
        if followed or (about and step.machine == _JOB):
            first = about[0] if about else events[0]
            cause = ordered.get(_addressee(first)) if isinstance(first, _FOLLOWS) else None
            after = "" if cause is None else f" (after event {cause})"
            yield f"{clock(unix(step.at))} event {step.n}: {of_event(first)}{after}"
            yield from (f"    {_with_place(subject, decision)}" for decision in followed)
        for decision in step.decisions:
            given = getattr(decision, "order", decision)
            if isinstance(given, _ORDERS):
                ordered[_addressee(given)] = step.n


def _addressee(thing: Any) -> tuple[Any, ...]:
    """Return the worker or the agent that an order or an event is about."""
    worker = getattr(thing, "worker", None)
    return (thing.host, thing.incarnation) if worker is None else (worker,)


def _with_place(subject: Subject, decision: Any) -> str:
    said = of_decision(decision)
    if isinstance(decision, do.PublishWorld):
        return f"{said}; {subject.place(decision.world)}"
    return said


def of_event(event: Any) -> str:
    """Return a sentence that says what has happened."""
    if isinstance(event, EventBatch):
        more = f" and {len(event.events) - 1} more" if len(event.events) > 1 else ""
        return f"{of_event(event.events[0])}{more}"
    return _said(event)


def of_decision(decision: Any) -> str:
    """Return a sentence that says what was decided, with the reason."""
    return _said(decision)


def _said(thing: Any) -> str:
    words = thing.in_words() if isinstance(thing, InWords) else ""
    return _short(words or _facts(thing))


def _facts(thing: Any) -> str:
    """Return the kind of something and its fields."""
    found = {**msgspec.to_builtins(thing)}
    found.pop("cause", None)
    kind = found.pop("type", type(thing).__name__)
    return f"{kind} {', '.join(f'{name}={value}' for name, value in found.items())}".rstrip()


def _short(sentence: str) -> str:
    one_line = printable(sentence).rstrip(": ")
    return one_line if len(one_line) <= MAX_CHARS else f"{one_line[:MAX_CHARS]} …"


# ---- the subcommands ----------------------------------------------------------------------


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
            document = job_text.read_job(msgspec.json.encode(status))
            print(f"\n{job_text.job(document, found.unix(found.now))}")
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
            subject = of_rank(int(given.name), steps)
        else:
            subject = Subject(None, given.name, frozenset())
        lines = list(chain(subject, steps, found.unix))
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
    when = job_text.clock(found.unix(step.at))
    head = f"{when} event {step.n} ({step.machine}): {of_event(step.event)}"
    return "\n".join([head, *(f"    {of_decision(d)}" for d in step.decisions)])


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
