"""The driver's output on stderr: one short line per important change.

Announced events become text, or JSON lines with --log-format json. The event log has them all, so
lines that the terminal does not take are dropped: a stopped terminal must not stop the job.

Methods may be called by any thread; lines never mix.

Which lines about a condition that comes and goes are shown: once, and then as a count. Pure.

A rank that holds the others up now and then would fill the terminal. The event log has each of
these events. Times are monotonic seconds.
"""

import contextlib
import json
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TextIO

import msgspec
from msgspec.structs import asdict

from elastic_driver.console import Outlet, open_outlet
from elastic_driver.errors import ExitCode
from elastic_driver.features.goodput.story import Story
from elastic_driver.job.decisions import Announce
from elastic_driver.kernel.log import Level as Level  # noqa: PLC0414 - for importers
from elastic_driver.kernel.log import name_of
from elastic_driver.line_writer import LineWriter
from elastic_driver.runtime.results import advice_on, describe_failure, last_words
from elastic_driver.words import counted
from elastic_driver.words import worker_log_events as log
from elastic_driver.words.findings import Failure
from elastic_driver.words.log_events import JobEnd, RoundCompleted
from elastic_driver.words.log_lines import describe_world, name_worker
from elastic_driver.words.worker_log_events import WorkerExited

ENDS = {  # what ends what, by name
    name_of(log.RankRecovered): name_of(log.RankSlow),
    name_of(log.WorkerResumed): name_of(log.WorkerStalled),
}
FIRST_S, LONGEST_S = 60.0, 3600.0  # between two lines about the same one; twice as long each time


@dataclass
class _Told:
    at: float
    pause: float = FIRST_S
    more: int = 0  # times since then, that were not shown
    ends: bool = False  # the end of what was shown has not come yet


