"""`docs/states.md`, written from the transition tables: the specification, for reading.

`python -m tests.job.states_page > docs/states.md` writes it; a test compares the two.
"""

import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TypeVar

from elastic_driver.job.fleet import AGENT_TRANSITIONS, AgentNews
from elastic_driver.job.hosts import HOST_TRANSITIONS, HostNews
from elastic_driver.job.rounds import ROUND_TRANSITIONS
from elastic_driver.job.workers import ACTIVE, OCCUPYING, TRANSITIONS, WorkerNews

_PAGE = """\
# States and what changes them

Written from the tables in the code by `python -m tests.job.states_page`; a test keeps
them the same. An event that a table does not list changes nothing and is counted as ignored.

## Workers

Each row is a state, each column something that is learned about a worker or done to it; the
cell is the state that follows. "·" means that the event is ignored.

{workers}

A worker *takes part* (or is going to) while it is {active}. Its process may exist while it is
{occupying}; it then takes its slot, unless it is a spare (`--spares`).

## Agents

A host in use has one agent; each start is a new incarnation, with a life of its own.

{agents}

## Hosts

Each row is something that keeps a host from getting workers, each column is news of the host,
which begins or ends it. A host is usable while nothing hinders it; it may be hindered by several
things at once.

{hosts}

## Rounds

A round that breaks before it was complete (a plain job's first failure, say) goes from
forming to closing. The next round opens when this one is closed.

{rounds}
"""
State = TypeVar("State", bound=Enum)
Column = TypeVar("Column", bound=Enum)
_BEGINS = {True: "begins", False: "ends", None: "·"}


def render() -> str:
    """Return the whole page."""
    rounds = [[state.value, _join(after) or "·"] for state, after in ROUND_TRANSITIONS.items()]
    return _PAGE.format(
        workers=_life("state", TRANSITIONS, WorkerNews),
        active=_join(ACTIVE),
        occupying=_join(OCCUPYING),
        agents=_life("state", AGENT_TRANSITIONS, AgentNews),
        hosts=_life("hindrance", HOST_TRANSITIONS, HostNews),
        rounds=_table(["state", "may become"], rounds),
    )


def _life(
    head: str, table: Mapping[State, Mapping[Column, State | bool]], news: type[Column]
) -> str:
    rows = [[one.value, *(_cell(after.get(n)) for n in news)] for one, after in table.items()]
    return _table([head, *(column.value for column in news)], rows)


def _cell(after: Enum | bool | None) -> str:
    return str(after.value) if isinstance(after, Enum) else _BEGINS[after]


def _join(states: Iterable[Enum]) -> str:
    return ", ".join(state.value for state in states)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(render())
