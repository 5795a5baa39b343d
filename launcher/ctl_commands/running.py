"""The subcommands for a running job: status, events, hosts, stacks, scale, drain and stop.

Each takes its words from the command line and returns an exit status; errors are raised. The job
is found by `ctl_commands.find`.
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias
from urllib.parse import quote

import msgspec

from elastic_driver import contract
from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.runtime.run_dir import default_state_dir
from launcher.ctl_commands import show
from launcher.ctl_commands.find import JobConnection, Where, find
from rendezvous.wire import EVENTS_PATH

_CLEAR = "\x1b[H\x1b[2J"  # cursor home, erase the screen (ECMA-48)

Given: TypeAlias = argparse.Namespace
Action: TypeAlias = Callable[[Given, JobConnection], None]
Argument: TypeAlias = tuple[tuple[str, ...], dict[str, Any]]


class CommandParser(argparse.ArgumentParser):
    """An argparse parser that raises `UsageError` for a wrong command."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def _argument(*names: str, **rest: Any) -> Argument:
    return names, rest


def _flag(*names: str, help: str) -> Argument:  # noqa: A002
    return names, {"action": "store_true", "help": help}


_OF_ANY_JOB = (
    _argument("--run-id", metavar="ID", help="its name"),
    _argument("--endpoint", metavar="URL", help="the address of its driver"),
    _argument("--token-file", metavar="F", type=Path, help="the file with its token"),
    _argument("--state-dir", metavar="D", type=Path, help="where runs keep their files"),
)


def _command(what: str, *arguments: Argument) -> Callable[[Action], Callable[[Sequence[str]], int]]:
    """Make a subcommand of an action: its words are parsed, and its job is connected."""

    def make(action: Action) -> Callable[[Sequence[str]], int]:
        @functools.wraps(action)
        def run(words: Sequence[str]) -> int:
            name = f"elasticctl {action.__name__}"
            parser = CommandParser(prog=name, description=what, allow_abbrev=False)
            job = parser.add_argument_group("which job (default: the only one running)")
            for group, members in ((job, _OF_ANY_JOB), (parser, arguments)):
                for names, rest in members:
                    group.add_argument(*names, **rest)
            given = parser.parse_args([_hyphenated(word) for word in words])
            state_dir = given.state_dir or default_state_dir(os.environ)
            where = Where(state_dir.absolute(), given.run_id, given.endpoint, given.token_file)
            action(given, JobConnection(find(where)))
            return 0

        return run

    return make


