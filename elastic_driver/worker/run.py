"""`@elastic.run`: train, and when the world changes or breaks, go on in the next one.

The decorated function is called again in each new world, with the state where the last commit left
it. It is left in two ways: `HostsUpdatedInterrupt` at a step boundary, when nothing is lost and
nothing rolled back, or a broken collective, after which the state goes back to the commit. Any
other exception is the script's own and propagates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from elastic_driver.core.documents import World
from elastic_driver.errors import HostsUpdatedInterrupt
from elastic_driver.worker.state import State
from elastic_driver.worker.world import session
from elastic_driver.worker.world.failures import broke_the_world, describe, let_go_of_frames
from elastic_driver.worker.world.membership import JobMembership

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)

SAME_AGAIN = 3  # broken worlds of the same members, without a step between: not a lost peer


def run(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let `function(state, ...)` train elastically; its value is returned when it finishes.

    Joins the job if `elastic.init()` was not called. `function` starts over in every new world:
    it reads from the state how far training is, and makes what belongs to a world (`elastic.wrap`,
    loaders) inside.
    """

    @functools.wraps(function)
    def trains(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        member = session.start()
        if member.group is None:
            member.report_ready(state.state_version(), "started", speaker=state)
            member.join(state.state_version())
        course = _Course(member, state)
        while True:
            try:
                course.settle()
                return function(state, *args, **kwargs)
            except HostsUpdatedInterrupt as interrupt:
                let_go_of_frames(interrupt)
                course.rejoin(describe(interrupt))
            except Exception as error:
                if not broke_the_world(error) or course.is_stuck():
                    raise
                let_go_of_frames(error)
                course.rejoin_after_break(describe(error))

    return trains


class _Course:
    """One state's way through the worlds."""

    def __init__(self, member: JobMembership, state: State) -> None:
        self._member, self._state = member, state
        self._changed = False  # whether the world is another one than when training was called
        self._breaks = 0  # in a row, without a commit, in worlds of the same members
        self._broken: tuple[Any, int] | None = None  # members and version at the last break

    def settle(self) -> None:
        """Agree on the state; after a change of the world, tell who wants to know."""
        self._state.sync()
        if self._changed:
            self._changed = False
            self._state.on_reset()

    def rejoin(self, reason: str) -> None:
        """Leave at a step boundary, and enter the next world."""
        self._member.leave_and_report(self._state.state_version(), reason, self._state)
        self._enter()

    def rejoin_after_break(self, reason: str) -> None:
        """Go back to the commit, leave what is left of the group, and enter the next world."""
        version = self._state.state_version()
        self._member.leave_and_report(version, reason, self._state, roll_back=self._state.restore)
        self._enter()

    def is_stuck(self) -> bool:
        """Whether the same members break again and again before they finish a step.

        Then no peer was lost, and joining for ever would hide the error.
        """
        world: World | None = self._member.world
        members = tuple(m.worker for m in world.members) if world is not None else ()
        now = (members, self._state.version)
        self._breaks = self._breaks + 1 if now == self._broken else 1
        self._broken = now
        return self._breaks >= SAME_AGAIN

    def _enter(self) -> None:
        self._member.join(self._state.state_version(), self._state)
        self._changed = True