class Repeated:
    """The conditions that were told."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, object], _Told] = {}

    def take(self, event: str, who: object, now: float) -> str | None:
        """Return what to add to the line of an event; None: leave the line out.

        `who`: the worker or rank that it is about.
        """
        if (began := ENDS.get(event)) is not None:
            told = self._told.get((began, who))
            is_shown = told is None or told.ends
            if told is not None:
                told.ends = False
            return "" if is_shown else None
        if event not in ENDS.values():
            return ""
        told = self._told.get((event, who))
        if told is None:
            self._told[event, who] = _Told(now, ends=True)
            return ""
        told.more += 1
        if now - told.at < told.pause:
            return None
        count, since = told.more, now - told.at
        pause = min(2 * told.pause, LONGEST_S)
        self._told[event, who] = _Told(now, pause)
        times = "once more" if count == 1 else f"{count} more times"
        return f", {times} in {since:.0f} s (elasticctl events has each)"


NAME = "elasticrun"
MAX_EXITS_SHOWN = 8  # of workers that failed in one round; the event log has them all
_LAST_WORDS_S = 1.0  # for the terminal to take the last lines


_RED, _PLAIN = "\x1b[31m", "\x1b[0m"
_STOPPED = (ExitCode.INTERRUPTED, ExitCode.TERMINATED)


class Change(NamedTuple):
    """A change of the job, in words; `t` in unix seconds."""

    t: float
    text: str


class Reporter:
    """The writer of one stream; it never raises and never blocks for long.

    `last_change` is the newest change that people hear of by default.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        level: Level = Level.NORMAL,
        as_json: bool = False,
        colors: bool = False,
        sum_up: Callable[[Story, float], list[str]] = lambda _story, _now: [],
    ) -> None:
        """Write nothing. The caller closes `stream`, after `close`.

        `colors`: the stream is a terminal that shows them; alarms are red there.
        `sum_up` returns sentences about a job that is over at this time (unix seconds).
        """
        self._stream, self._level, self._json = stream, level, as_json
        self._sum_up, self._colors = sum_up, colors and not as_json
        self.last_change: Change | None = None
        self._lock = threading.Lock()
        self._exits = 0  # failed workers since the last complete round
        self._repeated = Repeated()
        self._outlet: Outlet | None = None
        with contextlib.suppress(OSError, ValueError):  # a StringIO, or a closed stream
            self._outlet = open_outlet(stream.fileno())
        self._direct = self._outlet is None
        self._writer = LineWriter(self._put, on_lost=self._describe_lost)

    def close(self) -> None:
        """Write the last lines, if the terminal takes them soon. Idempotent."""
        with self._lock:
            if self._outlet is not None and self._writer.close(_LAST_WORDS_S):
                self._outlet.close()
                self._outlet = None

    def announced(self, event: Announce, line: bytes) -> None:
        """Show an event; `line` is its line in the event log."""
        what = event.what
        level = what.level
        if isinstance(what, WorkerExited) and what.is_loss:
            self._exits += 1
            level = level if self._exits <= MAX_EXITS_SHOWN else Level.VERBOSE
        elif isinstance(what, RoundCompleted):
            self._exits = 0
        if level > max(self._level, Level.NORMAL):
            return
        facts = {**asdict(what), **asdict(event), "world": describe_world(what.facts())}
        facts["worker"] = name_worker(event.worker, event.host)
        text = what.sentence.format_map(facts)
        if level <= Level.NORMAL:
            self.last_change = Change(time.time(), text)
        if level > self._level:
            return
        if self._json:
            self._write([line.decode()])
            return
        if self._level is Level.NORMAL:
            who = event.rank, event.host, event.worker
            more = self._repeated.take(event.event, who, time.monotonic())
            if more is None:
                return
            text += more
        if not isinstance(what, JobEnd):  # `job_ended` says it at the end
            said = f"{text} ({event.reason})" if event.reason else text
            self._say(said, alarm=what.is_alarm)

    def note(self, text: str, *, level: Level = Level.QUIET) -> None:
        """Show a sentence."""
        if level <= self._level:
            self._say(text)

    def logged(self, text: str, by_library: bool) -> None:
        """Show a line of a log; -q shows none of libraries (see `library_logs`)."""
        self.note(text, level=Level.NORMAL if by_library else Level.QUIET)

    def worker_raised(self, worker: str, text: str) -> None:
        """Show a failed worker's traceback; the job goes on."""
        lines = [f"{NAME}: worker {worker} failed with:", *text.split("\n")]
        self._show(lines, event="traceback", worker=worker, text=text)

    def workers_failed_again(self, count: int) -> None:
        """Show the number of workers that failed since, with tracebacks that are not new."""
        more = f"{count} more worker{'s' * (count > 1)} failed with"
        text = f"{more} {'a traceback' if count == 1 else 'tracebacks'} like those above"
        self._show([f"{NAME}: {text}"], event="tracebacks_repeated", count=count)

    def summed_up(self, story: Story) -> None:
        """Show a summary of a job that is over, if people read this output."""
        if not self._json and self._level >= Level.NORMAL:
            for text in self._sum_up(story, time.time()):
                self._say(text)

    def job_ended(
        self, reason: str, failure: Failure | None, exit_code: int, *, shown: bool = False
    ) -> None:
        """Show the job's end: its reason, and the first failure if it has failed.

        `shown`: this worker's traceback was shown already.
        """
        if exit_code == 0:
            self.note(f"job succeeded ({reason})", level=Level.VERBOSE)
            return
        lines = []
        if failure is not None:
            words = last_words(failure.log_tail)
            if words:
                heading = f"last words of rank {failure.rank} ({failure.worker}):"
                lines += (
                    [f"{NAME}: {heading} see above"] if shown else [f"{NAME}: {heading}", *words]
                )
            if advice := advice_on(words):
                lines.append(f"{NAME}: {advice}")
            lines.append(f"{NAME}: first failure: {describe_failure(failure)}")
        stopped = failure is None and exit_code in _STOPPED
        lines.append(f"{NAME}: job {'stopped' if stopped else 'failed'}: {reason}")
        facts = {"reason": reason, "exit_code": exit_code, "first_failure": failure}
        self._show(lines, event="job_ended", **facts)

    def bug(self, trace: str) -> None:
        """Show a traceback of the driver itself and ask for a report."""
        lines = trace.rstrip().split("\n")
        self._show(lines, event="bug", text=trace)
        self._say("the driver met a bug of its own, not of your script; please report the above")

    def _say(self, text: str, *, alarm: bool = False) -> None:
        note: dict[str, object] = {"event": "note", "text": text}
        self._write([_as_json(note) if self._json else f"{NAME}: {text}"], alarm=alarm)

    def _show(self, lines: list[str], **facts: object) -> None:
        """Write the lines, or the facts as one line of JSON."""
        self._write([_as_json(facts)] if self._json else lines)

    def _write(self, lines: list[str], *, alarm: bool = False) -> None:
        """Write whole lines, or drop them."""
        begin, end = (_RED, _PLAIN) if alarm and self._colors else ("", "")
        shown = (_printable(line, as_json=self._json) for line in lines)
        data = "".join(f"{begin}{line}{end}\n" for line in shown)
        if self._direct:
            with self._lock, contextlib.suppress(OSError, ValueError):
                self._stream.write(data)
            return
        self._writer.put(data.encode("utf-8", "backslashreplace"), len(lines))
        self._writer.settle()

    def _put(self, data: bytes) -> None:
        """Write to the stream; wait if it is a pipe that is full. Called by the writer's thread."""
        assert self._outlet is not None  # noqa: S101 - it is closed after the writer
        poll = select.poll()
        poll.register(self._outlet.fd, select.POLLOUT)
        with contextlib.suppress(OSError):  # the reader has gone, or the disk is full
            while data:
                try:
                    data = data[self._outlet.write(data[: self._outlet.piece]) :]
                except BlockingIOError:
                    poll.poll()

    def _describe_lost(self, count: int) -> bytes:
        text = f"{counted(count, 'line was', 'lines were')} dropped: the terminal took no more"
        line = _as_json({"event": "note", "text": text}) if self._json else f"{NAME}: {text}"
        return line.encode() + b"\n"


def _as_json(facts: dict[str, object]) -> str:
    return msgspec.json.encode({"t": round(time.time(), 6), **facts}).decode()


def _printable(line: str, *, as_json: bool) -> str:
    """Escape control characters: a worker's output must not control the terminal."""
    return "".join(
        c if c.isprintable() or c == "\t" else _escaped(c, as_json=as_json) for c in line
    )


def _escaped(character: str, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(character)[1:-1]
    return character.encode("unicode_escape").decode()
