"""The state of every worker process, and the news that may change it.

The transition table is the specification: news that the table does not list for a worker's state
changes nothing (`docs/states.md` is written from the same table). Decides nothing
about rounds, hosts or budgets.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from elastic_driver.contract import worker_id
from elastic_driver.job.ranks import NOT_TOLD, Seat, assign
from elastic_driver.kernel.tables import index, saved
from elastic_driver.words import wire_events as ev
from elastic_driver.words.orders import StartWorkerOrder
from elastic_driver.words.world import SlotInfo


class WorkerState(str, Enum):
    """The stages of a worker process's life."""

    STARTING = "starting"  # ordered; the process may be up, it has not reported yet
    READY = "ready"  # in no process group, waits for the next round
    RUNNING = "running"  # a member of the current round that has not left it
    ENDING = "ending"  # its script is over and it is in no world; its process has not ended yet
    STOPPING = "stopping"  # told to stop; its exit, whatever the code, is expected
    LOST = "lost"  # given up; its process may still be there
    SUCCESS = "success"  # exited 0 by itself
    FAILURE = "failure"  # failed or lost, and gone
    STOPPED = "stopped"  # gone as it was told to
    WARMING = "warming"  # a spare that runs the script and has not reported yet
    SPARE = "spare"  # a spare that can take a slot at once


class WorkerNews(str, Enum):
    """News of a worker, from itself, its agent or the job."""

    READY = "ready"
    ADMITTED = "admitted"  # the job made it a member of a round
    PROMOTED = "promoted"  # the job gave a slot to a spare
    ENDING = "ending"  # it has left its world for good
    TOLD_TO_STOP = "told to stop"
    RECALLED = "recalled"  # by a resumed driver, which may need its state
    LOST = "lost"
    EXITED_ZERO = "exited 0"
    EXITED_NONZERO = "exited non-zero"


(
    STARTING, READY, RUNNING, ENDING, STOPPING, LOST, SUCCESS, FAILURE, STOPPED, WARMING, SPARE
) = WorkerState  # fmt: skip
_N = WorkerNews
_ENDS = {_N.TOLD_TO_STOP: STOPPING, _N.LOST: LOST}
_ENDS |= {_N.EXITED_ZERO: SUCCESS, _N.EXITED_NONZERO: FAILURE}

TRANSITIONS: dict[WorkerState, dict[WorkerNews, WorkerState]] = {
    # A plain worker never says READY and is admitted as it starts.
    STARTING: {_N.READY: READY, _N.ADMITTED: RUNNING, **_ENDS},
    READY: {_N.ADMITTED: RUNNING, _N.ENDING: ENDING, **_ENDS},
    RUNNING: {_N.READY: READY, _N.ENDING: ENDING, **_ENDS},
    ENDING: {**_ENDS},
    STOPPING: {_N.RECALLED: READY, _N.EXITED_ZERO: STOPPED, _N.EXITED_NONZERO: STOPPED},
    # It was given up and replaced: too late to succeed.
    LOST: {_N.EXITED_ZERO: FAILURE, _N.EXITED_NONZERO: FAILURE},
    SUCCESS: {},
    FAILURE: {},
    STOPPED: {},
    # A spare ends for no good reason: it has not taken part.
    WARMING: {_N.READY: SPARE, **_ENDS, _N.EXITED_ZERO: FAILURE},
    SPARE: {_N.PROMOTED: READY, **_ENDS, _N.EXITED_ZERO: FAILURE},
}

ACTIVE = (STARTING, READY, RUNNING, ENDING)  # takes part, is going to, or is about to end
SPARES = (WARMING, SPARE)
OCCUPYING = (*ACTIVE, *SPARES, STOPPING, LOST)  # its process may exist


@dataclass(slots=True)
class Worker:
    """One worker process, as far as the job knows."""

    id: str
    host: str
    slot: int  # of a spare: the one it was started for
    number: int  # order of start, or of promotion, in the whole job; 0: an unknown driver's
    founder: bool = False  # started for a round that is not complete yet
    awaited: bool = False  # a founder for which that round waits
    order: StartWorkerOrder | None = None  # of its process; None once that is started
    place: SlotInfo = field(init=False)  # its rank in the current round, or its first one
    state: WorkerState = STARTING
    pid: int = 0  # 0: not known yet
    cpus: str = ""  # that it is bound to; empty: to none
    admitted: int | None = None  # seniority: order of first admission to a round
    version: int = -1  # committed steps it reported with its last READY
    clean: bool = True
    phase: int = 0  # the number of the training function's call that it is in
    told: int = NOT_TOLD  # the rank that its script knew before its first round
    left: int = 0  # the round it reported to have left with its last READY
    blamed: bool = False  # its failure was counted against its host
    failed: bool = False  # an exception of its own has ended its script
    over: bool = False  # its script has ended, and not by an exception of its own
    left_behind: bool = False  # it is ending, and a round was formed without it
    stepped_in: int = 0  # the last round in which it has finished a step; 0: in none
    leaving: str = ""  # the reason why it has to leave at the next chance; empty: it stays
    spare: bool = False  # it is in no slot, and was in none when it was told to stop
    bound: bool = False  # to the device of its slot
    killed: bool = False  # it was silent, so it is given no time to stop

    @property
    def age(self) -> tuple[bool, int]:
        """The sort key of workers from the oldest member to the newest newcomer."""
        return (False, self.admitted) if self.admitted is not None else (True, self.number)

    @property
    def seat(self) -> Seat:
        """The worker's part in the assignment of ranks."""
        told = self.told if self.admitted is None else NOT_TOLD
        return Seat(self.id, self.host, self.slot, self.age, told)

    @property
    def expected_seat(self) -> Seat:
        """The same; what a worker that was in no round yet is told counts, if it has not said."""
        if self.admitted is not None or self.told != NOT_TOLD:
            return self.seat
        return self.seat._replace(told=self.place.rank)

    @property
    def stepped(self) -> bool:
        """Return whether it has finished a training step."""
        return self.stepped_in > 0

    @property
    def is_member(self) -> bool:
        """Return whether the worker is, or was about to be, a member of the present world."""
        return self.admitted is not None or self.founder


