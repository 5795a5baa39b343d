"""The state of a job: model, optimizer, and every value that a script trains with.

In synchronous data parallelism every rank holds the same state at a step boundary, so a commit
copies hardly anything. It walks what the script has given (`state_sync.tree`), notes every tensor
by object, memory and version, and copies small things and whatever changes outside of an
optimizer's step (`state_sync.leaves`). After a failure a rank is *clean* if all that was not copied
is unchanged. The clean rank with the highest version sends its state to every rank that differs.
Where no rank is clean, the newest checkpoint is used, or the job ends: a step that is half done is
never gone on from.

`version` counts committed steps, of all rounds together. With a `checkpoint_dir` the state is kept
on disk as well (`keeper`), in case every holder is lost. A script may have several states: each has
a version and a clean mark of its own, and `run` makes all of them the same on every rank.
"""

import itertools
import os
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch.nn import Module
from torch.optim import Optimizer

from elastic_driver.errors import HostsUpdatedInterrupt, UsageError, WorldBrokenError
from elastic_driver.words import counted
from elastic_driver.words.orders import SaveRequest, World
from elastic_driver.words.world import StateVersion
from elastic_driver.worker import current
from elastic_driver.worker.checkpoints.keeper import NOTHING, Arrival, Checkpoints, save_together
from elastic_driver.worker.compute_clock import StepMeter
from elastic_driver.worker.current import say
from elastic_driver.worker.heartbeat.training_progress import TrainingProgress
from elastic_driver.worker.marks import Marks
from elastic_driver.worker.mistakes.watch import Mistakes
from elastic_driver.worker.positions import Advancing, CountsSamples, advance_all
from elastic_driver.worker.state_sync import sharing
from elastic_driver.worker.state_sync.contents import RandomStates
from elastic_driver.worker.state_sync.module_parts import part_for
from elastic_driver.worker.state_sync.part import StatePart
from elastic_driver.worker.state_sync.sharing import gather_rows
from elastic_driver.worker.state_sync.steps import Steps, weakly
from elastic_driver.worker.state_sync.tree import Tree
from elastic_driver.worker.state_sync.values import has_part
from elastic_driver.worker.world import session
from elastic_driver.worker.world.wrapping import gradient_norms, mark_in_sync, passes_are_local

__all__ = ["Advancing", "ObjectState", "State", "TorchState"]

UNTRAINED = -1  # the version of a state that was neither trained nor received
MEGABYTE = 1e6
SAID_BYTES = 1_000_000  # copies of so many bytes at each commit are worth a line
_numbers = itertools.count()
_commits = itertools.count(1)
_states: "weakref.WeakValueDictionary[int, State]" = weakref.WeakValueDictionary()


def all_states() -> list["State"]:
    """Return the states of this process, in the order in which they were made."""
    return [state for _, state in sorted(_states.items())]


class _Phase:
    """The mutable field of this module: the number of the training function's call that runs."""

    number = 0


def _trees() -> list[Tree]:
    return [state._tree for state in all_states()]


def reset_all() -> None:
    """Reset positions and call the callbacks of all states: the world has changed.

    What callbacks change belongs to the commit.
    """
    states = all_states()
    clean = [state for state in states if state.clean]
    for each in states:
        each.on_reset()
    for each in clean:
        if not each.clean:
            each._keep(from_others=True)


def stop_clocks() -> None:
    """Take the clocks of all states off the script's objects: no training function runs."""
    for each in all_states():
        each._meter.clock.watch([])


def begin_phase(number: int) -> None:
    """Note that a training function is called; `number` of its call in this process."""
    _Phase.number = number


class _GoingBack(NamedTuple):
    """How a state goes back together with others."""

    is_clean: bool
    newer: Collection[int] = ()  # identities of objects that a state with a newer commit has, too
    draws_again: bool = True  # the random numbers are those of this state's commit


@dataclass(slots=True)
class _Last:
    """The last commit of a state."""

    version: int = UNTRAINED  # the committed steps until then
    phase: int = 0  # the call of the training function that has made it
    at: int = 0  # its place among the commits of all states
    before: int = 0  # that of the commit before it
    random: dict[str, Any] | None = None  # the random generators; None: there was no commit


