"""`Mistakes`: what a state asks at its commits, to tell the mistakes of its script.

Most is looked for in the first commits of a process; afterwards a commit pays for two comparisons.
Times are monotonic seconds.

torch's `DistributedSampler` keeps the size of the world and the rank that it was made with. A
worker that stays in the job keeps its process, and so the sampler: after a change of the workers
its loop goes over the share of another world, which leaves samples out, or has another length than
on the other ranks. `watch_samplers` looks for that.

A newcomer runs the script up to the training function, and then gets the state, in objects of its
own. A model that the others have made since then is not among these; `MadeLate` tells so.
"""

import functools
import itertools
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from elastic_driver import contract
from elastic_driver.errors import ExitCode, HostsUpdatedInterrupt, SwallowedError
from elastic_driver.words import counted
from elastic_driver.worker import current
from elastic_driver.worker.current import say
from elastic_driver.worker.heartbeat.training_progress import TrainingProgress
from elastic_driver.worker.mistakes import left_out
from elastic_driver.worker.mistakes.left_out import LeftOut
from elastic_driver.worker.mistakes.script_objects import (
    Kept,
    OptimizerWatch,
    Variable,
    in_script,
    is_speaker,
    search,
    tell,
    variables,
)
from elastic_driver.worker.state_sync.module_parts import ModulePart
from elastic_driver.worker.state_sync.part import StatePart
from elastic_driver.worker.state_sync.steps import collectives, weakly
from elastic_driver.worker.state_sync.tree import Tree
from elastic_driver.worker.world import wrapping
from elastic_driver.worker.world.gloo import peer_is_lost, refuse_if_lost

LOOKED_AT = max(left_out.LAST, 20)  # commits of a process that are looked at
ALONE_AFTER = 5  # steps without a collective that are told where states are not compared
PATIENCE_S = 60.0  # of training without a commit
MOST_SWALLOWED = 3  # errors in one round, after which the process ends
LEAST_STEPS = 32  # without a commit, however long they take; a power of two
_LOST = "a peer is lost, so what it trains is not committed"
_CHANGES = "the workers change, and the others may wait for it"
_AVERAGE = (
    "call the model through elastic.wrap(state.model), or use FixedBatch, DistributedDataParallel "
    "or hvd.DistributedOptimizer"
)
_AVERAGING = ("DistributedDataParallel", "FullyShardedDataParallel", "FixedBatch")


