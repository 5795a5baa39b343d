"""The state of a job: model, optimizer, and every value that a script trains with.

In synchronous data parallelism every rank holds the same state at a step boundary, so a commit
copies no parameter and no optimizer tensor. It only counts: a hook in `optimizer.step()` records
whether the tensors are unchanged since the last commit (*clean*) or not (*dirty*). After a
failure the clean rank with the highest version sends its state to every rank that differs. Small
things (buffers, learning rates, schedulers, scalers, sampler positions, random generators, plain
attributes) are copied at a commit and put back by `restore()`.

A script makes one state; `run` drives it. `version` counts committed steps, of all rounds together.
With a `checkpoint_dir` the state is kept on disk as well (`keeper`), in case every holder is lost.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from elastic_driver.core.documents import SaveRequest, World
from elastic_driver.core.measured import StepTimes
from elastic_driver.core.state_version import StateVersion
from elastic_driver.errors import HostsUpdatedInterrupt, UsageError
from elastic_driver.worker import current
from elastic_driver.worker.checkpoints.keeper import Checkpoints
from elastic_driver.worker.checkpoints.roll_call import NOTHING, Arrival, save_together
from elastic_driver.worker.compute_clock import ComputeClock, clock_for
from elastic_driver.worker.heartbeat.progress import StepCost, TrainingProgress
from elastic_driver.worker.state_sync import sharing
from elastic_driver.worker.state_sync.parts import (
    Advancing,
    Counted,
    CountsSamples,
    StatePart,
    StepCounter,
    count_parameters,
    division_of,
    part_for,
)
from elastic_driver.worker.state_sync.rng import RandomStates
from elastic_driver.worker.state_sync.values import copied
from elastic_driver.worker.worker_log import say
from elastic_driver.worker.world import session
from elastic_driver.worker.world.gradient_norms import gradient_norms
from elastic_driver.worker.world.wrapping import mark_in_sync

__all__ = ["Advancing", "ObjectState", "State", "TorchState"]

UNTRAINED = -1  # the version of a state that was neither trained nor received


class State:
    """The base of all states: attributes, a version, and their synchronisation between ranks.

    Every keyword argument becomes an attribute. Objects with `state_dict()` and
    `load_state_dict()` are kept through these; all others by value, mutable ones copied. Names
    that start with an underscore belong to the class.

    Args:
        snapshot: copy all tensors at each commit. For steps that are not one call of one optimizer
            (several optimizers, closures) and must never be half done after a failure. Always on
            for a module without an optimizer, because no hook then shows that the module changes.
        checkpoint_dir: a folder for the durable checkpoints of this state alone, the same on every
            host; a job whose workers hold no trained state starts from the newest one in it.
        every: committed steps from one checkpoint to the next.
        keep: how many checkpoints stay; older ones are deleted (default 3).
        attributes: the values and objects to keep.

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
        self._parts: dict[str, StatePart] = {}
        self._kept_values: dict[str, Any] = {}
        self._kept_random: dict[str, Any] | None = None
        self._random = RandomStates()
        self._counter = StepCounter()
        self._clock = ComputeClock()
        self._callbacks: list[Callable[[], None]] = []
        self._progress = TrainingProgress()  # the membership's, once this state is in a world
        self._round = 0  # the round this state was last synchronised in
        self._version = UNTRAINED
        self._torn = False  # the sender was lost while its tensors arrived
        self._wants_snapshot = self._snapshot = snapshot
        if checkpoint_dir is None and (every, keep) != (None, None):
            raise UsageError("every= and keep= are of checkpoints: give checkpoint_dir= as well")
        self._checkpoints: Checkpoints | None = None
        if checkpoint_dir is not None:
            self._checkpoints = Checkpoints(Path(checkpoint_dir).absolute(), every, keep)
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
        """Decide how each attribute is kept; again whenever an object is replaced."""
        found = {name: part_for(name, value) for name, value in self._values.items()}
        self._parts = {name: part for name, part in found.items() if part is not None}
        optimizers = self._all(Optimizer)
        self._counter.watch(optimizers, self._all(Advancing))
        self._sources = self._all(CountsSamples)
        self._counted = self._count()
        self._parameters = count_parameters(self._all(Module))
        self._clock = clock_for(optimizers, self._clock)
        self._snapshot = self._wants_snapshot or bool(self._all(Module) and not optimizers)

    def _all(self, kind: Any) -> list[Any]:
        """Return the attributes of a kind."""
        return [value for value in self._values.values() if isinstance(value, kind)]

    # ---- called by users ------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The number of committed steps in this state; −1 before the first sync."""
        return self._version

    @property
    def clean(self) -> bool:
        """True if the tensors are, or by `restore()` become, exactly those of `version`."""
        return not self._torn and (self._snapshot or self._counter.at_rest())

    def commit(self) -> None:
        """Mark a step boundary: no step until here will be lost or done again.

        Sends no message and copies no parameter, except this rank's share of them where a
        checkpoint is due. Raises `HostsUpdatedInterrupt`, after the same step on every rank, when
        the world is about to change.
        """
        if self._version == UNTRAINED and current.is_initialized() and current.size() > 1:
            say(
                "this state is committed, but was never synchronised, so newcomers will not have "
                "it: of several states @elastic.run keeps the first; call the others' sync() at "
                "the top of the function, or put their attributes into the first"
            )
        began = time.perf_counter()
        self.save()
        self._version += 1
        if self._checkpoints is not None:
            self._checkpoints.take_if_due(self._live(), self._version)
        progress, committing = self._progress, time.perf_counter() - began
        if (computed := self._clock.finish_step()) is not None:
            progress.samples.record(self._version, computed)
        self._measure(computed, committing)
        if progress.committed(self._version):
            raise HostsUpdatedInterrupt(progress.leave_reason)

    def _measure(self, cost: StepCost | None, committing: float) -> None:
        """Note the samples and the times of a step, whose commit took so many seconds."""
        progress, before = self._progress, self._counted
        self._counted = after = self._count()
        progress.trained += after.samples - before.samples
        progress.micro_batches, progress.batch = division_of(self._sources)
        progress.parameters = self._parameters
        progress.gradients = gradient_norms()
        waited = after.waited - before.waited
        if cost is None:
            progress.times = StepTimes(waited or None, commit=committing)
            return
        worked = max(cost.worked - committing - waited, 0.0)
        progress.times = StepTimes(waited or None, worked, cost.waited, committing)

    def _count(self) -> Counted:
        """Return what the samplers and batches of this state have counted so far."""
        counts = [source.counted for source in self._sources]
        return Counted(sum(each.samples for each in counts), sum(each.waited for each in counts))

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` if the world changes at this step boundary.

        `commit()` does the same. Every rank must call it after the same commits.
        """
        if self._version >= self._progress.leave_after:
            raise HostsUpdatedInterrupt(self._progress.leave_reason)

    def save(self) -> None:
        """Copy all that `restore()` puts back; `commit()` calls this."""
        # A gradient scaler may have skipped the step: its batch is used up all the same.
        if self._counter.steps == 0 and any(part.has_skipped() for part in self._parts.values()):
            self._counter.advance()
        if self._snapshot:
            self._counter.settle()
        parts = self._parts
        for part in parts.values():
            part.keep(self._snapshot)
        self._kept_values = {n: copied(v) for n, v in self._values.items() if n not in parts}
        self._kept_random = self._random.take()
        self._counter.restart()

    def restore(self) -> None:
        """Go back to the last commit, and drop gradients.

        If the tensors have changed since then, and there is no snapshot of them, nothing is put
        back: the next `sync()` brings a clean state from another rank, or takes the furthest one.
        """
        for optimizer in self._all(Optimizer):
            optimizer.zero_grad(set_to_none=True)
        if self._kept_random is None or not self.clean:
            return
        for part in self._parts.values():
            part.roll_back(self._snapshot)
        self._values.update({name: copied(value) for name, value in self._kept_values.items()})
        self._random.put(self._kept_random)
        self._counter.restart()

    def sync(self) -> None:
        """Make this state the same on every rank.

        Collective. Only the first call of a round does this. The members reported their versions
        when the round was formed: the source follows from these (`core.state_version`), only ranks
        that differ receive, and where none differs nothing is sent. Afterwards the state counts as
        committed. Raises `UsageError` for attributes that cannot be sent and for models that
        differ, `StateLostError` where no rank has a whole state left.
        """
        member = session.start()
        if member.group is None or member.world is None or member.world.round == self._round:
            return
        self._progress, self._counter.settle = member.progress, member.settle
        world = member.world
        # The members reported the version of their first state, and nothing of any other state.
        afresh = None if member.last_ready_described(self) else self._progress.version
        reloads = self._checkpoints is not None
        agreement = sharing.agree(world, reloads=reloads, afresh=afresh)
        lost = agreement.fresh and not all(m.clean for m in world.members)
        if lost and afresh is None and not reloads:
            # Silence would hide the loss of the model.
            say("a worker died while it sent the only state; training starts afresh")
        self._carry_out(agreement, world)
        self._round = world.round
        self._progress.synced_at = time.monotonic()
        self._clock.restart()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these, in order, after every change of the world, for example to adapt a rate."""
        self._callbacks.extend(callbacks)

    # ---- called by `run` ------------------------------------------------------------------

    def state_version(self) -> StateVersion:
        """Return the version to report when this worker is READY for the next round.

        A dirty state also counts the optimizer steps since its commit, so that among dirty states
        the furthest is found. A step that was interrupted half-way does not count.
        """
        if self._torn or self._version == UNTRAINED:
            return StateVersion(UNTRAINED, clean=not self._torn)
        if self.clean or self._counter.unfinished:
            return StateVersion(self._version, self.clean)
        return StateVersion(self._version + self._counter.steps, clean=False)

    def on_reset(self) -> None:
        """Reset positions and call the callbacks: the world has changed, and `sync()` is done."""
        for position in self._all(Advancing):
            position.reset()
        for callback in self._callbacks:
            callback()

    def begin_final_checkpoint(self, request: SaveRequest, rank: int) -> Path | None:
        """Begin to write this rank's share of the last commit; return the checkpoint's folder.

        None: this state has no checkpoints. Raises an exception that says why it cannot be written.
        """
        if self._checkpoints is None:
            return None
        if not self.clean or self._version != request.step:
            problem = f"step {request.step} was requested; this worker is at {self._version}"
            raise UsageError(problem)
        self.restore()  # the script may have gone on since its last commit
        return self._checkpoints.take_last(self._live(), request, rank)

    def save_without_driver(self, worker: str, world: Sequence[str], seconds: float) -> str:
        """Write the last commit with the others that leave; return a clause: what is on disk.

        `world`: the members of the last world, by rank. `seconds`: the time that is left.
        """
        step = self._version
        if self._checkpoints is None or step <= 0:
            why = (
                "it has no checkpoint_dir (docs/checkpoints.md)" if step > 0 else "nothing to keep"
            )
            return f"the state of step {max(step, 0)} is not on disk: {why}"
        self.restore()  # the script may have gone on since its last commit
        me = Arrival(worker, step if self.clean else NOTHING)
        return save_together(self._checkpoints, self._live(), me, world, seconds)

    def final_checkpoint_problem(self, folder: Path) -> str | None:
        """Return "" once the final checkpoint is complete, why it failed, or None meanwhile."""
        return None if self._checkpoints is None else self._checkpoints.outcome(folder)

    # ---- the parts of sync ---------------------------------------------------------------

    def _carry_out(self, agreement: sharing.Agreement, world: World) -> None:
        """Send, receive or keep the state, as agreed, and commit the result."""
        rank, state = current.rank(), self._live()
        is_source = rank == agreement.source
        resumed = None
        if agreement.fresh:
            # An attribute that cannot be sent is an error now, not only after the first failure.
            sharing.make_envelope(sharing.split(state), state.parts, state.random.portable())
            if is_source:
                resumed = self._reload(state)
        if agreement.receivers and is_source:
            sharing.send(state, agreement, resumed)
        elif rank in agreement.receivers:
            self._torn = True
            newcomer = not agreement.fresh and self._version == UNTRAINED
            resumed = sharing.receive(state, agreement, newcomer=newcomer)
            self._torn = False
        elif agreement.takes_all:
            sharing.stand_by(agreement)
        if is_source and not agreement.exact:
            say(
                f"round {world.round}: no worker was at a commit; going on from rank {rank}, "
                f"which was furthest (step {agreement.version}); commit after each optimizer step, "
                "or use snapshot=True, to be exact here too"
            )
        self._version = self._progress.version = agreement.version if resumed is None else resumed
        self._counter.restart()
        self.save()
        for module in self._all(Module):
            mark_in_sync(module)
        if self._checkpoints is not None:
            self._checkpoints.entered(world, rank)

    def _live(self) -> sharing.LiveState:
        return sharing.LiveState(self._parts, self._values, self._random)

    def _reload(self, state: sharing.LiveState) -> int | None:
        """Load a checkpoint if this state is not whole; return its step, None if none was loaded.

        Raises `StateLostError` where the state is torn and there is no checkpoint.
        """
        if self._checkpoints is None or not (self._torn or self._version == UNTRAINED):
            return None
        resumed = self._checkpoints.load_newest(state)
        if resumed is None and self._torn:
            raise sharing.StateLostError(
                "the last worker with the whole state died while sending it, before the first "
                "checkpoint; start the job again"
            )
        self._torn = False
        return resumed


class ObjectState(State):
    """A state of plain values only: counters, lists, parameters of a loop without torch."""


class TorchState(State):
    """A state of models, optimizers, schedulers, scalers, samplers and plain values.

        state = TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)

    Any keyword is allowed, and any number of objects of each kind. The steps of the first
    optimizer move the samplers. Arguments and errors are those of `State`.
    """
