"""The state of every worker process, and the news that may change it.

The transition table is the specification: news that the table does not list for a worker's state
changes nothing and is counted (`docs/states.md` is written from the same table). Decides nothing
about rounds, hosts or budgets.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from elastic_driver.core.documents import SlotInfo
from elastic_driver.core.events import WorkerReady
from elastic_driver.core.rules.ranks import Seat


class WorkerState(str, Enum):
    """The stages of a worker process's life."""

    STARTING = "starting"  # ordered; the process may be up, it has not spoken yet
    READY = "ready"  # in no process group, waits for the next round
    RUNNING = "running"  # a member of the current round that has not left it
    STOPPING = "stopping"  # told to stop; its exit, whatever the code, is expected
    LOST = "lost"  # given up; its process may still be there
    SUCCESS = "success"  # exited 0 by itself
    FAILURE = "failure"  # failed or lost, and gone
    STOPPED = "stopped"  # gone as it was told to


class WorkerNews(str, Enum):
    """News of a worker: something that it did, or that was done to it."""

    READY = "ready"
    ADMITTED = "admitted"  # the core made it a member of a round
    TOLD_TO_STOP = "told to stop"
    LOST = "lost"
    EXITED_ZERO = "exited 0"
    EXITED_NONZERO = "exited non-zero"


STARTING, READY, RUNNING, STOPPING, LOST, SUCCESS, FAILURE, STOPPED = WorkerState
_N = WorkerNews
_ENDS = {_N.TOLD_TO_STOP: STOPPING, _N.LOST: LOST}
_ENDS |= {_N.EXITED_ZERO: SUCCESS, _N.EXITED_NONZERO: FAILURE}

TRANSITIONS: dict[WorkerState, dict[WorkerNews, WorkerState]] = {
    # A plain worker never says READY and is admitted as it starts.
    STARTING: {_N.READY: READY, _N.ADMITTED: RUNNING, **_ENDS},
    READY: {_N.ADMITTED: RUNNING, **_ENDS},
    RUNNING: {_N.READY: READY, **_ENDS},
    STOPPING: {_N.EXITED_ZERO: STOPPED, _N.EXITED_NONZERO: STOPPED},
    # It was given up and replaced: too late to succeed.
    LOST: {_N.EXITED_ZERO: FAILURE, _N.EXITED_NONZERO: FAILURE},
    SUCCESS: {},
    FAILURE: {},
    STOPPED: {},
}

ACTIVE = (STARTING, READY, RUNNING)  # takes part, or is going to
OCCUPYING = (*ACTIVE, STOPPING, LOST)  # its process may exist, so its slot is taken


@dataclass(slots=True)
class Worker:
    """One worker process, as far as the core knows."""

    id: str
    host: str
    slot: int
    incarnation: int
    number: int  # order of start in the whole job
    place: SlotInfo  # its rank in the current round, or the one it was born with
    founder: bool = False  # started for a round that is not complete yet
    awaited: bool = False  # a founder for which that round waits
    state: WorkerState = STARTING
    pid: int = 0  # 0: not known yet
    admitted: int | None = None  # seniority: order of first admission to a round
    version: int = -1  # committed steps it reported with its last READY
    clean: bool = True
    left: int = 0  # the round it reported to have left with its last READY
    stepped: bool = False  # has finished a training step
    leaving: str = ""  # why it has to leave at the next chance; empty: it stays

    @property
    def age(self) -> tuple[bool, int]:
        """Sorts workers from the oldest member to the newest newcomer."""
        return (False, self.admitted) if self.admitted is not None else (True, self.number)

    @property
    def seat(self) -> Seat:
        """The worker as the assignment of ranks sees it."""
        return Seat(self.id, self.host, self.slot, self.age)

    @property
    def is_member(self) -> bool:
        """Return whether the worker is, or was about to be, a member of the present world."""
        return self.admitted is not None or self.founder