class State:
    """The base of all states: attributes, a version, and their synchronisation between ranks.

    Every keyword argument becomes an attribute. Modules, optimizers and objects with `state_dict()`
    and `load_state_dict()` are kept as such, also inside of lists and dictionaries; numbers,
    strings, containers of them, tensors, NumPy values, dataclasses and the like by content, and
    they stay the script's own objects. Names that start with an underscore belong to the class.

    Args:
        snapshot: copy all tensors at each commit, also those that only an optimizer's step changes.
            Not needed: what has to be copied is found out while training.
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
        self._counter = Steps()
        # A state ends with its last reference, not with a cycle.
        self._tree = Tree(
            self._values, self._counter, weakly(self._part_for), weakly(self._has_part)
        )
        self._tree.gradients.is_local = passes_are_local
        self._tree.leaves.copy_all = snapshot
        self._counter.on_step = weakly(self._stepped)
        self._going: _GoingBack | None = None  # all states go back
        self._last = _Last()
        self._random = RandomStates()
        self._meter = StepMeter()
        self._callbacks: list[Callable[[], None]] = []
        self._progress = TrainingProgress()  # the membership's, once this state is in a world
        self._marks = Marks()
        self._mistakes = Mistakes(self._tree, _trees)
        self._round = 0  # the round this state was last synchronised in
        self._torn = False  # the sender was lost while its tensors arrived
        self._local: frozenset[str] = frozenset()
        # What the ranks of a round have of this state, and whether it leads there; see `_expect`.
        self._met: tuple[int, Sequence[StateVersion], bool] | None = None
        self._leads = True  # its commits are the job's steps: it is that of the training function
        self._positions: list[tuple[str, Advancing]] = []
        self._arranged = -1  # the tree's count of changes when `_arrange` was called last
        self._said_size = 0  # bytes that each commit copies
        if checkpoint_dir is None and (every, keep) != (None, None):
            raise UsageError("every= and keep= are of checkpoints: give checkpoint_dir= as well")
        self._checkpoints: Checkpoints | None = None
        if checkpoint_dir is not None:
            self._checkpoints = Checkpoints(Path(checkpoint_dir).absolute(), every, keep)
        for name, value in attributes.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"a state has a {name!r} of its own; choose another name")
            self._values[name] = value
        self._number = next(_numbers)
        # Ranks know it by this: states of other attributes are other states, whatever their number.
        self._identity = self._number << 32 | zlib.crc32(",".join(attributes).encode())
        _states[self._number] = self
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
        if before is not value and (hasattr(value, "state_dict") or hasattr(before, "state_dict")):
            self._arrange()

    def __delattr__(self, name: str) -> None:
        if name.startswith("_"):
            object.__delattr__(self, name)
        elif name in self._values:
            del self._values[name]
            self._arrange()
        else:
            raise AttributeError(f"the state has no {name!r}")

    def _has_part(self, value: Any) -> bool:
        """Return whether an attribute is kept by a part, and not as a plain value."""
        return has_part(value)

    def _part_for(self, name: str, thing: Any) -> StatePart | None:
        """Return the part that keeps an object; None for a plain value."""
        return part_for(name, thing)

    def _arrange(self) -> None:
        """Follow the objects of now: their steps, samples and parameters are measured."""
        self._positions = [(n, v) for n, v in self._values.items() if isinstance(v, Advancing)]
        self._meter.follow(self._all(Optimizer), self._all(CountsSamples), self._all(Module))
        if self._leads:
            self._meter.tell_sizes(self._progress)

    def _all(self, kind: Any) -> list[Any]:
        """Return the attributes of a kind."""
        return [value for value in self._values.values() if isinstance(value, kind)]

    # ---- called by users ------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The number of committed steps in this state; −1 before the first sync."""
        return self._last.version

    @property
    def clean(self) -> bool:
        """True if the state is, or by `restore()` becomes, exactly that of `version`."""
        return not self._torn and self._tree.is_clean()

    def local(self, *names: str) -> None:
        """Leave attributes, or what is inside of them, out of the comparison between ranks.

        For what a script keeps apart on each rank on purpose: `state.local("losses")`. It is kept,
        put back, and sent to newcomers all the same.
        """
        self._local |= frozenset(names)

    def commit(self) -> None:
        """Mark a step boundary: no step until here will be lost or done again.

        Sends no message, and copies only what changes outside of an optimizer's step, and this
        rank's share of all where a checkpoint is due. Raises `HostsUpdatedInterrupt`, after the
        same step on every rank, when the world is about to change, and `UsageError` for what cannot
        be kept, with its name.
        """
        if self._commit():
            reason = HostsUpdatedInterrupt(self._progress.leave_reason)
            raise self._mistakes.error_to_leave(reason, self._progress)

    def check_host_updates(self) -> None:
        """Commit, and raise `HostsUpdatedInterrupt`, if the world changes now; else do nothing.

        Costs next to nothing, so a script may check after each batch and commit less often. In the
        midst of a step, with gradients that no optimizer has used, it leaves that to the next check
        or commit. Every rank must call it at the same places.
        """
        if self._leads and self._progress.record_check() and self._is_between_steps():
            self.commit()

    def save(self) -> None:
        """Copy all that `restore()` puts back; `commit()` calls this.

        Samplers and batches move here: what the loop has received until now counts as trained.
        Raises `UsageError`, with its name, for what cannot be kept.
        """
        if self._tree.leaves.copy_all or not self._counter.has_stepped:
            self._counter.settle()  # no optimizer's step has waited for what the ranks exchanged
        advance_all(self._positions)
        self._keep()

    def restore(self) -> None:
        """Go back to the last commit; gradients that do not belong to it are dropped.

        If something has changed since then that was not copied, nothing is put back: the next
        `sync()` brings a clean state from another rank.
        """
        going = self._going or _GoingBack(self.clean)
        random = self._last.random
        if random is not None and going.is_clean:
            self._tree.roll_back(going.newer)
            self._arrange()
        else:
            self._tree.drop_gradients()
        if random is not None and going.draws_again:
            self._random.put(random)

    def _restore_all(self) -> None:
        """Go back to the last commit of each state of this process.

        What several states have goes back to the newest commit.
        """
        states = sorted(all_states(), key=lambda state: -state._last.at)
        clean = [state for state in states if state.clean]
        newer: set[int] = set()
        for each in states:
            each._going = _GoingBack(each in clean, newer, each is states[0])
            try:
                each.restore()  # a script may have its own
            finally:
                each._going = None
            newer |= each._tree.objects()
        for each in clean:
            each._tree.leaves.note()

    def sync(self) -> None:
        """Make this state the same on every rank.

        Collective. Only the first call of a round does this, and `run` calls it for all states. The
        ranks tell each other their versions: the source follows from these (`words.world`),
        only ranks that differ receive, and where none differs nothing is sent. Afterwards the state
        counts as committed. Raises `UsageError` for attributes that cannot be sent and for models
        that differ, `StateLostError` where no rank has a whole state left.
        """
        member = session.start()
        if member.group is None or member.world is None or member.world.round == self._round:
            return
        world = member.world
        if self._met is not None and self._met[0] == world.round:
            self._sync_with(self._met[1], world, leads=self._met[2])
            return
        rows = gather_rows([*self.state_version()], world.size)
        states = [StateVersion(steps, bool(clean)) for steps, clean in rows]
        alike = [s for s in all_states() if s is not self and s._round == world.round]
        self._sync_with(states, world, leads=not any(s._leads for s in alike))

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these, in order, after every change of the world, for example to adapt a rate.

        Survivors call them before the state is sent, so newcomers get what they have changed.
        """
        self._callbacks.extend(callbacks)

    # ---- called by `run` ------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        """Whether no commit has come since the training function of now was called."""
        return self._last.phase != _Phase.number

    def state_version(self) -> StateVersion:
        """Return the version to report when this worker is READY for the next round."""
        if self._torn or self._last.version == UNTRAINED:
            return StateVersion(UNTRAINED, clean=not self._torn)
        return StateVersion(self._last.version, self.clean)

    def on_reset(self) -> None:
        """Reset positions and call the callbacks: the world has changed."""
        for position in self._all(Advancing):
            position.reset()
        for callback in self._callbacks:
            callback()

    def _expect(self, states: Sequence[StateVersion], round_id: int, *, leads: bool) -> None:
        """Note what the ranks have of this state, for the `sync` of this round that follows."""
        self._met = round_id, states, leads

    def _sync_with(
        self, states: Sequence[StateVersion], world: World, *, leads: bool = True
    ) -> None:
        """Make this state the same on every rank; `states` are what the ranks have, by rank.

        Collective, in the same order of states on every rank. `leads`: it is the state of the
        training function, whose commits are the steps of the job.
        """
        self._leads = leads
        member = session.start()
        self._progress, self._counter.settle = member.progress, member.settle
        reloads = self._checkpoints is not None
        agreement = sharing.agree(
            states,
            world.round,
            reloads=reloads,
            least=max(self._progress.version, 0) if leads else 0,
            repair=world.repair,
            gone=0 if world.anew else self._gone(world),
        )
        self._carry_out(agreement, world)
        self._round = world.round
        if leads:
            self._progress.synced_at = time.monotonic()
            self._meter.tell_sizes(self._progress)
            self._marks.enter(self._progress, world.size)
            self._progress.on_end = weakly(self._mark_end)
            self._mistakes.enter(self._progress, world.size)
        self._meter.clock.restart()

    def begin_final_checkpoint(self, request: SaveRequest, rank: int) -> Path | None:
        """Begin to write this rank's share of the last commit; return the checkpoint's folder.

        None: this state has no checkpoints. Raises an exception that says why it cannot be written.
        """
        if self._checkpoints is None:
            return None
        if not self.clean or self._last.version != request.step:
            problem = f"step {request.step} was requested; this worker is at {self._last.version}"
            raise UsageError(problem)
        self.restore()  # the script may have gone on since its last commit
        return self._checkpoints.take_last(self._live(), request, rank)

    def save_without_driver(self, worker: str, world: Sequence[str], seconds: float) -> str:
        """Write the last commit with the others that leave; return a clause: what is on disk.

        `world`: the members of the last world, by rank. `seconds`: the time that is left.
        """
        step = self._last.version
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

    # ---- the parts of commit -----------------------------------------------------------

    def _commit(self) -> bool:
        """Mark a step boundary; return whether the round has to be left here."""
        if self._last.version == UNTRAINED and current.is_initialized() and current.size() > 1:
            raise UsageError(
                "this state is committed, but was never made the same on all ranks: make it before "
                "the function under @elastic.run is called, on every rank, or call its sync() at "
                "the top of that function"
            )
        self._mistakes.look_at_commit(leads=self._leads)
        began = time.perf_counter()
        try:
            self.save()
        except WorldBrokenError as error:  # what an accelerator was to exchange will never come
            raise self._mistakes.error_to_leave(error, self._progress)  # noqa: B904 - it has its cause
        last = self._last
        last.version = version = last.version + 1
        last.phase = _Phase.number
        if self._checkpoints is not None:
            self._checkpoints.take_if_due(self._live(), version)
        if not self._leads:
            return False
        progress = self._progress
        self._meter.finish_step(progress, version, time.perf_counter() - began)
        progress.gradients = gradient_norms()
        leaves = progress.record_commit(version)
        self._marks.mark_if_due(version, self._compared)
        if not progress.steps & (progress.steps - 1):  # it takes time: at the 1st, 2nd, 4th …
            self._say_copies()
        return leaves

    def _is_between_steps(self) -> bool:
        """Return whether the state can be committed now."""
        return not self._tree.gradients.are_pending

    def _keep(self, *, from_others: bool = False) -> None:
        tree = self._tree
        tree.keep(from_others=from_others)
        if tree.changes != self._arranged:
            self._arranged = tree.changes
            self._arrange()
        last = self._last
        last.before, last.at = last.at, next(_commits)
        last.random = self._random.take()

    def _compared(self) -> list[tuple[Tree, frozenset[str]]]:
        """Return what a mark is made of: this state, and the others that all ranks have.

        Those count that were committed between the last two commits of this one: of others, nobody
        knows whether a rank still has them. One that a script has dropped lives on until the
        garbage is collected, at another moment on each rank.
        """
        alike = [
            s
            for s in all_states()
            if s is not self and s._round == self._round and s._last.at > self._last.before
        ]
        return [(each._tree, each._local) for each in (self, *alike)]

    def _stepped(self, optimizer: Optimizer) -> None:
        """Note a finished step of any optimizer."""
        self._tree.gradients.used(optimizer)
        if self._leads:
            self._progress.record_optimizer_step()
            self._mistakes.count_step(self._progress)

    def _mark_end(self) -> None:
        """Mark the last commit: the training function, or the script, is over."""
        if self._leads:
            self._marks.end(self._last.version, self._compared)

    def _say_copies(self) -> None:
        """Say what each commit copies: once it is learned, and when that is twice as much."""
        leaves = self._tree.leaves
        if leaves.copy_all or (leaves.learning and leaves.names):
            return
        if not current.is_initialized() or current.rank():
            return
        found = self._tree.copies()
        size = sum(each[0] for each in found)
        count = sum(each[1] for each in found)
        if size >= max(SAID_BYTES, 2 * self._said_size):
            self._said_size = size
            _, _, name, why = max(found)
            say(
                f"each commit copies {size / MEGABYTE:.1f} MB in {counted(count, 'tensor')} that "
                f"do not only change in an optimizer's step ({name}: {why})"
            )

    # ---- the parts of sync ---------------------------------------------------------------

    def _carry_out(self, agreement: sharing.Agreement, world: World) -> None:
        """Send, receive or keep the state, as agreed, and commit the result."""
        rank = current.rank()
        state = self._live()
        is_source = rank == agreement.source
        resumed = None
        # What cannot be kept is an error now, on every rank. In the midst of a step a rank may hold
        # such values: those of the sender take their place.
        receives = rank in agreement.receivers and not agreement.fresh
        self._tree.walk(lenient=receives)
        if agreement.fresh:
            sharing.split(state)
            if is_source:
                resumed = self._reload(state, agreement, world)
        if agreement.receivers and is_source:
            if problem := sharing.send(state, agreement, resumed):
                say(f"the state cannot be sent to other workers: {problem}")
        elif rank in agreement.receivers:
            self._torn = True
            # A rank that is behind cannot draw again what the others have drawn since.
            behind = not agreement.fresh and self._last.version != agreement.version
            resumed = sharing.receive(state, agreement, with_random=behind)
            self._torn = False
        elif agreement.takes_all:
            sharing.stand_by(agreement)
        self._last.version = agreement.version if resumed is None else resumed
        if self._leads:
            self._progress.version = self._last.version
        self._keep(from_others=True)
        for module in self._all(Module):
            mark_in_sync(module)
        if self._checkpoints is not None:
            self._checkpoints.enter(world, rank)

    def _live(self) -> sharing.LiveState:
        return sharing.LiveState(self._tree, self._random)

    def _gone(self, world: World) -> int:
        """Return the committed steps of the state that this one follows, and that nobody holds.

        0 where a training function before this one has gone on in this world.
        """
        return world.gone if self._leads and self._progress.version <= 0 else 0

    def _reload(
        self, state: sharing.LiveState, agreement: sharing.Agreement, world: World
    ) -> int | None:
        """Load a checkpoint if this state is not whole; return its step, None if none was loaded.

        Raises `StateLostError`, on all ranks, where the state was trained and there is no
        checkpoint.
        """
        whole = self.state_version()
        if whole.trained and whole.clean:
            return None
        resumed = None if self._checkpoints is None else self._checkpoints.load_newest(state)
        gone = self._gone(world)
        lost = None
        if resumed is None and (self._torn or whole.trained):
            lost = sharing.StateLostError(
                "no worker holds the state of the last commit any more, and there is no checkpoint "
                "yet; start the job again"
            )
        elif resumed is None and gone and not world.anew:
            lost = sharing.state_gone(gone, "there is no checkpoint yet")
        if lost is not None:
            if agreement.receivers:
                sharing.refuse(lost, agreement)
            raise lost
        if resumed is None and gone:
            anew = "training begins anew (--restart-from-scratch)"
            say(f"the state of step {gone} or later is gone: {anew}")
        self._torn = False
        return resumed


class ObjectState(State):
    """A state of plain values only: counters, lists, parameters of a loop without torch."""


class TorchState(State):
    """A state of models, optimizers, schedulers, scalers, samplers and plain values.

        state = TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)

    Any keyword is allowed, and any number of objects of each kind. Samplers move with the commits.
    Arguments and errors are those of `State`.
    """
