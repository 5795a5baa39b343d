"""Workers that hang, told from what their heartbeat threads say of their training threads.

A worker that shows no progress for longer than its limit says so, with where its training thread
stands: in a collective, waiting for others, or elsewhere (`worker.heartbeat.watch`). Alone, that
proves little: a worker in a collective may wait for another. So this module waits until all
members of the round have spoken, or `settle` seconds, and then:

- one stands elsewhere while the others wait: it is the one that hangs, and is given up;
- several stand elsewhere: the round is broken, and a worker that does not leave it hangs;
- all wait in collectives: these do not match. The round is broken once, for a lost message heals
  that way; when it happens again without a step in between, the job fails and says who waits where;
- no worker waits, all stand elsewhere: most likely a long evaluation that does not report
  itself. It is announced, and only broken when it lasts (or at once, where the user set the limit).

A member that is busy and said so reports nothing, so no worker is blamed for waiting for it.
Times are seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_driver.core.events import WorkerResumed, WorkerStalled
from elastic_driver.core.rules.base import Rule
from elastic_driver.core.rules.endings import Endings
from elastic_driver.core.rules.rounds import COMPLETE
from elastic_driver.core.rules.stacks import MAX_STACK_CHARS, StackAnswer, Stacks, name_ranks
from elastic_driver.core.rules.workers import RUNNING, Worker

LEAVE_S = 5.0  # to leave a round that was broken; a worker that can leave needs well under a second
LONG_STALL = 8.0  # times as long as first told: then even an evaluation is taken for a hang
_NOT_THE_SCRIPT = ("/torch/", "/elastic_driver/", "/threading.py", "/contextlib.py")


@dataclass(frozen=True, slots=True)
class Stall:
    """A member's report that its training thread stands still."""

    waits: bool  # in a collective
    seconds: float  # without progress, when it was said
    at: float  # when it was said first
    first_seconds: float
    stack: str

    @property
    def place(self) -> str:
        """The innermost place in the script itself, for a sentence."""
        lines = [line.strip() for line in self.stack.splitlines()]
        places = [line for line in lines if line.startswith("File ")]
        own = [line for line in places if not any(name in line for name in _NOT_THE_SCRIPT)]
        return (own or places or ["an unknown place"])[-1]


class Stalls(dict[str, Stall]):
    """The stalls of a round, by worker."""


