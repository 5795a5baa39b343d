"""The effects of one event: decisions, the next deadline, and the reason the job waits for.

Every rule writes here through these methods. Times are monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_driver.core.decisions import Announce, Decision, Detail
from elastic_driver.core.rules.workers import Worker


@dataclass(slots=True)
class Effects:
    """Decisions so far, and what the job waits for."""

    round: int = 1  # the number that announcements carry
    decisions: list[Decision] = field(default_factory=list)
    alarm: float | None = None  # the next moment at which time alone changes something
    waiting: str = ""  # what the job waits for
    ignored_events: int = 0
    ignored: str = ""  # the last event that changed nothing

    def decide(self, decision: Decision) -> None:
        """Add a decision."""
        self.decisions.append(decision)

    def announce(
        self,
        event: str,
        reason: str,
        worker: Worker | None = None,
        host: str | None = None,
        **detail: Detail,
    ) -> None:
        """Add a line for the event log about a worker, a host or the round."""
        if worker is None:
            self.decide(Announce(event, reason, self.round, host, detail=detail))
            return
        place = (worker.host, worker.slot, worker.place.rank, worker.pid or None)
        self.decide(Announce(event, reason, self.round, *place, worker.id, detail))

    def ignore(self, what: str) -> None:
        """Count an event that changes nothing: it is late, repeated or out of order."""
        self.ignored_events += 1
        self.ignored = what

    def due_or_set_alarm(self, at: float, now: float, waiting: str = "") -> bool:
        """Return whether `at` has come; if not, wake the job then and say what it waits for."""
        if now >= at:
            return True
        self.alarm = at if self.alarm is None else min(self.alarm, at)
        self.waiting = waiting or self.waiting
        return False

    def wait_for(self, what: str) -> None:
        """Say what the job waits for where no deadline ends the wait."""
        self.waiting = what

    def begin_pass(self) -> None:
        """Forget the alarm; the rules set it anew."""
        self.alarm, self.waiting = None, ""

    def enter_round(self, number: int) -> None:
        """Let later announcements carry this round's number."""
        self.round = number

    def take(self) -> list[Decision]:
        """Return the decisions of this event, and begin with none for the next."""
        taken, self.decisions = self.decisions, []
        return taken
