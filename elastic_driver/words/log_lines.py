"""Lines of the event log, as its readers know them: what has happened, when, where and why. Pure.

`KINDS` has the class of every event by its name.
"""

from collections.abc import Mapping
from typing import Any, Union

import msgspec
from msgspec.structs import replace

from elastic_driver.kernel.log import LogEvent, by_name
from elastic_driver.words import host_log_events, log_events, worker_log_events

KINDS = by_name(log_events, host_log_events, worker_log_events)


class LogLine(msgspec.Struct, frozen=True):
    """A line of the event log. Times are unix seconds."""

    t: float
    event: str  # its name
    reason: str = ""
    round: int | None = None
    host: str | None = None
    slot: int | None = None
    rank: int | None = None
    pid: int | None = None
    worker: str | None = None
    # None: no class stands for this event; a newer driver has written it.
    what: LogEvent | None = None

    @property
    def is_loss(self) -> bool:
        """Return whether a worker was lost."""
        return self.what is not None and self.what.is_loss


_Any = Union[tuple(KINDS.values())]  # type: ignore[valid-type]  # noqa: UP007 - it is made here
_decode_places = msgspec.json.Decoder(LogLine).decode
_decode_what = msgspec.json.Decoder(_Any).decode


def read_line(line: bytes) -> LogLine | None:
    """Return a line of the log; None if it is cut off, or none of ours."""
    try:
        read = _decode_places(line)
        return replace(read, what=_decode_what(line)) if read.event in KINDS else read
    except msgspec.DecodeError:
        return None


def line_of(event: str, t: float, facts: Mapping[str, Any]) -> LogLine | None:
    """Return a line with these facts, as `read_line` would read it from the log."""
    known = {name: value for name, value in facts.items() if value is not None}
    line = {**known, "event": event, "t": t}
    try:
        read = msgspec.convert(line, LogLine)
        return replace(read, what=msgspec.convert(line, _Any)) if event in KINDS else read
    except msgspec.ValidationError:
        return None
