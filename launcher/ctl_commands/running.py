"""The subcommands for a job that runs: watch it, scale it, drain a host, stop it.

Each takes the words behind its name and returns an exit status; errors are raised. A job is found
by `control.find`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from elastic_driver.contract import (
    DRAIN_PATH,
    SCALE_PATH,
    STATUS_PATH,
    STOP_PATH,
    UNDRAIN_PATH,
)
from elastic_driver.errors import ClusterError
from launcher.ctl_commands import show
from launcher.ctl_commands.arguments import connect, make_parser, parse
from rendezvous.wire import EVENTS_PATH

_CLEAR = "\x1b[H\x1b[2J"  # cursor home, erase the screen (ECMA-48)


# ---- looking -----------------------------------------------------------------------------


def status(words: Sequence[str]) -> int:
    """`elasticctl status`: the job, its hosts and its workers."""
    parser = make_parser("status", "Show the job, its hosts and its workers.")
    parser.add_argument("--json", action="store_true", help="the driver's own document")
    parser.add_argument("--watch", action="store_true", help="again and again, until it is over")
    parser.add_argument("--interval", type=_seconds, default=2.0, metavar="S", help="default 2")
    given = parse(parser, words)
    connection = connect(given)
    document = connection.get(STATUS_PATH)
    while True:
        _show_status(document, as_json=given.json, clear=given.watch and sys.stdout.isatty())
        if not given.watch:
            return 0
        time.sleep(given.interval)
        try:
            document = connection.get(STATUS_PATH)
        except ClusterError:
            print(f"run {connection.target.run_id} does not answer any more", file=sys.stderr)
            return 0


def _show_status(document: bytes, *, as_json: bool, clear: bool) -> None:
    text = document.decode() if as_json else show.job(show.read_job(document), time.time())
    print(f"{_CLEAR if clear else ''}{text}", flush=True)


def hosts(words: Sequence[str]) -> int:
    """`elasticctl hosts`: what the job thinks of its hosts."""
    parser = make_parser("hosts", "Show the job's hosts.")
    parser.add_argument("--json", action="store_true", help="as a JSON array")
    given = parse(parser, words)
    document = connect(given).get(STATUS_PATH)
    if given.json:
        print(msgspec.json.encode(msgspec.json.decode(document)["hosts"]).decode())
    else:
        print(show.hosts(show.read_job(document)))
    return 0


def events(words: Sequence[str]) -> int:
    """`elasticctl events`: what has happened, and with -f what happens."""
    parser = make_parser("events", "Show what has happened.")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job is over")
    parser.add_argument("--since", type=_count, default=0, metavar="N", help="those after number N")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    given = parse(parser, words)
    connection = connect(given)
    path = f"{EVENTS_PATH}?since={given.since}"
    if given.follow:
        for line in connection.follow(path):
            _show_event(line, as_json=given.json)
        return 0
    for found in msgspec.json.decode(connection.get(path), type=_Listing).events:
        _show_event(bytes(found), as_json=given.json)
    return 0


class _Listing(msgspec.Struct):
    events: list[msgspec.Raw]


def _show_event(line: bytes, *, as_json: bool) -> None:
    print(line.decode() if as_json else show.event(show.read_event(line)), flush=True)


# ---- acting ------------------------------------------------------------------------------


def scale(words: Sequence[str]) -> int:
    """`elasticctl scale N`."""
    parser = make_parser("scale", "Wish another number of workers, within --min-np and --max-np.")
    parser.add_argument("workers", type=_count, metavar="N")
    given = parse(parser, words)
    connection = connect(given)
    connection.post(SCALE_PATH, {"num_proc": given.workers})
    print(f"run {connection.target.run_id}: {given.workers} workers are wished")
    return 0


def drain(words: Sequence[str]) -> int:
    """`elasticctl drain HOST`."""
    parser = make_parser(
        "drain",
        "Have HOST's workers leave at a step boundary, replaced first where there is room, and do "
        "not use it again until it has been away from the discovery, or --cancel.",
    )
    parser.add_argument("host", metavar="HOST")
    parser.add_argument("--reason", default="elasticctl drain", help="for the event log")
    parser.add_argument(
        "--deadline", type=_seconds, metavar="S", help="it has to be empty within so many seconds"
    )
    parser.add_argument("--cancel", action="store_true", help="it may be used again")
    given = parse(parser, words)
    connection = connect(given)
    body: dict[str, object] = {"reason": given.reason}
    if given.deadline is not None and not given.cancel:
        body["deadline"] = given.deadline
    path = UNDRAIN_PATH if given.cancel else DRAIN_PATH
    connection.post(path.format(host=quote(given.host, safe="")), body)
    what = "may be used again" if given.cancel else "is being drained"
    print(f"run {connection.target.run_id}: host {given.host} {what}")
    return 0


def stop(words: Sequence[str]) -> int:
    """`elasticctl stop`."""
    parser = make_parser(
        "stop",
        "End the job; elasticrun returns 143. Workers get SIGTERM and --stop-grace, unless they "
        "are stopped a second time.",
    )
    parser.add_argument("--reason", default="elasticctl stop", help="for the event log")
    given = parse(parser, words)
    connection = connect(given)
    connection.post(STOP_PATH, {"reason": given.reason})
    print(f"run {connection.target.run_id} is stopping")
    return 0


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1e9:
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise ValueError(text)
    return int(text)


_seconds.__name__, _count.__name__ = "number of seconds", "number"  # argparse says them