class Mistakes:
    """Tells the mistakes of the script of one state.

    `tree`: the state's; `trees`: returns those of all states of this process.
    """

    def __init__(self, tree: Tree, trees: Callable[[], Sequence[Tree]]) -> None:
        self._tree, self._trees = tree, trees
        self._frame: FrameType | None = None  # of the script, while a commit is looked at
        self._left_out = LeftOut()
        self._made_late = MadeLate(tree)
        self._optimizers = OptimizerWatch(trees, weakly(self.name_of))  # no cycle holds tensors
        self._looks = 0  # commits of this process that were looked at
        self._due = LOOKED_AT  # commits of this round that are still to be looked at
        self._averages: bool | None = None  # something averages gradients; None: not known
        self._alone = 0  # steps in a row that no collective came before, in this round
        self._size = 1
        # The round that commit() has told the script to leave.
        self._told_to_leave: int | None = None
        self._swallowed = 0  # how often the script has gone on in it
        self._steps = 0  # of optimizers, since the last commit

    # ---- a world -------------------------------------------------------------------------

    def enter(self, progress: TrainingProgress, size: int) -> None:
        """Begin a round of so many workers."""
        self._alone = 0
        self._swallowed = 0
        self._steps = 0
        self._size = size
        self._due = LOOKED_AT
        watch_samplers()
        self._made_late.note_first()
        progress.on_difference = self.on_difference

    def on_difference(self) -> None:
        """Tell, where the ranks were found to differ, that nothing averages their gradients.

        Called on the heartbeat thread.
        """
        if self._size == 1 or not is_speaker():
            return
        if self._alone >= 2:
            _tell_alone("the ranks hold different states: ")
        elif self._averages is False:
            tell(
                "not-averaged",
                "the ranks hold different states, and nothing was found that averages their "
                f"gradients; {_AVERAGE}; if the script averages them itself, look there",
            )

    # ---- steps and commits ---------------------------------------------------------------

    def count_step(self, progress: TrainingProgress) -> None:
        """Note a finished step of any optimizer."""
        self._steps += 1
        if self._steps % LEAST_STEPS or not progress.round or not is_speaker():
            return
        if (since := time.monotonic() - progress.committed_at) >= PATIENCE_S:
            tell(
                "no-commit",
                f"optimizers have made {self._steps} steps in {since:.0f} s without a commit: a "
                "lost worker would cost all of them; call state.commit() after each step, or after "
                "every few",
            )

    def look_at_commit(self, *, leads: bool) -> None:
        """Look at a commit that is about to be made.

        Raises `WorldBrokenError`, later `SwallowedError`, for a script that goes on though a
        collective has lost a peer: what it has computed since then is not to be kept.
        """
        if peer_is_lost():
            if sys.exc_info()[0] is None:  # else it is on its way, and this is a `finally`
                _tell_swallowed(_LOST, sys._getframe(1))
            refuse_if_lost()
        self._steps = 0
        if leads:
            self._made_late.look()
        if self._due > 0 and leads:
            self._due -= 1
            if is_speaker():
                self._look_safely()

    def error_to_leave(self, error: Exception, progress: TrainingProgress) -> BaseException:
        """Return the error by which a commit tells the script to leave this round.

        Once a script has swallowed it, it is one that no `except Exception` catches.
        """
        if self._told_to_leave != progress.round or not progress.round:
            self._told_to_leave = progress.round
            return error
        self._swallowed += 1
        text = f"the script has gone on in round {progress.round}, which it was told to leave"
        if self._swallowed > MOST_SWALLOWED:
            say(f"{text}; this worker ends, to be replaced")
            os._exit(ExitCode.UNAVAILABLE)
        swallowed = SwallowedError(text)
        swallowed.__cause__ = error
        return swallowed

    # ---- looks ---------------------------------------------------------------------------

    def _look_safely(self) -> None:
        """Look; whatever the objects of a script do when they are looked at, training goes on."""
        try:
            self._look()
        except Exception as error:
            self._due, self._looks = 0, LOOKED_AT
            say(f"the script cannot be looked through for mistakes, training goes on: {error!r}")
        finally:
            self._frame = None

    def _look(self) -> None:
        self._count_alone()
        if self._looks >= LOOKED_AT:
            return
        self._looks += 1
        stepped = self._tree.steps.any_optimizers()
        self._frame = sys._getframe(3)
        self._optimizers.look(self._looks, stepped, self._values())
        if self._looks >= left_out.FIRST:
            self._left_out.look(self._looks, self._values, self._frame, self._optimizers.trains)
        if self._looks == 2:
            self._look_at_wrapped()
            self._averages = self._finds_average(stepped)
        if self._looks == LOOKED_AT:
            self._left_out = LeftOut()

    def _values(self) -> list[Any]:
        return [value for tree in self._trees() for value in tree.values.values()]

    def _count_alone(self) -> None:
        """Count the steps that no collective came before since the last commit."""
        if self._size == 1:
            return
        steps, before = self._tree.steps, self._tree.gradients.collectives_before
        if steps.has_stepped:
            self._alone = self._alone + 1 if collectives() == before else 0
        verified = os.environ.get(contract.VERIFY_STATE) != "0"
        if self._alone == ALONE_AFTER and not verified and is_speaker():
            _tell_alone("")

    def _look_at_wrapped(self) -> None:
        models = wrapping.wrapped_models()
        if not models:
            return
        kept = Kept(self._values())
        for model in models:
            parameters = list(model.parameters())
            if parameters and not any(map(kept.has_tensor, parameters)):
                kind = type(model).__name__
                tell(
                    "made-anew",
                    f"elastic.wrap() has a model ({kind}) that is not in the state: its weights "
                    "are lost when the workers change; make it before train(), give it to the "
                    "state, and wrap that one: elastic.wrap(state.model)",
                    "wrap",
                )

    def _finds_average(self, stepped: Sequence[Optimizer]) -> bool:
        """Return whether the script has something that averages gradients over the ranks."""
        if wrapping.wrapped_models() or any(map(_is_hvd, stepped)):
            return True
        found: list[Any] = []

        def look(variable: Variable) -> bool:
            if type(variable.thing).__name__ in _AVERAGING:
                found.append(variable.thing)
            return not found

        values = (Variable("", value, before=True) for value in self._values())
        search(itertools.chain(values, variables(self._frame)), look)
        return bool(found)

    def name_of(self, thing: Any) -> str | None:
        """Return the script's name for an object, if it has one."""
        found: list[str] = []

        def look(variable: Variable) -> bool:
            if variable.thing is thing:
                found.append(variable.name)
            return not found

        search(variables(self._frame), look)
        return found[0] if found else None


def _tell_alone(found: str) -> None:
    tell(
        "not-averaged",
        f"{found}optimizers step although the ranks have exchanged nothing since the last commit, "
        f"so each rank trains with its own gradients; {_AVERAGE}",
    )


def _is_hvd(optimizer: Optimizer) -> bool:
    return any(
        each.__module__.startswith("elastic_driver.horovod") for each in type(optimizer).__mro__
    )


