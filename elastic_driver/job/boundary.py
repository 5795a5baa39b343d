"""The step after which members leave a round together, and ranks whose states differ.

Workers leave together without a collective because the driver names the step, the boundary: one
that no rank has reached yet. It has to lie far enough ahead that each worker's heartbeat thread
knows of it before `commit()` gets there, and no further, because newcomers wait for it. A rank that
learns of it too late breaks the process group for the others; no step is lost then, but all have to
recover. A step here is a commit or a check for changes of the hosts: both are counted. The executor
asks the members how far they are (`AskProgress`) and reports what they said (`ProgressReported`). A
member that does not answer is asked once more before its progress is guessed: a guess names a step
that may be two seconds away.

The watch over states finds differences; `Differences` announces each and acts by
`--on-difference`. By default a difference that began at a change of the world is repaired: the
members leave the round at a boundary, and in the next one all take over the state of rank 0, which
has been in the job for longest. Any other difference ends the job: training has gone wrong for
longer than anybody can tell, and a repair would hide that. A repair that does not help ends the
job, too. Floats that Horovod's states keep are only announced. A repair is no failure, and no
change that `--reset-limit` counts. Times are monotonic seconds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from elastic_driver.errors import ExitCode
from elastic_driver.job.decisions import AskProgress, PublishNotice
from elastic_driver.job.events import ProgressReported, StatesDiffer, StatesEqual, takes
from elastic_driver.job.rounds import CLOSING, COMPLETE, Rule
from elastic_driver.job.workers import ENDING, READY, RUNNING
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import log_events as log
from elastic_driver.words import wire_events as ev

BASE_MARGIN = 0.1  # seconds: store → long-poll → heartbeat thread, on a busy machine
MARGIN_PER_WORKER = 0.0005  # the server answers its long-polls one after the other
LEAST_MARGIN = 0.01  # seconds: a heartbeat thread may wait for the interpreter, or for a core
MARGIN_PER_ANSWER = 2  # times the slowest of the last answers; a notice takes half of an answer
ANSWERS_KEPT = 8  # times from a question to its last answer
LONGEST_AHEAD = 10_000  # steps; a nonsensical step time must not name a step out of reach
REPORT_S = 2.0  # for the executor to report; usually it takes milliseconds
AGAIN_S = 0.5  # between two questions, after the driver was resumed
STALE_S = 2.0  # the greatest age of the last progress of a worker that did not answer


class Reading(NamedTuple):
    """A worker's progress, `age` seconds ago: its committed steps, and the seconds for one.

    `step_time` 0: not known yet. `since`: how long the step under way took by then.
    """

    step: int
    step_time: float
    age: float
    since: float = 0.0


@dataclass(slots=True)
class Boundary(Rule):
    """Has the members leave after a common step."""

    asked: int = saved(0)  # questions so far
    # Of the question that is not answered yet.
    _asked_at: float | None = saved(None, name="asked_at")
    _reason: str = saved("", name="reason")  # for leaving
    _answers: list[float] = saved(factory=list, name="answers")  # seconds, of the last questions
    # The time of the next question, if some members did not answer.
    _ask_at: float | None = saved(None, name="ask_at")
    # The members were asked a second time, as some of them had not answered.
    _asked_again: bool = saved(False, name="asked_again")
    # Until then, only answers of all members count.
    _all_until: float = saved(-math.inf, name="all_until")

    def leave(self, now: float, reason: str) -> None:
        """Begin to close the round at a boundary: ask the members how far they are."""
        if self.rounds.close(now, reason, at_boundary=True):
            self._asked_again = False
            self._ask(now, reason)

    def resume(self, now: float) -> None:
        """Ask again, because workers may have passed the step that an earlier driver named.

        They need a moment to find this driver. If one has left already, the others cannot go on.
        """
        self._asked_at = None
        self._all_until = now + self.settings.heartbeat_timeout
        current = self.rounds.current
        if not current.at_boundary or current.state is not CLOSING:
            return
        if any(worker.left == current.number for worker in self.workers.having(READY)):
            self.rounds.leave(now, f"{self._reason}; some have left already")
        else:
            self._ask(now, self._reason)

    def _ask(self, now: float, reason: str) -> None:
        self.asked += 1
        self._asked_at, self._ask_at, self._reason = now, None, reason
        workers = tuple(worker.id for worker in self.workers.having(RUNNING))
        self.effects.decide(AskProgress(self.asked, self.rounds.current.number, workers, reason))

    @takes(ProgressReported)
    def on_progress_reported(self, event: ProgressReported, now: float) -> None:
        """Name the step after which the members leave."""
        asked_at, current = self._asked_at, self.rounds.current
        if asked_at is None or event.number != self.asked or not current.at_boundary:
            raise ev.StaleEvent("progress was reported for a question that is not open")
        self._asked_at, waited = None, now - asked_at
        versions = [worker.version for worker in self.workers.having(RUNNING)]
        ages = {True: waited, False: waited + min(self.settings.heartbeat_timeout / 3, STALE_S)}
        readings = [Reading(r.step, r.step_time, ages[r.answered], r.since) for r in event.readings]
        if len(readings) < len(versions) and now < self._all_until:
            self._ask_at = now + AGAIN_S
            return
        all_answered = sum(reading.answered for reading in event.readings) >= len(versions)
        if not all_answered and not self._asked_again:
            self._asked_again = True
            self._ask(now, self._reason)
            return
        self._answers = [*self._answers, waited][-ANSWERS_KEPT:]
        margin = margin_for(len(versions), max(self._answers) if all_answered else None)
        step = leave_after(readings, base=max([0, *versions]), margin=margin)
        self.effects.decide(PublishNotice(current.number, step, self._reason))

    def advance(self, now: float) -> Iterable[Wait]:
        """Tell the members to leave at once if their progress is not reported in time."""
        if not self.rounds.current.at_boundary:
            return
        why = "the members are asked how far they are"
        if self._ask_at is not None:
            if now >= self._ask_at:
                self._ask(now, self._reason)
            else:
                yield Wait(self._ask_at, why)
        if self._asked_at is None:
            return
        wait = Wait(self._asked_at + REPORT_S, why)
        if not wait.is_over(now):
            yield wait
            return
        self.rounds.leave(now, f"{self._reason}; the members' progress could not be read")


def margin_for(members: int, answered: float | None) -> float:
    """Return the seconds to allow for a notice to reach `members` workers.

    `answered`: the most seconds that a question to all of them took until the last answer, of
    the present one and some before it; None if one of them did not answer in time.
    """
    longest = BASE_MARGIN + MARGIN_PER_WORKER * members
    quick = math.inf if answered is None else max(LEAST_MARGIN, MARGIN_PER_ANSWER * answered)
    return min(longest, quick)


def leave_after(readings: Iterable[Reading], *, base: int, margin: float) -> int:
    """Return the step after which the members of a round leave: floor(furthest + margin/step) + 1.

    The furthest is the worker with the most steps *now*: its progress, extrapolated by its age.
    Ranks in step with each other differ by at most one, so the others are not far behind.

    Args:
        readings: the progress of the round's workers; may be empty.
        base: the committed steps the round began with; no worker is behind it.
        margin: seconds after which every worker has received the notice.
    """
    furthest = float(base)
    fastest = math.inf
    shortest = math.inf
    for reading in readings:
        step_time = reading.step_time if 0.0 < reading.step_time < math.inf else math.inf
        ahead = min(max(reading.age, 0.0) / step_time, LONGEST_AHEAD)
        furthest = max(furthest, reading.step + ahead)
        fastest = min(fastest, step_time)
        shortest = min(shortest, reading.since)
    if math.isinf(fastest):
        # The first step is still under way on all ranks. One that has taken long is not expected to
        # end just now; one that has only just begun may be short, and one more is plenty.
        margin_steps = 0.0 if margin < shortest < math.inf else 1.0
    else:
        margin_steps = min(margin / fastest, LONGEST_AHEAD)
    return math.floor(furthest + margin_steps) + 1


# ---- states that differ ------------------------------------------------------------------

VALUE = "state."  # begins the names of plain values; models and optimizers have their own
HINT = "see docs/verify-state.md"


@dataclass(slots=True)
class Differences(Rule):
    """Repairs the ranks of a round, or ends the job, when they hold different states."""

    boundary: Boundary
    equal_in: int = saved(0)  # the newest round in which all ranks were equal after a step
    repaired_in: int = saved(0)  # the last round that was left for a repair
    proven: bool = saved(True)  # no repair was made since all ranks were equal last

    @takes(StatesEqual)
    def on_equal(self, event: StatesEqual, now: float) -> None:
        """Record that all ranks of the round were equal after a step."""
        if event.round != self.rounds.current.number or self.equal_in == event.round:
            raise ev.StaleEvent(f"the ranks of round {event.round} were known to be equal")
        self.equal_in = event.round
        if event.round > self.repaired_in:
            self.proven = True

    @takes(StatesDiffer)
    def on_differ(self, event: StatesDiffer, now: float) -> None:
        """Announce a difference, and decide what follows from it."""
        current = self.rounds.current
        if event.round != current.number or current.state not in (COMPLETE, CLOSING):
            raise ev.StaleEvent(f"the states of round {event.round} differed, and it is over")
        if self.repaired_in == event.round:
            raise ev.StaleEvent(f"round {event.round} is left for a repair already")
        mode, why = self._choose(event)
        follows = {
            "stop": f"the job ends{why}",
            "repair": "all ranks take over the state of rank 0",
            "warn": f"the job goes on ({why or '--on-difference warn'})",
        }[mode]
        self.effects.announce(
            log.StateDiffers(step=event.step, leaf=event.leaf, values=event.values, action=mode),
            f"{event.reason}; {follows}",
        )
        if mode == "stop":
            what = f"the ranks hold different states after step {event.step}"
            self.ending.finish(ExitCode.STATES_DIFFER, f"{what}: {event.reason}{why}; {HINT}")
        elif mode == "repair":
            self.repaired_in, self.proven = event.round, False
            self.rounds.want_repair(f"the ranks held different states after step {event.step}")

    def _choose(self, event: StatesDiffer) -> tuple[str, str]:
        """Return what to do, and why it is not what was to be expected (may be empty)."""
        mode = self.settings.on_difference
        floats = bool(event.values) and all(_is_float(each.value) for each in event.values)
        measured = floats and event.leaf.startswith(VALUE)
        if mode is None and self.settings.own_values and measured:
            return "warn", "Horovod's states may have measured values of each rank's own"
        if mode is None:
            at_a_change = event.round > 1 and self.equal_in != event.round
            mode = "repair" if at_a_change else "stop"
        if mode != "repair":
            return mode, ""
        if not self.proven:
            return "stop", f", as the repair after round {self.repaired_in} did not help"
        if self.outcome.first_success is not None or self.workers.count(ENDING):
            return "stop", ", as a rank has finished its script"
        if self.ending.departure is not None:
            return "stop", ", as it has no time for a repair"
        return mode, ""

    def advance(self, now: float) -> Iterable[Wait]:
        """Name a boundary for a round that is to be repaired; end a job that cannot be."""
        current = self.rounds.current
        if self.rounds.repair and self.outcome.first_success is not None and not current.repairs:
            why = f"{self.rounds.repair}, and a rank has finished its script before the repair"
            self.ending.finish(ExitCode.STATES_DIFFER, f"{why}; {HINT}")
        due = bool(self.rounds.repair) and self.repaired_in == current.number
        if due and current.state is COMPLETE and self.outcome.first_success is None:
            self.boundary.leave(now, self.rounds.repair)
        return ()


def _is_float(shown: str) -> bool:
    """Return whether a value, as it is shown, is a float, or a sequence that begins with one."""
    first = shown.lstrip("[(").partition(",")[0].rstrip("])")
    try:
        float(first)
    except ValueError:
        return False
    return not first.lstrip("-").isdigit()