@dataclass(slots=True)
class Workers:
    """Every worker of the job: those with a process, and those who ended in this round.

    The name and the idea are those of Horovod's registry.
    """

    workers: dict[str, Worker] = saved(factory=dict)
    _by_state: dict[WorkerState, dict[str, Worker]] = index(
        "workers", name="by_state", factory=lambda: {state: {} for state in WorkerState}
    )
    # By (host, slot).
    _incarnations: dict[tuple[str, int], int] = saved(factory=dict, name="incarnations")
    _by_host: dict[str, dict[str, Worker]] = index("workers", name="by_host")
    _first: int = saved(1, name="first")  # the least incarnation that this driver gives
    started: int = saved(0)  # workers ever ordered
    _admissions: int = saved(0, name="admissions")

    def begin_term(self, first: int) -> None:
        """Number workers anew for this driver, so that no name is used twice in a run."""
        self._first = first

    def add(self, host: str, slot: int, *, founder: bool, awaited: bool) -> Worker:
        """Record the next worker of a slot; `place` follows before anything else reads it."""
        worker = self._add(host, slot, STARTING)
        worker.founder, worker.awaited = founder, awaited
        return worker

    def add_spare(self, host: str, slot: int) -> Worker:
        """Record a new spare, started for this slot; `place` follows as for `add`."""
        worker = self._add(host, slot, WARMING)
        worker.spare = True
        return worker

    def add_stranger(self, host: str, name: str, pid: int) -> Worker | None:
        """Record a worker that an earlier driver started and did not write down.

        It has the slot of its name, or is a spare if another worker has that slot. None if this
        is not the name of a new worker.
        """
        slot = name.rsplit(".", 2)[1:2]
        if name in self.workers or not slot or not slot[0].isdecimal():
            return None
        worker = Worker(name, host, int(slot[0]), 0, pid=pid)
        worker.place = assign([worker.seat])[0][1]
        worker.spare = any(worker.slot == other.slot for other in self.in_slots(host))
        self._record(worker)
        return worker

    def _add(self, host: str, slot: int, state: WorkerState) -> Worker:
        incarnation = max(self._incarnations.get((host, slot), 0) + 1, self._first)
        self._incarnations[host, slot] = incarnation
        self.started += 1
        name = worker_id(host, slot, incarnation)
        worker = Worker(name, host, slot, self.started, state=state)
        self._record(worker)
        return worker

    def _record(self, worker: Worker) -> None:
        self.workers[worker.id] = self._by_state[worker.state][worker.id] = worker
        self._by_host.setdefault(worker.host, {})[worker.id] = worker

    def promote(self, spare: Worker, slot: int, *, founder: bool) -> None:
        """Give this slot to a spare that is ready, as the newest worker that waits for a round."""
        if not self.apply(spare, WorkerNews.PROMOTED):
            raise ValueError(f"{spare.id} is {spare.state.value} and cannot take a slot")
        self.started += 1
        spare.number, spare.slot, spare.spare, spare.founder = self.started, slot, False, founder

    def record_order(self, worker: Worker, order: StartWorkerOrder) -> None:
        """Record the order that starts the worker, and the place that it gets."""
        worker.place, worker.order = order.place, order

    def expect(self, worker: Worker, place: SlotInfo) -> None:
        """Record the place that a worker, which boots, is told in place of that of its order."""
        worker.place = place

    def apply(self, worker: Worker, news: WorkerNews) -> bool:
        """Change the worker's state by the table; return False if it does not list `news`."""
        after = TRANSITIONS[worker.state].get(news)
        if after is None:
            return False
        if after is not worker.state:
            del self._by_state[worker.state][worker.id]
            self._by_state[after][worker.id] = worker
            worker.state = after
            if after not in OCCUPYING:
                del self._by_host[worker.host][worker.id]
        return True

    def record_end(self, worker: Worker, exit_code: int, *, as_told: bool) -> bool:
        """Record that the worker's process is gone; return False if that was known."""
        if as_told:
            self.apply(worker, WorkerNews.TOLD_TO_STOP)
        news = WorkerNews.EXITED_ZERO if exit_code == 0 else WorkerNews.EXITED_NONZERO
        return self.apply(worker, news)

    def admit(self, worker: Worker, place: SlotInfo) -> None:
        """Make a worker a member of the round that is being completed; raise if it cannot be one.

        A worker that has already ended keeps its state: a plain round is announced late.
        """
        self._note_member(worker)
        worker.place = place
        if worker.state in OCCUPYING and not self.apply(worker, WorkerNews.ADMITTED):
            raise ValueError(f"{worker.id} is {worker.state.value} and cannot join a round")

    def _note_member(self, worker: Worker) -> None:
        if worker.admitted is None:
            self._admissions += 1
            worker.admitted = self._admissions

    def age_by_rank(self, members: list[Worker]) -> None:
        """Keep the order of the members of a host in later rounds.

        A newcomer that was told a rank may have come between two that are older.
        """
        by_host: dict[str, list[Worker]] = {}
        for worker in sorted(members, key=lambda worker: worker.place.rank):
            by_host.setdefault(worker.host, []).append(worker)
        for there in by_host.values():
            ages = sorted(worker.admitted or 0 for worker in there)
            for worker, age in zip(there, ages, strict=True):
                worker.admitted = age

    def with_process(self, event: ev.Event, name: str) -> Worker:
        """Return the worker that an event is about; raise `ev.StaleEvent` if it has no process."""
        worker = self.workers.get(name)
        if worker is None or worker.state not in OCCUPYING:
            raise ev.StaleEvent(f"{type(event).__name__} of {name}, which is gone or unknown")
        return worker

    def record_start(self, worker: Worker, pid: int, cpus: str = "") -> None:
        """Record the worker's process, and the processors that it is bound to."""
        worker.pid, worker.order, worker.cpus = pid, None, cpus

    def record_ready(self, worker: Worker, event: ev.WorkerReady) -> None:
        """Record that the worker waits for a round; raise `ev.StaleEvent` if it cannot."""
        if not self.apply(worker, WorkerNews.READY):
            raise ev.StaleEvent(f"{worker.id} is {worker.state.value}, not awaited as READY")
        worker.left, worker.version, worker.clean = event.round, event.version, event.clean
        worker.phase = event.phase
        if event.round:
            self._note_member(worker)  # perhaps of a round that is not in the books
        worker.bound = event.bound
        if worker.admitted is None:
            worker.told = event.told

    def record_ending(self, worker: Worker, *, failed: bool) -> None:
        """Record that the worker's script is over; raise `ev.StaleEvent` if it cannot be."""
        if not self.apply(worker, WorkerNews.ENDING):
            raise ev.StaleEvent(f"{worker.id} is {worker.state.value}, its script cannot end")
        worker.failed, worker.over = failed, not failed

    def blame(self, worker: Worker) -> bool:
        """Record that its failure is counted against its host; False if that is known."""
        known, worker.blamed = worker.blamed, True
        return not known

    def leave_behind(self, worker: Worker) -> bool:
        """Record that a round is formed without a worker that is ending; False if that is known."""
        known, worker.left_behind = worker.left_behind, True
        return not known

    def record_step(self, worker: Worker, round_id: int) -> None:
        """Record that the worker has finished a step in a round; `ev.StaleEvent` if not new."""
        if round_id <= worker.stepped_in:
            raise ev.StaleEvent(f"{worker.id} has said before that it stepped in round {round_id}")
        worker.stepped_in = round_id

    def mark_leaving(self, worker: Worker, reason: str) -> None:
        """Record why the worker has to leave at the next chance; empty: it stays."""
        worker.leaving = reason

    def mark_killed(self, worker: Worker) -> None:
        """Record that the worker is given no time to stop."""
        worker.killed = True

    def forget_founders(self) -> None:
        """Record that the round is complete: no worker is its founder or awaited any more."""
        for worker in self.workers.values():
            worker.founder = worker.awaited = False

    def forget_ended(self) -> None:
        """Drop the records of workers that are gone; their end no longer matters."""
        for state in (SUCCESS, FAILURE, STOPPED):
            for name in self._by_state[state]:
                del self.workers[name]
            self._by_state[state].clear()

    def count(self, *states: WorkerState) -> int:
        """Return how many workers are in these states."""
        return sum(len(self._by_state[state]) for state in states)

    def having(self, *states: WorkerState) -> Iterator[Worker]:
        """Yield workers in these states, in a stable order; safe against changes meanwhile."""
        for state in states:
            yield from tuple(self._by_state[state].values())

    def active(self) -> int:
        """Return how many workers take part or are going to, without those that have to leave."""
        return sum(1 for worker in self.having(*ACTIVE) if not worker.leaving)

    def on_host(self, host: str) -> tuple[Worker, ...]:
        """Return the workers whose process may exist on this host."""
        return tuple(self._by_host.get(host, {}).values())

    def in_slots(self, host: str) -> list[Worker]:
        """Return the workers that occupy the slots of this host: all but the spares."""
        return [worker for worker in self._by_host.get(host, {}).values() if not worker.spare]