def tell_swallowed(error: SwallowedError) -> None:
    """Tell that an `except` of the script has swallowed what was for `run`, which has this now."""
    frame, trace = None, error.__traceback__
    while trace is not None:
        frame = trace.tb_frame if in_script(trace.tb_frame) else frame
        trace = trace.tb_next
    planned = isinstance(error.__cause__, HostsUpdatedInterrupt)
    _tell_swallowed(_CHANGES if planned else _LOST, frame)


def _tell_swallowed(what: str, frame: FrameType | None) -> None:
    if not current.is_initialized() or current.rank() > 1:
        return  # the same in all ranks, but rank 0 may be the one that is lost
    tell(
        "swallowed",
        f"rank {current.rank()} goes on at {_place(frame)} though {what}: an `except` of the "
        "script has swallowed the error that says so; catch narrower exceptions there, and let "
        "RuntimeError, WorldBrokenError and HostsUpdatedInterrupt pass",
    )


def hint(error: BaseException, progress: TrainingProgress) -> None:
    """Tell, about an error of the script, that its loop may have had nothing left to do."""
    if progress.steps or progress.version <= 0 or not is_speaker():
        return
    if isinstance(error, NameError):
        name = getattr(error, "name", None) or (re.findall(r"'(\w+)'", str(error)) or ["?"])[0]
        what, cure = f"{name!r} was never set", f"give {name!r} a value before the loop"
    elif isinstance(error, ZeroDivisionError):
        what, cure = "something was divided by a count of 0", "expect a loop without batches"
    else:
        return
    tell(
        "nothing-left",
        f"{what} in a call of the training function that made no commit: after a change of the "
        f"workers, a loop over its data may have nothing left to do; {cure}",
    )


def _place(frame: FrameType | None) -> str:
    """Return file and line of the script that has called us."""
    while frame is not None and not in_script(frame):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


# ---- samplers of a world that is no more -----------------------------------------------

_right_once: "weakref.WeakSet[DistributedSampler[Any]]" = weakref.WeakSet()


def watch_samplers() -> None:
    """Look at each `DistributedSampler` of this process when it is iterated.

    One whose numbers are not those of its first world, such as that of a group of ranks, is left
    alone.
    """
    iterate = DistributedSampler.__iter__
    if hasattr(iterate, "__wrapped__"):
        return

    @functools.wraps(iterate)
    def iterated(sampler: "DistributedSampler[Any]") -> Iterator[Any]:
        if current.is_initialized():
            _compare_sampler(sampler, current.size(), current.rank())
        samples: Iterator[Any] = iterate(sampler)
        return samples

    DistributedSampler.__iter__ = iterated


def _compare_sampler(sampler: "DistributedSampler[Any]", size: int, rank: int) -> None:
    shares, share = sampler.num_replicas, sampler.rank
    same_size = shares == size
    if same_size and share == rank:
        _right_once.add(sampler)
    if sampler not in _right_once or (share == rank if same_size else rank):
        return  # it is right; or rank 0 says it
    tell(
        "old-shares",
        f"a DistributedSampler that was made for rank {share} of {shares} is iterated by rank "
        f"{rank} of {size}: ranks train other shares of the data than they should; use "
        "elastic.ElasticSampler (hvd.elastic.ElasticSampler), or make sampler and loader inside "
        "the training function",
    )


# ---- what comes into a state while training --------------------------------------------


class MadeLate:
    """Compares the objects of a state with those at its first meeting."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._first: dict[str, tuple[str, int]] | None = None
        self._changes = 0  # of the tree, at the last look

    def note_first(self) -> None:
        """Note what each worker has made by itself; later worlds change nothing about that."""
        if self._first is None:
            self._first = self._now()
            self._changes = self._tree.changes

    def look(self) -> None:
        """Tell what is another object since."""
        if self._first is None or self._tree.changes == self._changes:
            return
        self._changes = self._tree.changes
        for path, (kind, parameters) in self._now().items():
            first = self._first.get(path)
            if first is None:
                if not any(path.startswith(f"{other}.") for other in self._first):
                    self._tell(path, f"({kind}) has come into the state")
            elif first[0] != kind:
                self._tell(path, f"is a {kind}, no {first[0]} any more,")
            elif first[1] != parameters:
                self._tell(path, f"has {counted(parameters, 'parameter')} instead of {first[1]}")

    def _now(self) -> dict[str, tuple[str, int]]:
        return {path: (_kind(part), _parameters(part)) for path, part in self._tree.parts.items()}

    def _tell(self, path: str, what: str) -> None:
        if is_speaker():
            tell(
                "made-late",
                f"{path!r} {what} since the training began, so a worker that joins cannot take it "
                "over, and leaves; make it before the training function, on every worker, or keep "
                "its state_dict() in its place",
                path,
            )


def _kind(part: StatePart) -> str:
    return type(part.thing).__qualname__


def _parameters(part: Any) -> int:
    return sum(1 for _ in part.thing.parameters()) if isinstance(part, ModulePart) else 0
