"""The effects of one event: decisions, orders to agents, the next deadline, the present wait.

Every rule writes here through these methods. Times are monotonic seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from elastic_driver.core.decisions import Announce, Decision, GiveOrder
from elastic_driver.core.documents import Order, StopWorkerOrder
from elastic_driver.core.rules.fleet import Fleet
from elastic_driver.core.rules.workers import Worker, WorkerNews, WorkerStateRegistry
from elastic_driver.kernel.log import LogEvent
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait, earliest, reason
from elastic_driver.settings import Settings

About: TypeAlias = Worker | str | None  # a worker, the name of a host, or the round


@dataclass(slots=True)
class Effects:
    """The decisions so far, and what the job waits for."""

    settings: Settings
    fleet: Fleet
    workers: WorkerStateRegistry
    round: int = saved(1)  # the number that announcements carry
    decisions: list[Decision] = field(default_factory=list)  # upon the present event
    alarm: float | None = saved(None)  # the next moment at which time alone changes something
    waiting: str = saved("")  # what the job waits for
    ignored_events: int = saved(0)
    ignored: str = saved("")  # the last event that changed nothing

    def decide(self, decision: Decision) -> None:
        """Add a decision."""
        self.decisions.append(decision)

    def announce(self, what: LogEvent, reason: str, about: About = None) -> None:
        """Add a line for the event log."""
        if isinstance(about, Worker):
            slot = None if about.spare else about.slot
            rank = None if about.spare or not about.number else about.place.rank
            place = (about.host, slot, rank, about.pid or None, about.id)
            self.decide(Announce(what, reason, self.round, *place))
        else:
            self.decide(Announce(what, reason, self.round, about))

    def ignore(self, what: str) -> None:
        """Count an event that changes nothing: it is late, repeated or out of order."""
        self.ignored_events += 1
        self.ignored = what

    def wait(self, waits: Sequence[Wait]) -> None:
        """Wake the job at the earliest of these waits, and say what it waits for."""
        self.alarm, self.waiting = earliest(waits), reason(waits)

    def enter_round(self, number: int) -> None:
        """Let later announcements carry this round's number."""
        self.round = number

    def take(self) -> list[Decision]:
        """Return the decisions of this event, and forget them."""
        taken, self.decisions = self.decisions, []
        return taken

    # ---- orders to agents ----------------------------------------------------------------

    def give(self, host: str, order: Order, reason: str, *, repeated: bool = False) -> None:
        """Hand an order to the host's agent, if it has one that is up.

        `repeated`: an earlier driver gave it, and the agent may not have got it.
        """
        if self.fleet.is_ready(host):
            incarnation = self.fleet.agents[host].incarnation
            self.decide(GiveOrder(host, incarnation, order, reason, repeated))

    def stop(self, worker: Worker, reason: str) -> None:
        """Tell a worker's agent to stop it; its exit is then expected."""
        if self.workers.apply(worker, WorkerNews.TOLD_TO_STOP):
            self.order_stop(worker.host, worker.id, reason)

    def order_stop(self, host: str, worker: str, reason: str) -> None:
        """Tell a host's agent to stop a worker, by its name."""
        self.give(host, StopWorkerOrder(worker, self.settings.stop_grace, reason), reason)

    def kill(self, worker: Worker, reason: str) -> None:
        """Have a worker that does not answer any more killed at once."""
        self.workers.mark_killed(worker)
        self.give(worker.host, StopWorkerOrder(worker.id, 0.0, reason), reason)
