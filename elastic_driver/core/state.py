"""The job's books: what is known and decided so far, and the small acts that change it.

`Job` opens the door, `endings`, `placement`, `elastic` and `plain` decide; all of them write
here and nowhere else. Nothing in this module chooses what happens next. Times are monotonic
seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastic_driver.core.decisions import (
    Announce,
    Decision,
    Detail,
    EndJob,
    GiveOrder,
    PublishNotice,
    PublishWorld,
    SealRound,
)
from elastic_driver.core.documents import (
    Failure,
    Member,
    Order,
    RanksOrder,
    SlotInfo,
    StopWorkerOrder,
    World,
)
from elastic_driver.core.pending import Departure, Farewell, Inquiry, Replacement
from elastic_driver.core.rules.fleet import Fleet
from elastic_driver.core.rules.hosts import HostManager
from elastic_driver.core.rules.outcome import Budget, Kind, Loss, exit_status, first_failure
from elastic_driver.core.rules.ranks import Seat, assign
from elastic_driver.core.rules.rounds import Round, RoundState
from elastic_driver.core.rules.workers import ACTIVE, News, Worker, WorkerState, WorkerStateRegistry
from elastic_driver.core.tf_config import TfLayout
from elastic_driver.errors import ExitCode, NotEnoughSlotsError
from elastic_driver.settings import Settings


def seat(worker: Worker) -> Seat:
    """What the assignment of ranks needs to know about a worker."""
    return Seat(worker.id, worker.host, worker.slot, worker.age)


@dataclass
class JobState:
    """Everything the core knows about one job."""

    settings: Settings
    hosts: HostManager
    budget: Budget
    fleet: Fleet = field(default_factory=Fleet)
    registry: WorkerStateRegistry = field(default_factory=WorkerStateRegistry)
    round: Round = field(default_factory=lambda: Round(1, 0.0))
    kind: Kind = Kind.UNDECLARED
    tf: TfLayout | None = None  # TensorFlow tasks of the slots, with --tf-config
    target: int | None = None  # a wish for another size than max_np
    born: float | None = None  # time of the first event
    fruitful: bool = False  # somebody has finished a step in this job
    restart_count: int = 0  # how often workers were started again
    losses: list[Loss] = field(default_factory=list)  # since the last round was completed
    first_loss_at: float | None = None  # of `losses`
    last_loss_at: float | None = None
    vacated: list[tuple[str, int]] = field(default_factory=list)  # slots to fill again first
    mismatches: int = 0  # rounds broken for collectives that do not match, without a step since
    checking: dict[str, int] = field(default_factory=dict)  # host → position; being checked
    host_checks: int = 0  # begun so far (`rechecks`)
    held_since: float | None = None  # a host waits for a check since then
    ever_gone: set[str] = field(default_factory=set)  # hosts that discovery has removed
    inquiry: Inquiry | None = None  # where does everybody stand? (`stacks`)
    inquiries: int = 0  # asked so far
    replacing: Replacement | None = None  # a slow worker that is to go (`replacing`)
    replace_after: float = 0.0  # none begins earlier
    not_replaced: set[str] = field(default_factory=set)  # slow hosts for which there was no room
    departure: Departure | None = None  # the whole job was told to go (`departure`)
    farewell: Farewell | None = None  # the last checkpoint, since the last round (`farewell`)
    saves: int = 0  # asked for so far
    progress_asked: int = 0  # questions so far (`boundary`)
    first_success: float | None = None  # when the first member finished its script
    grace_over: bool = False  # the others' grace period has passed, and it was said
    end: EndJob | None = None
    # Set anew each time the job looks at itself:
    alarm: float | None = None  # the next moment at which time alone changes something
    waiting: str = ""  # what the job waits for
    some_leave: bool = False  # whether any worker may be marked as `leaving`
    capacity_changed: bool = True  # slots, agents, the wished size: who leaves, which agents?
    placement_due: bool = False  # the same, for workers that are to be started
    out: list[Decision] = field(default_factory=list)
    ignored_events: int = 0
    ignored: str = ""

    # ---- reading ---------------------------------------------------------------------

    @property
    def wanted(self) -> int | None:
        """How many workers to aim at; None: as many as there are slots."""
        return self.settings.max_np if self.target is None else self.target

    @property
    def size(self) -> int:
        """Members of the newest complete round that are still in it."""
        return self.registry.count(WorkerState.RUNNING)

    @property
    def leavers_unsettled(self) -> bool:
        """Whether slots, workers or wishes have changed, and who leaves is not marked anew yet."""
        return self.capacity_changed and self.first_success is None

    @property
    def finishing(self) -> bool:
        """Whether the job comes to its end: nothing is started any more."""
        return self.first_success is not None or self.departure is not None

    def at_most_wanted(self, need: int) -> int:
        """`need`, unless fewer workers are wished for: nobody waits for more than those."""
        return need if self.wanted is None else min(need, self.wanted)

    # ---- noting ----------------------------------------------------------------------

    def decide(self, decision: Decision) -> None:
        """Hand a decision to the shell, after those before it."""
        self.out.append(decision)

    def announce(
        self,
        event: str,
        reason: str,
        worker: Worker | None = None,
        host: str | None = None,
        **detail: Detail,
    ) -> None:
        """A line for the event log, about a worker, a host or the round."""
        if worker is None:
            self.decide(Announce(event, reason, self.round.number, host, detail=detail))
            return
        self.decide(
            Announce(
                event,
                reason,
                round=self.round.number,
                host=worker.host,
                slot=worker.slot,
                rank=worker.place.rank,
                pid=worker.pid or None,
                worker=worker.id,
                detail=detail,
            )
        )

    def ignore(self, what: str) -> None:
        """An event changed nothing: it is late, repeated or out of order."""
        self.ignored_events += 1
        self.ignored = what

    def passed(self, at: float, now: float, waiting: str) -> bool:
        """Whether the time has come; if not, wake up then, and say what the job waits for."""
        if now >= at:
            return True
        self.alarm = at if self.alarm is None else min(self.alarm, at)
        if waiting:
            self.waiting = waiting
        return False

    # ---- ending ----------------------------------------------------------------------

    def finish(self, exit_code: int, reason: str, failure: Failure | None = None) -> None:
        """End the job, once; everything after is ignored."""
        if self.end is not None:
            return
        self.announce("job_succeeded" if exit_code == 0 else "job_failed", reason)
        self.end = EndJob(exit_code, reason, failure)
        self.decide(self.end)
        self.alarm, self.waiting = None, ""

    def fail(self, reason: str) -> None:
        """End the job with the first failure of this round, and say why it goes no further."""
        failure = first_failure(self.losses)
        if failure is not None:
            code = failure.exit_code
            what = f"exit code {code}" if code >= 0 else f"signal {-code}"
            reason = f"rank {failure.rank} on {failure.host} failed first ({what}); {reason}"
        self.finish(exit_status(failure), reason, failure)

    def give_up(self, needed: int, available: int, waited: float, why: str = "") -> None:
        """End the job because workers, slots or the leaving of a round took too long."""
        error = NotEnoughSlotsError(needed=needed, available=available, waited=waited)
        reason = f"{why} for {waited:.0f} s; check the hosts" if why else str(error)
        self.finish(ExitCode.UNAVAILABLE, reason, first_failure(self.losses))

    # ---- workers ---------------------------------------------------------------------

    def order(self, host: str, order: Order, reason: str) -> None:
        """Hand an order to the host's agent, if it has one that is up."""
        agent = self.fleet.agents.get(host)
        if agent is not None and self.fleet.is_ready(host):
            self.decide(GiveOrder(host, agent.incarnation, order, reason))

    def stop_worker(self, worker: Worker, reason: str) -> None:
        """Tell a worker's agent to stop it; its exit is then expected."""
        if self.registry.apply(worker, News.TOLD_TO_STOP):
            grace = self.settings.stop_grace
            self.order(worker.host, StopWorkerOrder(worker.id, grace, reason), reason)

    def order_kill(self, worker: Worker, reason: str) -> None:
        """Have a worker that does not answer any more killed at once."""
        self.order(worker.host, StopWorkerOrder(worker.id, 0.0, reason), reason)

    def stop_all(self, reason: str) -> None:
        """Tell every worker to stop."""
        for worker in self.registry.having(*ACTIVE):
            self.stop_worker(worker, reason)

    # ---- rounds ----------------------------------------------------------------------

    def complete_round(self, workers: Iterable[Worker], now: float, reason: str) -> None:
        """Make these workers the round's members, and tell everyone."""
        by_id = {worker.id: worker for worker in workers}
        places = assign(seat(worker) for worker in by_id.values())
        members = []
        for worker_id, place in places:
            worker = by_id[worker_id]
            self.registry.admit(worker, place)
            members.append(Member(worker_id, place, worker.version, worker.clean))
        for worker in self.registry.workers.values():
            worker.founder = worker.awaited = False
        self.round.members = tuple(worker_id for worker_id, _ in places)
        self.round.enter(RoundState.COMPLETE, now)
        self.farewell = None  # training goes on
        self.decide(PublishWorld(World(self.round.number, tuple(members), reason), reason))
        self._tell_ranks(places, reason)
        hosts = places[-1][1].node_count if places else 0
        self.announce(
            "round_completed",
            f"{len(members)} workers: {reason}",
            size=len(members),
            hosts=hosts,
        )

    def _tell_ranks(self, places: Sequence[tuple[str, SlotInfo]], reason: str) -> None:
        ranks: dict[str, dict[str, int]] = {}
        for worker_id, place in places:
            ranks.setdefault(place.host, {})[worker_id] = place.rank
        for host, ranks_there in ranks.items():
            self.order(host, RanksOrder(self.round.number, ranks_there), reason)

    def forget_losses(self) -> None:
        """What went wrong before is settled; the next failure is a first one again."""
        self.losses.clear()
        self.first_loss_at = None
        self.registry.forget_ended()

    def close_round(self, now: float, reason: str, *, at_boundary: bool) -> bool:
        """Begin to close the round; False (and the end of the job) at the reset limit.

        The limit is checked here, not at the next completion: nobody should stop training
        for a round that may not come.
        """
        limit = self.settings.reset_limit
        if limit is not None and self.round.number > limit and not self.finishing:
            self.fail(
                f"round {self.round.number + 1} would exceed the reset limit of {limit} "
                f"({reason}); raise --reset-limit"
            )
            return False
        self.round.enter(RoundState.CLOSING, now)
        self.round.at_boundary = at_boundary
        return True

    def leave_round(self, now: float, reason: str) -> None:
        """Tell the members to leave at once, also where they were to leave at a boundary."""
        if self.round.state is RoundState.COMPLETE:
            if not self.close_round(now, reason, at_boundary=False):
                return
        elif self.round.state is RoundState.CLOSING and self.round.at_boundary:
            self.round.at_boundary, self.round.since = False, now
        else:
            return
        self.decide(PublishNotice(self.round.number, None, reason))

    def left_early(self, worker: Worker, now: float, *, running: bool) -> None:
        """A worker that was to leave is gone before its time: no failure, but its peers feel it.

        `running`: it was in the round's process group and took that down.
        """
        reason = f"{worker.id} is gone ({worker.leaving})"
        if self.kind is not Kind.ELASTIC:
            self.round.broken = reason
        elif running:
            self.leave_round(now, reason)

    def open_next_round(self, now: float, reason: str) -> None:
        """Everybody has left: seal the round and let the next one form."""
        self.round.enter(RoundState.CLOSED, now)
        self.decide(SealRound(self.round.number, reason))
        self.announce("round_closed", reason)
        self.round = Round(self.round.number + 1, now)
        self.capacity_changed = True
        self.announce("round_opened", reason)
