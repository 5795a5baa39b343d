"""Horovod's elastic API on our rounds: states, and `run`, which trains in each world.

A survivor of a change keeps its process. `restore()` goes back to exactly the last `commit()`,
because each commit copies the tensors, too, into memory that it keeps.
"""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from elastic_driver.horovod.common import basics
from elastic_driver.horovod.common.exceptions import NotInYetError
from elastic_driver.worker import current, state
from elastic_driver.worker.heartbeat.progress import AT_ONCE, NEVER
from elastic_driver.worker.run import enter, training_loop
from elastic_driver.worker.state_sync.sharing import Agreement
from elastic_driver.worker.world import session

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=state.State)


class _HostMessages:
    """Answers whether the driver has announced a change that this process has not followed yet.

    A script that asks stands still until there is one, and expects that its next commit follows
    it. The step that the driver has named lies further ahead: it counts on ranks that train. The
    others cannot finish a step without this rank, so they go on from the same commit.
    """

    def __init__(self, owner: "ObjectState") -> None:
        self._owner = owner

    def empty(self) -> bool:
        """Return whether no change is announced."""
        progress = self._owner._progress
        if progress.leave_after == NEVER:
            return True
        progress.leave_after = AT_ONCE
        return False


class ObjectState(state.State):
    """Plain values by name: each keyword argument becomes an attribute, which is copied.

    Args:
        bcast_object: not needed; Horovod's states take it.
        get_rank: not needed either.
        snapshot: copy all tensors at each commit; False makes a commit free, and `restore()`
            leaves tensors that a step has changed to the next `sync()`.
        attributes: the values and objects to keep.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,  # noqa: ARG002 - Horovod's
        get_rank: Callable[[], int] | None = None,  # noqa: ARG002 - Horovod's
        *,
        snapshot: bool = True,
        **attributes: Any,
    ) -> None:
        super().__init__(snapshot=snapshot, **attributes)
        self._host_messages = _HostMessages(self)
        self._last_updated_timestamp = 0
        self.save()

    def sync(self) -> None:
        """Make this state the same on every rank.

        In a new world of a running job the newest commit is sent. Any other call sends the state
        of rank 0, as Horovod does. Collective.
        """
        member = session.membership()
        if member is None or member.world is None:
            raise NotInYetError("state.sync() needs a world; call hvd.init() first")
        world = member.world
        if session.is_in_job() and world.round != self._round:
            super().sync()
            return
        others = frozenset(range(1, world.size))
        self._carry_out(Agreement(0, others, max(self._version, 0), fresh=True), world)

    def reset(self) -> None:
        """Do nothing; a script's own state may adapt itself here to a new world."""

    def on_reset(self) -> None:
        """Call `reset` and the callbacks: the world has changed."""
        self.reset()
        super().on_reset()


State = ObjectState


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Return `func(state, ...)` as a loop that goes on when the world changes or breaks.

    A newcomer joins the job here, not in `hvd.init()`. If its rank or the size of the world are
    not those that `hvd.init()` has told, its reset callbacks run before the function.
    """
    return training_loop(func, _join)


def _join(kept: state.State, phase: int) -> bool | None:
    """Join the job; return whether this process has another place than it was told before.

    None: the other workers are in a later training function.
    """
    told = (current.rank(), current.size()) if basics.is_initialized() else None
    basics.enter_job()
    if not enter(kept, phase):
        return None
    return told is not None and told != (current.rank(), current.size())
