"""`docs/states.md`, written from the transition tables: the specification, for reading.

`python -m elastic_driver.core.states > docs/states.md` writes it; a test compares the two.
"""

from __future__ import annotations

import sys

from elastic_driver.core.rules.rounds import ROUND_TRANSITIONS, RoundState
from elastic_driver.core.rules.workers import ACTIVE, OCCUPYING, TRANSITIONS, News, WorkerState

_HEAD = """\
# States and what changes them

Written from the tables in the code by `python -m elastic_driver.core.states`; a test keeps
them the same. An event that a table does not list changes nothing and is counted as ignored.
"""

_WORKERS = """
## Workers

Each row is a state, each column something that is learned about a worker or done to it; the
cell is the state that follows. "·" means that the event is ignored.
"""

_KINDS = """
A worker *takes part* (or is going to) while it is {active}. Its process may exist, so that
its slot is taken, while it is {occupying}.
"""

_ROUNDS = """
## Rounds

A round that breaks before it was complete (a plain job's first failure, say) goes from
forming to closing. The next round opens when this one is closed.
"""


def render() -> str:
    """The whole page."""
    kinds = _KINDS.format(active=_join(ACTIVE), occupying=_join(OCCUPYING))
    return "\n".join((_HEAD.rstrip(), _WORKERS, _workers(), kinds.rstrip(), _ROUNDS, _rounds(), ""))


def _workers() -> str:
    rows = [
        [state.value, *(_cell(TRANSITIONS[state].get(news)) for news in News)]
        for state in WorkerState
    ]
    return _table(["state", *(news.value for news in News)], rows)


def _rounds() -> str:
    rows = [[state.value, _join(ROUND_TRANSITIONS[state]) or "·"] for state in RoundState]
    return _table(["state", "may become"], rows)


def _cell(state: WorkerState | None) -> str:
    return "·" if state is None else state.value


def _join(states: tuple[WorkerState, ...] | tuple[RoundState, ...]) -> str:
    return ", ".join(state.value for state in states)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(render())