@dataclass(slots=True)
class WorkerStateRegistry:
    """Every worker of the job: those with a process, and those who ended in this round.

    Named after, and grown from the idea of, Horovod's registry of the same name.
    """

    workers: dict[str, Worker] = field(default_factory=dict)
    _by_state: dict[WorkerState, dict[str, Worker]] = field(
        default_factory=lambda: {state: {} for state in WorkerState}
    )
    _incarnations: dict[tuple[str, int], int] = field(default_factory=dict)
    _by_host: dict[str, dict[str, Worker]] = field(default_factory=dict)
    started: int = 0  # workers ever ordered
    _admissions: int = 0

    def next_incarnation(self, host: str, slot: int) -> int:
        """Return the number of the next process in this slot (from 1)."""
        return self._incarnations.get((host, slot), 0) + 1

    def add(self, worker_id: str, place: SlotInfo, *, founder: bool, awaited: bool) -> Worker:
        """Record a worker that was ordered in `place`; count up the slot's incarnation."""
        incarnation = self.next_incarnation(place.host, place.slot)
        self._incarnations[place.host, place.slot] = incarnation
        self.started += 1
        seat = (worker_id, place.host, place.slot, incarnation)
        worker = Worker(*seat, self.started, place, founder=founder, awaited=awaited)
        self.workers[worker_id] = worker
        self._by_state[worker.state][worker_id] = worker
        self._by_host.setdefault(worker.host, {})[worker_id] = worker
        return worker

    def apply(self, worker: Worker, news: WorkerNews) -> bool:
        """Change the worker's state by the table; False (and no change) where it lists nothing."""
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

    def admit(self, worker: Worker, place: SlotInfo) -> None:
        """Make a worker a member of the round that is being completed; raises where it cannot be.

        A worker that has already ended keeps its end: a plain round is announced late.
        """
        if worker.admitted is None:
            self._admissions += 1
            worker.admitted = self._admissions
        worker.place = place
        if worker.state in OCCUPYING and not self.apply(worker, WorkerNews.ADMITTED):
            raise ValueError(f"{worker.id} is {worker.state.value} and cannot join a round")

    def process_started(self, worker: Worker, pid: int) -> None:
        """Note the worker's process."""
        worker.pid = pid

    def ready(self, worker: Worker, event: WorkerReady) -> bool:
        """Note that the worker waits for a round; False where it was not awaited as READY."""
        if not self.apply(worker, WorkerNews.READY):
            return False
        worker.left, worker.version, worker.clean = event.round, event.version, event.clean
        return True

    def stepped(self, worker: Worker) -> None:
        """Note that the worker has finished a step."""
        worker.stepped = True

    def mark_leaving(self, worker: Worker, reason: str) -> None:
        """Note why the worker has to leave at the next chance; empty: it stays."""
        worker.leaving = reason

    def forget_founders(self) -> None:
        """Note that no worker is awaited any more: the round they were started for is complete."""
        for worker in self.workers.values():
            worker.founder = worker.awaited = False

    def forget_ended(self) -> None:
        """Drop the records of workers that are gone; their end no longer matters."""
        for state in (SUCCESS, FAILURE, STOPPED):
            for worker_id in self._by_state[state]:
                del self.workers[worker_id]
            self._by_state[state].clear()

    def count(self, *states: WorkerState) -> int:
        """Return how many workers are in these states."""
        return sum(len(self._by_state[state]) for state in states)

    def having(self, *states: WorkerState) -> Iterator[Worker]:
        """Workers in these states, in a stable order; safe against changes meanwhile."""
        for state in states:
            yield from tuple(self._by_state[state].values())

    def active(self) -> int:
        """Workers that take part or are going to, without those who have to leave."""
        return sum(1 for worker in self.having(*ACTIVE) if not worker.leaving)

    def on_host(self, host: str) -> tuple[Worker, ...]:
        """Workers whose process may exist on this host."""
        return tuple(self._by_host.get(host, {}).values())
