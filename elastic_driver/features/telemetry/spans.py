"""The spans of a job's trace, from the lines of its event log. Pure.

A job has one span, and each round has one below it. The span of a round shows how long the change
took: it begins with the first loss, or the first worker that is ready, since the round before was
complete, and ends with the first step of the round. A script that does not use our API reports no
steps, so its rounds end when they are complete. Times are unix seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic_driver.kernel.log import LogEvent
from elastic_driver.words import log_events as log
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.log_lines import LogLine

MOST_EVENTS = 100  # of a span; a round of many workers counts the others
Attributes = dict[str, str | int | float]


class SpanEvent(NamedTuple):
    """A moment of a span, by its name in the event log."""

    t: float
    name: str
    attributes: Attributes


class Span(NamedTuple):
    """A span that is over; `t` is its beginning."""

    name: str  # "job" or "round"
    t: float
    end: float
    attributes: Attributes
    events: tuple[SpanEvent, ...] = ()
    failed: bool = False


@dataclass
class _Change:
    """The events since the round before was complete."""

    events: list[SpanEvent] = field(default_factory=list)
    losses: int = 0
    ready: int = 0
    complete: LogLine | None = None  # None: the round is not complete

    def add(self, line: LogLine) -> None:
        """Note an event; many workers are counted only."""
        if len(self.events) < MOST_EVENTS or not _is_of_worker(line):
            about = {"worker": line.worker, "host": line.host, "reason": line.reason}
            self.events.append(SpanEvent(line.t, line.event, _attributes(about)))

    def span(self, first_step: LogLine | None = None) -> Span:
        """Return the span of the round, which is complete."""
        complete = self.complete
        assert complete is not None  # noqa: S101 - the callers have looked
        self.add(complete)
        if first_step is not None:
            self.add(first_step)
        size = complete.what.size if isinstance(complete.what, log.RoundCompleted) else None
        synced = None if first_step is None else first_step.what
        facts = {
            "round": complete.round,
            "size": size,
            "reason": complete.reason,
            "losses": self.losses,
            "ready": self.ready,
            "first_step": synced.first_step if isinstance(synced, log.StateSynced) else None,
        }
        events = sorted(self.events, key=lambda event: event.t)
        return Span("round", events[0].t, events[-1].t, _attributes(facts), tuple(events))


class RoundSpans:
    """The spans of one driver; `feed` it with the lines of the event log, in order."""

    def __init__(self, run_id: str, began: float) -> None:
        """`began`: the beginning of the run, also of one that another driver has begun."""
        self._run_id, self._began = run_id, began
        self._change = _Change()  # of the next round
        self._waiting = _Change()  # of a complete round, until its first step
        self._elastic = False
        self._failed: set[str] = set()  # see `is_new_loss`

    def feed(self, line: LogLine) -> list[Span]:
        """Take in a line; return the spans that are over now."""
        match line.what:
            case log.RoundOpened():
                over = self._settle()
                self._change.add(line)
                return over
            case worker_log.WorkerReady() | worker_log.SparePromoted() as what:
                self._elastic = self._elastic or isinstance(what, worker_log.WorkerReady)
                self._change.ready += 1
                self._change.add(line)
            case LogEvent() as what if worker_log.is_new_loss(what, line.worker, self._failed):
                self._change.losses += 1
                self._change.add(line)
            case log.RoundCompleted():
                over = self._settle()
                self._change.complete = line
                self._waiting, self._change = self._change, _Change()
                return over if self._elastic else over + self._settle()
            case log.StateSynced() if self._is_first_step(line):
                return self._settle(line)
            case log.JobEnd(exit_code=code) as what:
                about = _attributes(
                    {"run_id": self._run_id, "reason": line.reason, "exit_code": code}
                )
                failed = isinstance(what, log.JobFailed)
                return [*self._settle(), Span("job", self._began, line.t, about, failed=failed)]
        return []

    def _is_first_step(self, line: LogLine) -> bool:
        complete = self._waiting.complete
        return complete is not None and complete.round == line.round

    def _settle(self, first_step: LogLine | None = None) -> list[Span]:
        """Return the span of the round that is complete, if it has none yet."""
        waiting, self._waiting = self._waiting, _Change()
        return [] if waiting.complete is None else [waiting.span(first_step)]


def _is_of_worker(line: LogLine) -> bool:
    is_ready = isinstance(line.what, worker_log.WorkerReady | worker_log.SparePromoted)
    return is_ready or line.is_loss


def _attributes(facts: Mapping[str, str | int | None]) -> Attributes:
    """Return what is known, by names that begin with `elastic.`."""
    return {f"elastic.{name}": value for name, value in facts.items() if value not in (None, "")}
