"""What follows when the ranks of a round hold different states.

`policies.state_watch` compares the states and finds differences; this rule announces each and acts
by `--on-difference`. By default a difference that began at a change of the world is repaired: the
members leave the round at a step boundary, and in the next one all take over the state of rank 0,
which has been in the job for longest. Any other difference ends the job: training has gone wrong
for longer than anybody can tell, and a repair would hide that. A repair that does not help ends
the job, too. Floats that Horovod's states keep are only told of. A repair is no failure, and no
change that `--reset-limit` counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from elastic_driver.core import events as ev
from elastic_driver.core.driver_events import StatesDiffer, StatesEqual
from elastic_driver.core.rules.boundary import Boundary
from elastic_driver.core.rules.rounds import CLOSING, COMPLETE, Rule
from elastic_driver.core.rules.workers import ENDING
from elastic_driver.errors import ExitCode
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import log_events as log

VALUE = "state."  # begins the names of plain values; models and optimizers have their own
HINT = "see docs/verify-state.md"


@dataclass(slots=True)
class Differences(Rule):
    """Repairs the ranks of a round, or ends the job, when they hold different states."""

    boundary: Boundary
    equal_in: int = saved(0)  # the newest round in which all ranks were equal after a step
    repaired_in: int = saved(0)  # the last round that was left for a repair
    proven: bool = saved(True)  # no repair was made since all ranks were equal last

    def on_equal(self, event: StatesEqual, now: float) -> None:
        """Record that all ranks of the round were equal after a step."""
        if event.round != self.rounds.current.number or self.equal_in == event.round:
            raise ev.StaleEvent(f"the ranks of round {event.round} were known to be equal")
        self.equal_in = event.round
        if event.round > self.repaired_in:
            self.proven = True

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
            self.outcome.finish(ExitCode.STATES_DIFFER, f"{what}: {event.reason}{why}; {HINT}")
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
        if self.outcome.departure is not None:
            return "stop", ", as it has no time for a repair"
        return mode, ""

    def advance(self, now: float) -> Iterable[Wait]:
        """Have the members leave a round that is to be repaired; end a job that cannot be."""
        current = self.rounds.current
        if self.rounds.repair and self.outcome.first_success is not None and not current.repairs:
            why = f"{self.rounds.repair}, and a rank has finished its script before the repair"
            self.outcome.finish(ExitCode.STATES_DIFFER, f"{why}; {HINT}")
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
