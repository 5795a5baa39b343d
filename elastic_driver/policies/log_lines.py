"""Lines of the event log, as the goodput ledger and the story of a job read them. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec


class LogLine(msgspec.Struct, frozen=True):
    """The fields of a line of the event log that the ledger and the story of a job read."""

    t: float
    event: str
    reason: str = ""
    round: int | None = None
    host: str | None = None
    slot: int | None = None
    worker: str | None = None
    size: int | None = None
    slots: int | None = None
    min_np: int | None = None
    max_np: int | None = None
    wanted: int | None = None
    exit_code: int | None = None
    expected: bool = False
    failed: bool = True  # a script that is over has failed
    job_over: bool = False
    undone: float = 0.0
    seconds: float = 0.0
    step: int | None = None
    first_step: int | None = None
    ratio: float = 1.0
    share: float | None = None  # of a step, for which all ranks wait; older logs have none


_decode = msgspec.json.Decoder(LogLine).decode


def read_line(line: bytes) -> LogLine | None:
    """Return a line of the log; None if it is cut off, or none of ours."""
    try:
        return _decode(line)
    except msgspec.DecodeError:
        return None


def line_of(event: str, t: float, facts: Mapping[str, Any]) -> LogLine | None:
    """Return a line with these facts, as `read_line` would read it from the log."""
    known = {name: value for name, value in facts.items() if value is not None}
    try:
        return msgspec.convert({**known, "event": event, "t": t}, LogLine)
    except msgspec.ValidationError:
        return None
