"""The lines that workers print, as agents send them to the driver. Pure data.

`OutputLines` are for the terminal of a driver that did not start the agent; `WorkerLines` are kept
in the run's folder, for `elasticctl logs`.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from elastic_driver.core.fields import Count, Host, Seconds, Text, WorkerId

MAX_OUTPUT_LINES = 4096  # in one message


class OutputLine(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One line for elasticrun's stdout (`stream` 1) or stderr (2), without its newline."""

    stream: Literal[1, 2]
    text: Text


class OutputLines(Struct, frozen=True, forbid_unknown_fields=True):
    """Lines in the order in which they were written: the body of `POST /v1/output`.

    `first` is the number of the first line; an agent numbers its lines from 1. Lines that were
    taken already may come again, with the same numbers.
    """

    host: Host
    incarnation: Annotated[int, Meta(ge=0, le=2**53)]
    first: Annotated[int, Meta(ge=1, le=2**53)]
    lines: Annotated[tuple[OutputLine, ...], Meta(min_length=1, max_length=MAX_OUTPUT_LINES)]


class WorkerLine(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One line of a worker's stdout (`stream` 1) or stderr (2), without its newline."""

    t: Annotated[float, Meta(ge=0)]  # unix seconds
    worker: WorkerId
    rank: Annotated[int, Meta(ge=-1, le=10**6)]  # that the worker had then; −1: a spare
    stream: Literal[1, 2]
    text: Text


class WorkerLines(Struct, frozen=True, forbid_unknown_fields=True):
    """Lines of the workers of one host: the body of `POST /v1/logs`.

    `first` is the number of the first line; an agent numbers its lines from 1. `dropped`: how many
    it has left out before them.
    """

    host: Host
    incarnation: Count
    first: Annotated[int, Meta(ge=1, le=2**53)]
    lines: Annotated[tuple[WorkerLine, ...], Meta(min_length=1, max_length=MAX_OUTPUT_LINES)]
    dropped: Count = 0


class LogsTaken(Struct, frozen=True):
    """The answer to `WorkerLines`: seconds until the agent may send more."""

    wait: Seconds