@dataclass(slots=True)
class Hangs(Rule):
    """Gives up the members that hang, and breaks rounds in which no member can go on."""

    stacks: Stacks
    endings: Endings
    mismatched_at: int | None = None  # `outcome.steps_reported` when a mismatch broke a round

    @property
    def _stalls(self) -> Stalls:
        return self.rounds.own(Stalls)

    def on_stalled(self, worker: Worker, event: WorkerStalled, now: float) -> None:
        """Record that a worker makes no progress."""
        if worker.state is not RUNNING or event.round != self.rounds.current.number:
            self.effects.ignore(f"{worker.id} stalled in round {event.round}, which it has left")
            return
        stalls = self._stalls
        earlier = stalls.get(worker.id)
        waits, stack = event.where == "collective", event.stack[-MAX_STACK_CHARS:]
        first = (now, event.seconds) if earlier is None else (earlier.at, earlier.first_seconds)
        stalls[worker.id] = Stall(waits, event.seconds, *first, stack)
        if earlier is None:
            where = "in a collective" if waits else "elsewhere"
            reason = f"no progress for {event.seconds:.1f} s, its training thread stands {where}"
            self.effects.announce("worker_stalled", reason, worker, where=event.where, stack=stack)
            if len(stalls) == 1:
                self.stacks.ask(now, f"{worker.id} makes no progress")
        self.stacks.note(worker.id, StackAnswer(event.where, stack, own=True))

    def on_resumed(self, worker: Worker, event: WorkerResumed, now: float) -> None:
        """Forget the stall of a worker that goes on after all."""
        stalls = self._stalls if event.round == self.rounds.current.number else {}
        if stalls.pop(worker.id, None) is not None:
            self.effects.announce("worker_resumed", "it makes progress again", worker)
        else:
            self.effects.ignore(f"{worker.id} goes on, and was not known to stand still")

    def advance(self, now: float) -> None:
        """Judge the members that stand still."""
        stalls = self._stalls
        if not stalls or not self.outcome.elastic:
            return
        running = list(self.workers.having(RUNNING))
        spoken = [worker for worker in running if worker.id in stalls]
        if not spoken:
            return
        elsewhere = [worker for worker in spoken if not stalls[worker.id].waits]
        current = self.rounds.current
        if current.state is not COMPLETE and not current.at_boundary:
            self._give_up_unmoved(elsewhere or spoken, now)
            return
        if len(spoken) < len(running):
            first = min(stalls[worker.id].at for worker in spoken)
            waiting = f"{spoken[0].id} makes no progress; what do the others say?"
            if not self.effects.due_or_set_alarm(first + self.settings.settle, now, waiting):
                return
        self.stacks.settle()  # before a worker is killed: the stacks are evidence
        self._judge(running, spoken, elsewhere, now)

    def _judge(
        self, running: list[Worker], spoken: list[Worker], elsewhere: list[Worker], now: float
    ) -> None:
        if len(elsewhere) == 1 and len(running) > 1:
            self._give_up(elsewhere[0], "while its peers wait for it", now)
        elif len(elsewhere) == len(running) and not self._lasts(elsewhere):
            return
        elif elsewhere:
            outside = f"{len(elsewhere)} workers stand outside of collectives"
            self.rounds.leave(now, f"no progress: {outside}")
        elif len(spoken) == len(running):
            self._break_mismatch(spoken, now)

    def _give_up_unmoved(self, suspects: list[Worker], now: float) -> None:
        """Give up those who do not leave a round that is closing, though a while has passed."""
        stalls = self._stalls
        since = max(self.rounds.current.since, *(stalls[worker.id].at for worker in suspects))
        waiting = f"{suspects[0].id} does not leave the round"
        if self.effects.due_or_set_alarm(since + LEAVE_S, now, waiting):
            for worker in suspects:
                self._give_up(worker, "and does not leave the round", now)

    def _give_up(self, worker: Worker, how: str, now: float) -> None:
        stall = self._stalls[worker.id]
        reason = f"no progress for {stall.seconds:.1f} s {how}: {stall.place}"
        self.endings.give_up_worker(worker, reason, now, stack=stall.stack)

    def _lasts(self, workers: Sequence[Worker]) -> bool:
        """Return whether all stand still for so long that it can be no evaluation."""
        if self.settings.hang_timeout is not None:
            return True
        stalls = [self._stalls[worker.id] for worker in workers]
        return all(stall.seconds >= LONG_STALL * stall.first_seconds for stall in stalls)

    def _break_mismatch(self, workers: Sequence[Worker], now: float) -> None:
        """All wait for each other: once may be an accident, twice is the script."""
        where, steps = (
            describe_groups(self._stalls, workers),
            self.outcome.steps_reported,
        )
        if self.mismatched_at == steps:
            what = f"all {len(workers)} workers wait in collectives that do not match, again"
            self.outcome.fail(f"{what}: {where}")
            return
        self.mismatched_at = steps
        self.rounds.leave(now, f"no progress: collectives that do not match: {where}")


def describe_groups(stalls: Mapping[str, Stall], workers: Sequence[Worker]) -> str:
    """Return which ranks stand where, those at the same place named together."""
    places: dict[str, list[int]] = {}
    for worker in workers:
        places.setdefault(stalls[worker.id].place, []).append(worker.place.rank)
    return "; ".join(
        f"{name_ranks(sorted(ranks))} at {place}"
        for place, ranks in sorted(places.items(), key=lambda item: min(item[1]))
    )
