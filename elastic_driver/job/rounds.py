"""Rounds: in each, workers become one process group.

    FORMING → COMPLETE → CLOSING → CLOSED, then the next round is FORMING

`membership` and `plain` decide who may be a member and when a round is complete; this module keeps
the rounds in order. `Rule` is the base of every rule: it names the tables that all of them read.
Every chapter above this one consists of rules. Times are monotonic seconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from elastic_driver.contract import host_of_worker
from elastic_driver.job.capacity import Capacity
from elastic_driver.job.decisions import PublishNotice, PublishWorld, SealRound
from elastic_driver.job.fleet import Effects, Fleet
from elastic_driver.job.hosts import Hosts
from elastic_driver.job.outcome import Ending, Outcome
from elastic_driver.job.ranks import NOT_TOLD, Seat, assign
from elastic_driver.job.workers import RUNNING, Worker, Workers
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.settings import Settings
from elastic_driver.words import counted
from elastic_driver.words import log_events as log
from elastic_driver.words.orders import MAX_PEERS, RanksOrder, World
from elastic_driver.words.world import Member, Standings, standings_of

PUBLISHED_AGAIN = "published again by the driver that goes on"


class RoundState(str, Enum):
    """The stages of a round."""

    FORMING = "forming"  # waits for hosts, agents and workers
    COMPLETE = "complete"  # published; its members train
    CLOSING = "closing"  # its members are leaving, or being stopped
    CLOSED = "closed"  # all members left; its keys are gone


FORMING, COMPLETE, CLOSING, CLOSED = RoundState
ROUND_TRANSITIONS: dict[RoundState, tuple[RoundState, ...]] = {
    FORMING: (COMPLETE, CLOSING),  # broken before it began
    COMPLETE: (CLOSING,),
    CLOSING: (CLOSED,),
    CLOSED: (),
}


@dataclass(slots=True)
class Round:
    """One round; `since` is the time at which it entered its present state."""

    number: int
    since: float
    state: RoundState = FORMING
    members: tuple[str, ...] = ()  # workers it was completed with, by rank
    hosts: tuple[str, ...] = ()  # of the members, by node rank
    standings: tuple[Standings, ...] = ()  # of the members, when it was completed
    notice: PublishNotice | None = None  # its members are told to leave at once
    at_boundary: bool = False  # CLOSING: its members finish a common step first
    stepped: bool = False  # a member has finished a step in it
    repairs: bool = False  # all members take over the state of rank 0
    gone: int = 0  # committed steps of a state that none of its members holds
    told: bool = False  # people know that its workers run
    broken: str = ""  # a plain round: why it cannot go on though no worker failed
    founders: tuple[str, ...] = ()  # the workers started for it, by their rank then
    founded_at: float | None = None
    need: int = 0  # the number of workers it needs, fixed when it was founded
    waits: dict[str, float] = field(default_factory=dict)  # what it waits for → since when

    def enter(self, state: RoundState, now: float) -> None:
        """Change the state; raise ValueError if the table does not allow it."""
        if state not in ROUND_TRANSITIONS[self.state]:
            raise ValueError(f"round {self.number} cannot go from {self.state} to {state}")
        self.state, self.since = state, now

    def wait_for(self, what: str, now: float) -> float:
        """Begin to wait for `what`, unless the round does so already; return since when it does."""
        return self.waits.setdefault(what, now)

    def stop_waiting(self, what: str) -> None:
        """End the wait for `what`; the next one begins anew."""
        self.waits.pop(what, None)


@dataclass(slots=True)
class Rounds:
    """The rounds of one job, one after the other."""

    settings: Settings
    effects: Effects
    fleet: Fleet
    workers: Workers
    capacity: Capacity
    outcome: Outcome
    current: Round = saved(factory=lambda: Round(1, 0.0))
    last_hosts: tuple[str, ...] = saved(())  # of the newest round that was complete, by node rank
    # Why the ranks have to take over the state of rank 0; empty: they need not.
    repair: str = saved("")
    # Rounds that were closed for a request; they do not count as resets.
    _requested: int = saved(0, name="requested")
    # A round that workers have been in, though the books do not have it.
    _outrun_by: int = saved(0, name="outrun_by")

    @property
    def newest(self) -> int:
        """The number of the newest round that any worker may have been in."""
        formed = self.current.number - (self.current.state is FORMING)
        return max(formed, self._outrun_by)

    @property
    def resets(self) -> int:
        """The membership changes so far that count towards `--reset-limit`."""
        return max(0, self.current.number - 1 - self._requested)

    def members(self) -> list[Worker]:
        """Return the members of the present round, by rank, without those forgotten since."""
        known = self.workers.workers
        return [known[name] for name in self.current.members if name in known]

    def begin(self, now: float) -> None:
        """Open the first round, at `now`."""
        self.current.since = now
        self.effects.announce(log.RoundOpened(), "the job begins")

    def record_founders(self, workers: Iterable[Worker], need: int, now: float) -> None:
        """Record the workers that were started for the present round."""
        by_rank = sorted(workers, key=lambda worker: worker.place.rank)
        self.current.founders = tuple(worker.id for worker in by_rank)
        self.current.founded_at, self.current.need = now, min(need, len(by_rank))

    def tell_running(self) -> None:
        """Announce once that all processes of the round run; its completion is no news then."""
        current = self.current
        if not current.told:
            current.told = True
            hosts = {self.workers.workers[worker].host for worker in current.founders}
            what = "every process was started"
            size = len(current.founders)
            self.effects.announce(log.ProcessesStarted(size=size, hosts=len(hosts)), what)

    def complete(self, workers: Iterable[Worker], now: float, reason: str) -> None:
        """Make these workers the round's members, and publish its world."""
        by_id = {worker.id: worker for worker in workers}
        anew = all(worker.admitted is None for worker in by_id.values())
        seats = (w.expected_seat if anew else w.seat for w in by_id.values())
        if self.repair:  # rank 0 has the state that all take over
            seats = (seat._replace(told=NOT_TOLD) for seat in seats)
        places = assign(seats)
        members = []
        ranks = dict[str, dict[str, int]]()
        for worker_id, place in places:
            worker = by_id[worker_id]
            self.workers.admit(worker, place)
            members.append(Member(worker_id, place, worker.version, worker.clean, worker.phase))
            ranks.setdefault(place.host, {})[worker_id] = place.rank
        self.workers.age_by_rank(list(by_id.values()))
        self.workers.forget_founders()
        current = self.current
        current.members = tuple(worker_id for worker_id, _ in places)
        current.enter(COMPLETE, now)
        current.repairs = bool(self.repair)
        current.gone = self._gone(members)
        self._publish(tuple(members), reason)
        current.hosts, current.standings = tuple(ranks), standings_of(members)
        self.last_hosts = current.hosts
        for node, (host, ranks_there) in enumerate(ranks.items()):
            order = RanksOrder(current.number, ranks_there, self._peers(node))
            self.effects.give(host, order, reason)
        size = len(members)
        what = f"{counted(len(members), 'worker')}: {reason}"
        if self.capacity.wanted in (None, size):
            self.capacity.mark_request_settled()
        told = True if current.told and not self.outcome.elastic else None
        self.effects.announce(log.RoundCompleted(size=size, hosts=len(ranks), told=told), what)

    def _gone(self, members: Sequence[Member]) -> int:
        """Return the committed steps of a state that no member holds; 0: one does, or none was."""
        steps, phase = self.outcome.committed, self.outcome.committed_in
        # Those in a later training function have a state that has committed nothing yet.
        if any(member.version > 0 or member.phase > phase for member in members):
            return 0
        if steps > self.outcome.on_disk:
            then = "goes on from its newest checkpoint, or ends if it has none"
            if self.settings.restart_from_scratch:
                then = "goes on from its newest checkpoint, or begins anew if it has none"
            why = f"every worker that held it is gone; the job {then}"
            self.effects.announce(log.StateLost(step=steps), why)
        return steps

    def _publish(self, members: Sequence[Member], reason: str) -> None:
        current, anew = self.current, self.settings.restart_from_scratch
        world = World(current.number, members, reason, current.repairs, current.gone, anew)
        self.effects.decide(PublishWorld(world, reason))

    def _peers(self, node: int) -> tuple[tuple[str, int], ...]:
        """Return where other agents of the round answer probes, evenly spread from this node on."""
        hosts, agents = self.current.hosts, self.fleet.agents
        most = min(MAX_PEERS, len(hosts) - 1)
        others = (
            hosts[(node + 1 + n * (len(hosts) - 1) // most) % len(hosts)] for n in range(most)
        )
        found = (agents[host] for host in others if host in agents)
        return tuple((agent.address, agent.probe_port) for agent in found if agent.probe_port)

    # ---- after a driver has died -----------------------------------------------------------

    def resume(self, now: float) -> None:
        """Publish again what the members may not have read.

        A round whose members have finished no step may have no process group yet, and the keys by
        which they meet were in the store of the driver that died. So it is left at once.
        """
        current, outcome = self.current, self.outcome
        if current.members and current.state in (COMPLETE, CLOSING):
            members = self._members()
            self._publish(members, PUBLISHED_AGAIN)
        if current.notice is not None:
            self.effects.decide(current.notice)
        elif outcome.elastic and not current.stepped and outcome.first_success is None:
            self.leave(now, "its members had finished no step when the driver died")

    def give_ranks(self, host: str, reason: str) -> None:
        """Tell a host's agent the ranks of its workers in the present round again."""
        there = [w for w in self.workers.on_host(host) if w.state is RUNNING]
        if there and host in self.current.hosts:
            peers = self._peers(self.current.hosts.index(host))
            ranks = {worker.id: worker.place.rank for worker in there}
            self.effects.give(host, RanksOrder(self.current.number, ranks, peers), reason)

    def continue_after(self, number: int) -> None:
        """Continue after a round that workers have been in, although the journal lacks it."""
        self._outrun_by = max(self._outrun_by, number)
        if self.current.state is FORMING and self.current.number <= number:
            self.current.number = number + 1
            self.effects.enter_round(self.current.number)

    def _members(self) -> tuple[Member, ...]:
        """Return the members as they were when the round was completed."""
        names, known = self.current.members, self.workers.workers
        standings = (s for s in self.current.standings for _ in range(s.count))
        slots = (known[n].slot if n in known else int(n.rsplit(".", 2)[1]) for n in names)
        seats = (
            Seat(name, host_of_worker(name), slot, (False, rank))
            for rank, (name, slot) in enumerate(zip(names, slots, strict=True))
        )
        places = zip(assign(seats), standings, strict=True)
        return tuple(
            Member(name, place, s.version, s.clean, s.phase) for (name, place), s in places
        )

    def close(self, now: float, reason: str, *, at_boundary: bool) -> bool:
        """Begin to close the round; return False, and end the job, at the reset limit.

        The limit is checked here, not at the next completion, so that no worker stops training for
        a round that cannot come. A change for a repair does not count, like one that was requested.
        """
        limit, begun = self.settings.reset_limit, self.current.repairs and not self.current.stepped
        requested = self.capacity.requested or (bool(self.repair) and not begun)
        over_it = limit is not None and self.resets >= limit
        if over_it and not requested and not self.outcome.finishing:
            over = f"round {self.current.number + 1} would exceed the reset limit of {limit}"
            self.outcome.fail(f"{over} ({reason}); raise --reset-limit")
            return False
        self.current.enter(CLOSING, now)
        self.current.at_boundary = at_boundary
        self._requested += requested
        if not at_boundary:
            self.capacity.mark_request_settled()
        return True

    def leave(self, now: float, reason: str, *, silent: bool = False) -> None:
        """Tell the members to leave at once, even if they were to leave at a boundary.

        `silent`: for a host that answers no more.
        """
        if self.current.state is COMPLETE:
            if not self.close(now, reason, at_boundary=False):
                return
        elif self.current.state is CLOSING and self.current.at_boundary:
            self.current.at_boundary, self.current.since = False, now
        else:
            return
        self.current.notice = PublishNotice(self.current.number, None, reason, silent)
        self.effects.decide(self.current.notice)

    def break_for_early_end(self, worker: Worker, now: float, *, running: bool) -> None:
        """Break the round of a worker that was to leave and ended early; this is no failure.

        `running`: it was in the round's process group, which is broken now.
        """
        reason = f"{worker.id} is gone ({worker.leaving})"
        if not self.outcome.elastic:
            self.current.broken = reason
        elif running:
            self.leave(now, reason)

    def note_step(self) -> bool:
        """Record that a member has finished a step; return whether it is the first step.

        That proves that all members have the same state.
        """
        first, self.current.stepped = not self.current.stepped, True
        if first and self.current.repairs:
            self.repair = ""
        return first

    def want_repair(self, reason: str) -> None:
        """Note that the members of the next round are to take over the state of its rank 0."""
        self.repair = reason

    def wait_again(self, now: float) -> None:
        """Restart the wait for the members to leave, or for the start of the job."""
        self.current.since = now

    def open_next(self, now: float, reason: str) -> None:
        """Seal the round that all members have left, and let the next one form."""
        self.current.enter(CLOSED, now)
        self.effects.decide(SealRound(self.current.number, reason))
        self.effects.announce(log.RoundClosed(step=self.outcome.committed or None), reason)
        self.current = Round(self.newest + 1, now)
        self.effects.enter_round(self.current.number)
        self.capacity.note_change()
        self.effects.announce(log.RoundOpened(), reason)


@dataclass(slots=True)
class Rule:
    """A part of the job that decides; it reads these parts, and writes only its own fields."""

    settings: Settings
    effects: Effects
    hosts: Hosts
    fleet: Fleet
    workers: Workers
    capacity: Capacity
    outcome: Outcome
    ending: Ending
    rounds: Rounds

    def advance(self, now: float) -> Iterable[Wait]:
        """Draw the consequences of the present state; called again until nothing changes.

        Return what the rule waits for: it is called again when the first of these waits is over.
        """
        return ()

    def is_needed(self, host: str) -> bool:
        """Return whether the other usable hosts are too few for the job to go on without it.

        An elastic job goes on with `min_np` workers, a plain one with the number wanted.
        """
        wanted, need = self.capacity.wanted, self.capacity.least
        if wanted is not None and not self.outcome.elastic:
            need = max(need, wanted)
        return self.hosts.slots_without(host) < need
