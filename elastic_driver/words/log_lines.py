"""Lines of the event log, as its readers know them, and as sentences. Pure.

`KINDS` has the class of every event by its name. An event that no class stands for, of a newer
driver perhaps, is shown by its name.
"""

from collections.abc import Mapping
from typing import Any, Union

import msgspec
from msgspec.structs import replace

from elastic_driver.errors import ExitCode
from elastic_driver.kernel.log import LogEvent, by_name, name_of
from elastic_driver.words import counted, host_log_events, log_events, worker_log_events
from elastic_driver.words.log_events import JobFailed

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


def sentence(event: str, reason: str, facts: Mapping[str, Any]) -> str:
    """Return an event of the log in one sentence; `facts`: the fields of its line."""
    about = facts.get("worker") or facts.get("host") or ""
    kind = KINDS.get(event)
    words = f"{event.replace('_', ' ')} {about}".rstrip() if kind is None else kind.sentence
    known = dict.fromkeys(("host", "worker", "rank", "round", "step"), "?")
    known.update({name: fact for name, fact in facts.items() if fact is not None})
    known["worker"] = name_worker(facts.get("worker"), facts.get("host")) or "?"
    rank = facts.get("rank")
    if facts.get("worker") and isinstance(rank, int) and rank >= 0:
        known["worker"] = f"{facts['worker']} (rank {rank})"
    if event == name_of(JobFailed) and told_to_stop(facts):
        words = "the job was stopped"
    text = words.format_map({**known, "world": describe_world(facts)}).removesuffix(": ")
    return f"{text}: {reason}" if reason else text


def name_worker(worker: str | None, host: str | None) -> str:
    """Return what a sentence calls a worker; by its host if only that is known."""
    return worker or (f"of host {host}" if host else "")


def told_to_stop(facts: Mapping[str, Any]) -> bool:
    """Return whether these facts of a job's end say that it was told to stop, and did not fail."""
    stopped = facts.get("exit_code") in (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
    return stopped and facts.get("first_failure") is None


def describe_world(facts: Mapping[str, Any]) -> str:
    """Return `3 workers on 2 hosts`, without a number that the event lacks."""
    counts = {"worker": facts.get("size"), "host": facts.get("hosts")}
    parts = [counted(n, noun) for noun, n in counts.items() if n is not None]
    return " on ".join(parts)
