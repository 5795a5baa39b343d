"""`elasticbrain replay`: recorded jobs, played through two algorithms."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from elastic_driver.brain.algorithm import BUILT_IN, GROUP, Algorithm, HostView, Plan, View
from elastic_driver.errors import UsageError
from elastic_driver.runtime.discovery import parse_hosts
from launcher.backends.base import load
from launcher.brain import database as given_database

_DESCRIPTION = """\
Play recorded jobs through two algorithms, and show what each job would have trained.

Each job is there from its recorded beginning to its end, and as fast as it was measured at each
size; the speed at other sizes is extrapolated, and marked. The same input gives the same output.
"""
_EXAMPLE = """\
example:
  elasticbrain replay --algorithm fair --against mine --stats-db sqlite:///stats.db -H n1:4,n2:4
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to those of `elasticbrain`."""
    replay = commands.add_parser(
        "replay",
        help="play recorded jobs through two algorithms",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    replay.set_defaults(act=run)
    replay.add_argument(
        "--algorithm", metavar="A", default=BUILT_IN, help="an algorithm (default: %(default)s)"
    )
    replay.add_argument("--against", metavar="B", required=True, help="the other algorithm")
    replay.add_argument("--stats-db", metavar="URL", required=True, help=given_database.HELP)
    replay.add_argument(
        "-H",
        "--hosts",
        metavar="h1:4,h2:4",
        help="the hosts to play on (default: those that elasticbrain monitor has seen)",
    )


def run(given: argparse.Namespace) -> int:
    """Print the comparison; raises UsageError for what cannot be played."""
    # Loads SQLAlchemy and SciPy.
    from elastic_driver.brain.replay import comparison, play, recorded_jobs  # noqa: PLC0415

    names = list(dict.fromkeys((given.algorithm, given.against)))
    algorithms = {name: _named(name, load(GROUP, name)) for name in names}
    address = given_database.address_of(given.stats_db)
    with given_database.reading(address) as database:
        hosts = _hosts(given.hosts, database.known_nodes())
        jobs, left_out = recorded_jobs(database)
    if not jobs:
        raise UsageError(f"{address} has no job that has ended and was measured; name another")
    outcomes = {name: play(jobs, hosts, algorithm) for name, algorithm in algorithms.items()}
    print(comparison(jobs, left_out, hosts, outcomes), end="")
    return os.EX_OK


def _named(name: str, algorithm: Algorithm) -> Algorithm:
    """Return an algorithm whose errors tell its name."""

    def named(view: View) -> Plan:
        try:
            plan = algorithm(view)
        except Exception as error:  # another package's code may raise anything
            what = f"{type(error).__name__}: {error}"
            raise UsageError(f"the algorithm {name} raised {what}; mend it") from error
        if not isinstance(plan, Plan):
            raise UsageError(f"the algorithm {name} returned no Plan; mend it")
        return plan

    return named


def _hosts(text: str | None, nodes: Sequence[Any]) -> tuple[HostView, ...]:
    if text is not None:
        return tuple(HostView(name=name, slots=slots) for name, slots in parse_hosts(text))
    found = tuple(HostView(name=each.name, slots=each.slots) for each in nodes if each.slots)
    if not found:
        raise UsageError("the database knows no hosts; name them with -H")
    return found
