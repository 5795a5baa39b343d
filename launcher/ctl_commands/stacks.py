"""`elasticctl stacks`: where every rank stands, now or when the job last looked by itself.

Takes the words behind its name and returns an exit status; errors are raised.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from elastic_driver.contract import STACKS_PATH
from elastic_driver.core.decisions import StackGroup
from elastic_driver.errors import ClusterError
from launcher.ctl_commands.arguments import connect, make_parser, parse
from launcher.ctl_commands.connection import JobConnection
from launcher.ctl_commands.show import printable
from rendezvous.wire import EVENTS_PATH

COLLECTED = "stacks_collected"


class Collected(Struct, frozen=True):
    """An event of the log, as far as it tells stacks."""

    n: int
    event: str
    reason: str = ""
    stacks: tuple[StackGroup, ...] = ()


class _Listing(Struct):
    events: tuple[Collected, ...]


def stacks(words: Sequence[str]) -> int:
    """`elasticctl stacks`: ask every rank where it stands, or show what was found last."""
    parser = make_parser(
        "stacks",
        "Show where the training thread of every rank stands; ranks with the same stack together, "
        "the odd ones first. Workers that cannot answer are looked at from outside, with py-spy "
        "where it is installed. Nothing is stopped for it.",
    )
    parser.add_argument(
        "--last", action="store_true", help="ask nobody; what was found last, as when a rank hung"
    )
    given = parse(parser, words)
    connection = connect(given)
    listing = msgspec.json.decode(connection.get(f"{EVENTS_PATH}?since=0"), type=_Listing)
    known = [event for event in listing.events if event.event == COLLECTED]
    if given.last:
        if not known:
            raise ClusterError("no stacks were collected yet; leave --last away to ask for them")
        print(render(known[-1]))
        return 0
    last = listing.events[-1].n if listing.events else 0
    connection.post(STACKS_PATH, {"reason": "asked for by elasticctl stacks"})
    print(render(_await_answer(connection, last)))
    return 0


def _await_answer(connection: JobConnection, since: int) -> Collected:
    """The next event that tells stacks; the driver waits a second or two for the workers."""
    for line in connection.follow(f"{EVENTS_PATH}?since={since}"):
        event = msgspec.json.decode(line, type=Collected)
        if event.event == COLLECTED:
            return event
    raise ClusterError(f"run {connection.target.run_id} ended before its workers had answered")


def render(found: Collected) -> str:
    """Each group with its stack, the odd ones first."""
    parts = [printable(found.reason)]
    for group in sorted(found.stacks, key=lambda g: not g.odd):
        ranks = ", ".join(map(str, group.ranks))
        where = {
            "collective": "in a collective",
            "elsewhere": "outside of collectives",
        }.get(group.where, group.where)
        apart = ", apart from the others" if group.odd else ""
        head = f"rank{'s' if len(group.ranks) > 1 else ''} {ranks}: {printable(where)}{apart}"
        lines = [f"  {_clean(line)}" for line in group.stack.splitlines()]
        parts.append("\n".join([head, *lines]))
    return "\n\n".join(parts)


def _clean(line: str) -> str:
    """A line as it is, without what a terminal would take for something else."""
    return "".join(char if char.isprintable() else "?" for char in line)