def _hyphenated(word: str) -> str:
    """Return `--run_id` as `--run-id`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1e9:
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise ValueError(text)
    return int(text)


_seconds.__name__, _count.__name__ = "number of seconds", "number"  # in argparse's messages


# ---- looking -----------------------------------------------------------------------------


@_command(
    "Show the job, its hosts and its workers.",
    _flag("--json", help="the driver's own document"),
    _flag("--watch", help="again and again, until the job is over"),
    _argument("--interval", type=_seconds, default=2.0, metavar="S", help="default 2"),
)
def status(given: Given, job: JobConnection) -> None:
    """`elasticctl status`: the job, its hosts and its workers."""
    document = job.get(contract.STATUS_PATH)
    while True:
        text = document.decode() if given.json else show.job(show.read_job(document), time.time())
        clear = _CLEAR if given.watch and sys.stdout.isatty() else ""
        print(f"{clear}{text}", flush=True)
        if not given.watch:
            return
        time.sleep(given.interval)
        try:
            document = job.get(contract.STATUS_PATH)
        except ClusterError:
            print(f"run {job.target.run_id} does not answer any more", file=sys.stderr)
            return


@_command("Show the job's hosts.", _flag("--json", help="as a JSON array"))
def hosts(given: Given, job: JobConnection) -> None:
    """`elasticctl hosts`: the state of each host."""
    document = job.get(contract.STATUS_PATH)
    if given.json:
        print(msgspec.json.encode(msgspec.json.decode(document)["hosts"]).decode())
    else:
        print(show.hosts(show.read_job(document)))


@_command(
    "Show the events of the job.",
    _flag("-f", "--follow", help="go on until the job is over"),
    _argument("--since", type=_count, default=0, metavar="N", help="those after number N"),
    _flag("--json", help="one JSON object a line"),
)
def events(given: Given, job: JobConnection) -> None:
    """`elasticctl events`: the events so far, and with -f those to come."""
    path = f"{EVENTS_PATH}?since={given.since}"
    lines = job.follow(path) if given.follow else map(bytes, _read_events(job, given.since))
    for line in lines:
        print(line.decode() if given.json else show.event(show.read_event(line)), flush=True)


@_command(
    "Show where the training thread of every rank stands; ranks with the same stack together, "
    "the odd ones first. Workers that cannot answer are examined from outside, with py-spy "
    "if it is installed. Nothing is stopped for it.",
    _flag("--last", help="ask nobody; show what was found last, as when a rank hung"),
)
def stacks(given: Given, job: JobConnection) -> None:
    """`elasticctl stacks`: ask every rank where it stands, or show what was found last."""
    known = [show.read_stacks(line) for line in _read_events(job, 0)]
    if given.last:
        found = [event for event in known if event.event == show.STACKS_COLLECTED]
        if not found:
            raise ClusterError("no stacks were collected yet; leave --last away to ask for them")
        print(show.stacks(found[-1]))
        return
    last = known[-1].n if known else 0
    job.post(contract.STACKS_PATH, {"reason": "asked for by elasticctl stacks"})
    for line in job.follow(f"{EVENTS_PATH}?since={last}"):
        event = show.read_stacks(line)
        if event.event == show.STACKS_COLLECTED:
            print(show.stacks(event))
            return
    raise ClusterError(f"run {job.target.run_id} ended before its workers had answered")


class EventPage(msgspec.Struct):
    """The answer to a question for events."""

    events: list[msgspec.Raw]


def _read_events(job: JobConnection, since: int) -> list[msgspec.Raw]:
    return msgspec.json.decode(job.get(f"{EVENTS_PATH}?since={since}"), type=EventPage).events


# ---- acting ------------------------------------------------------------------------------


@_command(
    "Ask for another number of workers, within --min-np and --max-np.",
    _argument("workers", type=_count, metavar="N"),
)
def scale(given: Given, job: JobConnection) -> None:
    """`elasticctl scale N`."""
    job.post(contract.SCALE_PATH, {"num_proc": given.workers})
    print(f"run {job.target.run_id}: asked for {given.workers} workers")


@_command(
    "Have HOST's workers leave at a step boundary, replaced first if there is room. HOST is not "
    "used again until it has been away from the discovery, or --cancel.",
    _argument("host", metavar="HOST"),
    _argument("--reason", default="elasticctl drain", help="for the event log"),
    _argument("--deadline", type=_seconds, metavar="S", help="it must be empty within S seconds"),
    _flag("--cancel", help="it may be used again"),
)
def drain(given: Given, job: JobConnection) -> None:
    """`elasticctl drain HOST`."""
    body: dict[str, object] = {"reason": given.reason}
    if given.deadline is not None and not given.cancel:
        body["deadline"] = given.deadline
    path = contract.UNDRAIN_PATH if given.cancel else contract.DRAIN_PATH
    job.post(path.format(host=quote(given.host, safe="")), body)
    what = "may be used again" if given.cancel else "is being drained"
    print(f"run {job.target.run_id}: host {given.host} {what}")


@_command(
    "End the job; elasticrun returns 143. Workers get SIGTERM and --stop-grace, unless the job "
    "is stopped a second time.",
    _argument("--reason", default="elasticctl stop", help="for the event log"),
)
def stop(given: Given, job: JobConnection) -> None:
    """`elasticctl stop`."""
    job.post(contract.STOP_PATH, {"reason": given.reason})
    print(f"run {job.target.run_id} is stopping")
