"""What a job must not lose: model, optimizer, and every value a script trains with.

In synchronous data parallelism every rank holds the same state at a step boundary, so a commit
copies no parameter and no optimizer tensor. It counts. A hook behind `optimizer.step()` says
whether the tensors still are those of the last commit (*clean*) or a step further (*dirty*); after
a failure the clean rank with the highest version is the source, and whoever differs receives.
Small things (buffers, learning rates, schedulers, scalers, sampler positions, random generators,
plain attributes) are copied at a commit and put back by `restore()`.

Scripts make one; `run` drives it. `version` counts committed steps, of all rounds together. With a
`checkpoint_dir` it is kept on disk as well (`keeper`), for when every holder is gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from elastic_driver.core.documents import SaveRequest, World
from elastic_driver.errors import HostsUpdatedInterrupt, UsageError
from elastic_driver.worker import current
from elastic_driver.worker.checkpoints.keeper import KEEP, Checkpoints, Schedule
from elastic_driver.worker.heartbeat.driver_connection import StateVersion
from elastic_driver.worker.heartbeat.progress import TrainingProgress
from elastic_driver.worker.state_sync.agreement import (
    Agreement,
    StateLostError,
    agree,
    agree_afresh,
)
from elastic_driver.worker.state_sync.copying import copied
from elastic_driver.worker.state_sync.following import Advancing, StepCounter
from elastic_driver.worker.state_sync.parts import Part, part_for
from elastic_driver.worker.state_sync.rng import RandomStates
from elastic_driver.worker.state_sync.sharing import Shared, check_sendable, receive, send, stand_by
from elastic_driver.worker.state_sync.transfer import Route
from elastic_driver.worker.timing.computing import ComputeClock
from elastic_driver.worker.timing.device_clock import clock_for
from elastic_driver.worker.worker_log import say
from elastic_driver.worker.world import session
from elastic_driver.worker.world.wrapping import mark_in_sync

__all__ = ["Advancing", "ObjectState", "State", "TorchState"]

UNTRAINED = -1  # the version of a state that holds nothing worth keeping


class State:
    """Base of all states: attributes, a version, and the agreement on whose values are right.

    Every keyword argument becomes an attribute. Objects with `state_dict()` and
    `load_state_dict()` are kept through these; all others by value, mutable ones copied. Names
    that start with an underscore are the class's own.

    Args:
        snapshot: keep real copies of all tensors at each commit. For steps that are not one call
            of one optimizer (several optimizers, closures) and must never be half done after
            a failure. Always on where there is a module and no optimizer: nothing tells then
            when the module changes.
        checkpoint_dir: a folder of this state's own, the same on every host, for durable
            checkpoints; a job whose workers hold nothing starts from the newest one in it.
        every: committed steps from one checkpoint to the next.
        keep: how many checkpoints stay; older ones are deleted (default 3).
        attributes: what to keep.

    Raises `UsageError` for a name that is a method or property here, and for `every` or `keep`
    without `checkpoint_dir` or below 1.
    """

    def __init__(
        self,
        *,
        snapshot: bool = False,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        every: int | None = None,
        keep: int | None = None,
        **attributes: Any,
    ) -> None:
        self._values: dict[str, Any] = {}
        self._parts: dict[str, Part] = {}
        self._kept_values: dict[str, Any] = {}
        self._kept_random: dict[str, Any] | None = None
        self._random = RandomStates()
        self._counter = StepCounter()
        self._clock = ComputeClock()
        self._callbacks: list[Callable[[], None]] = []
        self._progress = TrainingProgress()  # one of our own until we are in a world
        self._round = 0  # the round this state was last synchronised in
        self._version = UNTRAINED
        self._torn = False  # a sender was lost while its tensors came in
        self._wants_snapshot = self._snapshot = snapshot
        self._checkpoints = _checkpoints(checkpoint_dir, every, keep)
        for name, value in attributes.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"a state has a {name!r} of its own; choose another name")
            self._values[name] = value
        self._arrange()

    # ---- attributes ----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        raise AttributeError(
            f"the state has no {name!r}; give it to the constructor: "
            f"{type(self).__name__}(…, {name}=…)"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        before = self._values.get(name)
        self._values[name] = value
        if before is not value and (name in self._parts or hasattr(value, "state_dict")):
            self._arrange()

    def _arrange(self) -> None:
        """Sort the attributes by how they are kept; again whenever an object is exchanged."""
        self._parts = {
            name: part
            for name, value in self._values.items()
            if (part := part_for(name, value)) is not None
        }
        optimizers = self._optimizers()
        advancing = [v for v in self._values.values() if isinstance(v, Advancing)]
        self._counter.watch(optimizers, advancing)
        self._clock = clock_for(optimizers, self._clock)
        self._snapshot = self._wants_snapshot or (bool(self._modules()) and not optimizers)

    def _optimizers(self) -> list[Optimizer]:
        return [value for value in self._values.values() if isinstance(value, Optimizer)]

    def _modules(self) -> list[torch.nn.Module]:
        return [value for value in self._values.values() if isinstance(value, torch.nn.Module)]

    # ---- what users call -----------------------------------------------------------------

    @property
    def version(self) -> int:
        """Committed steps this state stands for; −1 before the first sync."""
        return self._version

    @property
    def clean(self) -> bool:
        """Whether the tensors are, or by `restore()` become, exactly those of `version`."""
        return not self._torn and (self._snapshot or self._counter.at_rest())

    def commit(self) -> None:
        """Mark a step boundary: nothing done until here will be lost, or done again.

        Raises `HostsUpdatedInterrupt`, after the same step on every rank, when the world is to
        change. Costs no message and copies no parameter, but for this rank's share of them where
        a checkpoint is due.
        """
        if self._version == UNTRAINED and current.is_initialized() and current.size() > 1:
            say(
                "a state is committed that was never synchronised, so newcomers will not have it: "
                "of several states @elastic.run keeps the first; call the others' sync() at the "
                "top of the function, or put their attributes into the first"
            )
        self.save()
        self._version += 1
        if self._checkpoints is not None and self._checkpoints.due(self._version):
            self._checkpoints.take(self._shared(), self._version)
        progress = self._progress
        computed = self._clock.finish_step()
        if computed is not None:
            progress.samples.note(progress.round, self._version, computed)
        if progress.committed(self._version):
            raise HostsUpdatedInterrupt(progress.leave_reason)

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` if this step boundary is where the world changes.

        `commit()` does it as well. Every rank must call it after the same commits.
        """
        if self._version >= self._progress.leave_after:
            raise HostsUpdatedInterrupt(self._progress.leave_reason)

    def save(self) -> None:
        """Copy what `restore()` is to put back; part of `commit()`."""
        if self._counter.steps == 0 and self._kept_random is not None:
            self._count_skipped_step()
        parts = self._parts
        for part in parts.values():
            part.keep()
        self._kept_values = {n: copied(v) for n, v in self._values.items() if n not in parts}
        self._kept_random = self._random.take()
        if self._snapshot:
            self._counter.settle()
            for part in parts.values():
                part.keep_large()
        self._counter.restart()

    def restore(self) -> None:
        """Go back to the last commit, and drop gradients.

        Where the tensors have gone on since then, and no snapshot has them, all stays as it is:
        the next `sync()` brings a clean state from another rank, or settles for the furthest.
        """
        for optimizer in self._optimizers():
            optimizer.zero_grad(set_to_none=True)
        if self._kept_random is None or not self.clean:
            return
        for part in self._parts.values():
            part.roll_back()
            if self._snapshot:
                part.roll_back_large()
        self._values.update({name: copied(value) for name, value in self._kept_values.items()})
        self._random.put(self._kept_random)
        self._counter.restart()

    def sync(self) -> None:
        """Make this state the same on every rank, in as few bytes as it takes.

        Collective; once a round, later calls do nothing. Who has the right state follows from
        what the members said when the round was formed; where all have it, nothing is sent.
        Afterwards it counts as committed. Raises `UsageError` for attributes that cannot be
        sent and for models that differ, `StateLostError` where nobody has a whole state left.
        """
        member = session.start()
        if member.group is None or member.world is None or member.world.round == self._round:
            return
        self._progress, self._counter.settle = member.progress, member.settle
        world = member.world
        # What the members said was said of their first state; of another they know nothing yet.
        known = member.last_ready_described(self)
        reloads = self._checkpoints is not None
        if known:
            verdict = agree(world, reloads=reloads)
            if verdict.fresh and not reloads and not all(m.clean for m in world.members):
                # Whatever was trained died with its sender: nobody is to find out by the loss.
                say("a worker died while it sent the only state; training starts afresh")
        else:
            verdict = agree_afresh(world, self._progress.version, reloads=reloads)
        self._come_to(verdict, world)
        self._round = world.round
        self._clock.restart()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these, in order, after every change of the world (to adapt a learning rate, …)."""
        self._callbacks.extend(callbacks)

    # ---- what `run` calls ----------------------------------------------------------------

    def state_version(self) -> StateVersion:
        """What to report when READY for the next round.

        A dirty state counts the optimizer steps it has gone on, so that where all are dirty
        the furthest is found; a step that was interrupted half-way does not count.
        """
        if self._torn or self._version == UNTRAINED:
            return StateVersion(version=UNTRAINED, clean=not self._torn)
        if self.clean:
            return StateVersion(version=self._version, clean=True)
        counter = self._counter
        further = 0 if counter.unfinished else counter.steps
        return StateVersion(version=self._version + further, clean=False)

    def on_reset(self) -> None:
        """The world has changed, and this state is the same everywhere again."""
        for value in self._values.values():
            if isinstance(value, Advancing):
                value.reset()
        for callback in self._callbacks:
            callback()

    def begin_final_checkpoint(self, request: SaveRequest, rank: int) -> Path | None:
        """Begin to write this rank's share of the last commit; see `CheckpointableState`."""
        if self._checkpoints is None:
            return None
        if not self.clean or self._version != request.step:
            raise UsageError(f"a worker was asked for step {request.step}, not {self._version}")
        self.restore()  # the script may have gone on since its last commit
        return self._checkpoints.take_last(self._shared(), request, rank)

    def final_checkpoint_problem(self, folder: Path) -> str | None:
        """Whether the last checkpoint is complete; see `CheckpointableState`."""
        return None if self._checkpoints is None else self._checkpoints.outcome(folder)

    # ---- the parts of sync ---------------------------------------------------------------

    def _come_to(self, verdict: Agreement, world: World) -> None:
        rank = current.rank()
        shared = self._shared()
        resumed = None
        if verdict.fresh:
            check_sendable(shared)  # now, on every rank, rather than at the first failure
            if rank == verdict.source:
                resumed = self._reload(shared)
        route = Route(verdict.source, verdict.receivers)
        if verdict.receivers and route.concerns(rank):
            if rank == verdict.source:
                send(shared, route, resumed)
            elif rank in verdict.receivers:
                self._torn = True
                newcomer = not verdict.fresh and self._is_untrained()
                resumed = receive(shared, route, newcomer=newcomer)
                self._torn = False
            else:
                stand_by(route)
        if not verdict.exact and rank == verdict.source:
            say(
                f"round {world.round}: no worker was at a commit; going on from rank {rank}, "
                f"which was furthest (step {verdict.version}); commit after each optimizer step, "
                "or use snapshot=True, to be exact here too"
            )
        self._version = self._progress.version = verdict.version if resumed is None else resumed
        self._counter.restart()
        self.save()
        for module in self._modules():
            mark_in_sync(module)
        if self._checkpoints is not None:
            self._checkpoints.entered(world, rank)

    def _shared(self) -> Shared:
        return Shared(self._parts, self._values, self._random)

    def _reload(self, shared: Shared) -> int | None:
        """The step of the checkpoint this state holds now, or None: it is as it was."""
        if self._checkpoints is None or not (self._torn or self._is_untrained()):
            return None
        resumed = self._checkpoints.load_newest(shared)
        if resumed is None and self._torn:
            raise StateLostError(
                "the last worker with the whole state died while sending it, before the first "
                "checkpoint; start the job again"
            )
        self._torn = False
        return resumed

    def _is_untrained(self) -> bool:
        return self._version == UNTRAINED

    def _count_skipped_step(self) -> None:
        """A scaler that lowered its scale has skipped the step; its batch is used up though."""
        if any(part.has_skipped() for part in self._parts.values()):
            self._counter.advance()


def _checkpoints(
    folder: str | os.PathLike[str] | None, every: int | None, keep: int | None
) -> Checkpoints | None:
    if folder is None:
        if every is not None or keep is not None:
            raise UsageError("every= and keep= are of checkpoints: give checkpoint_dir= as well")
        return None
    if every is None:
        raise UsageError("checkpoint_dir= needs every=, the steps from one checkpoint to the next")
    schedule = Schedule(Path(folder).absolute(), every, KEEP if keep is None else keep)
    return Checkpoints(schedule)


class ObjectState(State):
    """A state of plain values: counters, lists, whatever a loop trains with besides a model."""


class TorchState(State):
    """A state of models, optimizers, schedulers, scalers, samplers and plain values.

        state = TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)

    Any keyword will do, and any number of each kind. The first optimizer is the one whose steps
    move the samplers.
    """
