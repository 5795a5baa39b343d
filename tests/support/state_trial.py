"""Plays a `Program` on real ranks, with failures: what each rank holds after each commit.

A failure comes at one collective of one step. `kill`: one rank is gone before it, and a new process
with objects of its own takes its place; the other one learns of it at its next collective. `link`:
no one is gone, but one rank has got the result of the collective and the other has not. `planned`:
one rank is replaced between two commits. After each of them the ranks meet in a new world, as under
`@elastic.run`: survivors go back to their commit, and whoever lacks the newest state gets it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_driver.errors import UsageError
from elastic_driver.words.orders import World
from elastic_driver.words.world import Member, SlotInfo, StateVersion
from elastic_driver.worker import current
from elastic_driver.worker.state_sync.sharing import StateLostError
from elastic_driver.worker.state_sync.sharing import gather_rows as gather
from tests.support.state_scripts import Program, Script

NEVER = 10**9


@dataclass(frozen=True)
class Fault:
    """One failure: at the `meeting`-th collective from operation `operation` of step `step` on."""

    kind: str  # kill, link, planned
    step: int
    operation: int
    meeting: int
    rank: int  # that is lost, or that does not get the result


@dataclass
class Outcome:
    """What one rank held after each commit and meeting, and what has ended it."""

    held: list[tuple[str, int, dict[str, str]]]  # when, committed steps, and all that it held
    refused: str = ""  # something was refused, by name
    lost: str = ""  # no rank had the state of the last commit
    step: int = 0  # at which it ended


class Broken(RuntimeError):
    """The world of this rank is broken."""


class Gone(BaseException):
    """This rank is lost."""


class Trouble:
    """Breaks the collectives of one rank as its program's faults say."""

    def __init__(self, rank: int, faults: tuple[Fault, ...]) -> None:
        self.rank, self._faults = rank, list(faults)
        self._count = NEVER  # collectives until it strikes; NEVER: not yet
        self._due = False  # this one strikes at the next collective

    @property
    def fault(self) -> Fault | None:
        """The next fault."""
        return self._faults[0] if self._faults else None

    def reaches(self, step: int, operation: int) -> None:
        """The rank is about to carry out an operation."""
        fault = self.fault
        if fault is None or fault.kind == "planned" or self._count != NEVER:
            return
        if (step, operation) >= (fault.step, fault.operation):
            self._count = fault.meeting

    def meet(self, collective: Callable[[], Any]) -> None:
        """Carry out a collective, unless it breaks."""
        fault = self.fault
        if self._due:
            raise Broken
        if fault is None or self._count > 0:
            self._count -= self._count != NEVER
            collective()
            return
        if fault.kind == "kill":
            raise Gone if fault.rank == self.rank else Broken
        collective()  # the other rank gets the result, and learns of the break one collective later
        if fault.rank == self.rank:
            raise Broken
        self._due = True

    def ends(self) -> None:
        """The rank has nothing more to do with the others; it still learns of a break."""
        if self._due:
            raise Broken

    def is_over(self) -> None:
        """The ranks meet again."""
        self._faults.pop(0)
        self._count, self._due = NEVER, False


class Player:
    """One rank that plays a program."""

    def __init__(self, rank: int, size: int, program: Program, faults: tuple[Fault, ...]) -> None:
        self.rank, self.size, self.program = rank, size, program
        self.trouble = Trouble(rank, faults)
        self.round = 0
        self.outcome = Outcome([])
        self.script = self._new_script()
        self.script.seed(1)

    def _new_script(self) -> Script:
        return Script(self.program, 100 * self.round + self.rank, self.trouble.meet)

    def play(self) -> Outcome:
        """Play all steps."""
        try:
            self._meet()
            self._play()
        except StateLostError as lost:
            self.outcome.lost = str(lost)
        except UsageError as refused:
            self.outcome.refused = str(refused)
        self.outcome.step = self.script.state.step
        return self.outcome

    @property
    def _last(self) -> int:
        return len(self.program.steps)

    def _play(self) -> None:
        while True:
            step = self.script.state.step
            fault = self.trouble.fault
            if fault is not None and fault.kind == "planned" and step == fault.step:
                self._change(is_lost=fault.rank == self.rank, broken=False)
                continue
            try:
                if step == self._last:
                    self.trouble.reaches(step, 0)
                    self.trouble.meet(lambda: gather([0], self.size))
                    self.trouble.ends()
                    return
                self._train(step)
            except Gone:
                self._change(is_lost=True, broken=True)
            except Broken:
                self._change(is_lost=False, broken=True)

    def _train(self, step: int) -> None:
        script = self.script
        for number, operation in enumerate(self.program.steps[step]):
            self.trouble.reaches(step, number)
            script.do(operation, step)
        script.state.step = step + 1
        script.state.commit()
        self.outcome.held.append(("commit", step + 1, script.told()))

    def _change(self, *, is_lost: bool, broken: bool) -> None:
        self.trouble.is_over()
        if is_lost:
            self.script = self._new_script()
        elif broken:
            self.script.state.restore()
        self.script.state.on_reset()
        self._meet()

    def _meet(self) -> None:
        """What `@elastic.run` does in a new world."""
        self.round += 1
        script, rank, size = self.script, self.rank, self.size
        places = [SlotInfo("localhost", n, n, n, 0, size, size, 1, 0, 1) for n in range(size)]
        members = [Member(f"localhost.{n}.{self.round}", place) for n, place in enumerate(places)]
        current.enter(places[rank], self.round)
        rows = gather([*script.state.state_version()], size)
        versions = [StateVersion(steps, bool(clean)) for steps, clean in rows]
        script.state._sync_with(versions, World(self.round, members, "a test"))
        script.rejoin()
        self.outcome.held.append((f"meeting {self.round}", script.state.step, script.told()))


def play(rank: int, size: int, item: tuple[Program, tuple[Fault, ...]]) -> Outcome:
    """What this rank held."""
    return Player(rank, size, *item).play()
