"""Finds optimizers that train what no state keeps, and optimizers of a state that never step.

Torch's hooks see the steps of all optimizers (`state_sync.steps`). It is looked at in the first
commits of a process, on one rank. Whether an optimizer that is outside of the states matters is
seen by what it remembers, and by the backward passes: one that trains only what no pass of the
states' parameters comes by, such as a probe on detached features, is the script's own business.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from elastic_driver.worker.mistakes.script_objects import Kept, pointer_of, tell
from elastic_driver.worker.state_sync.fingerprint import contents
from elastic_driver.worker.state_sync.steps import trained_by
from elastic_driver.worker.state_sync.tree import Tree
from elastic_driver.worker.torch_seams import number_of_pass

LAST = 20  # the commit at which optimizers that have not stepped are named
KNOWN_AFTER = 5  # intervals in which an optimizer steps, until it counts as one that stays
LEAST_PASSES = 10  # intervals with a backward pass, of an optimizer that should have stepped
_PIECE = 1024  # numbers of a parameter that are compared

Names = Callable[[Any], str | None]  # the script's name for an object


class PassWatch:
    """Notices backward passes that reach the parameters of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        usable = [p for p in trained_by(optimizer) if p.requires_grad and p.is_leaf]
        self._parameters = {id(p): p for p in (*usable[:1], *usable[-1:])}.values()
        self._hooks = [p.register_post_accumulate_grad_hook(self._passed) for p in self._parameters]
        self._first = self._contents()
        self.intervals = 0  # with at least one pass
        self.passes: set[int] = set()  # numbers of the passes of this interval

    def _passed(self, _parameter: Tensor) -> None:
        self.passes.add(number_of_pass())

    def next_interval(self) -> None:
        """Begin another interval, at a commit."""
        self.intervals += bool(self.passes)
        self.passes = set()

    def has_trained(self) -> bool:
        """Return whether the parameters have changed since the watch began."""
        return self._contents() != self._first

    def _contents(self) -> list[int]:
        whole = [p.detach() for p in self._parameters if pointer_of(p) and p.is_contiguous()]
        return contents([each.reshape(-1)[:_PIECE] for each in whole])

    def end(self) -> None:
        """Notice nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class OptimizerWatch:
    """The optimizers of a process in its first commits.

    `trees`: returns those of all states; `names` finds a name of the script's for an optimizer.
    """

    def __init__(self, trees: Callable[[], Sequence[Tree]], names: Names) -> None:
        self._trees, self._names = trees, names
        self._intervals: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._passes: weakref.WeakKeyDictionary[Optimizer, PassWatch] = weakref.WeakKeyDictionary()
        self._trained: set[int] = set()  # identities of all parameters that optimizers have stepped

    def trains(self, tensor: Tensor) -> bool:
        """Return whether an optimizer that has stepped trains this tensor."""
        return id(tensor) in self._trained

    def look(self, commit: int, stepped: Iterable[Optimizer], values: Iterable[Any]) -> None:
        """Look, at the commit of this number in this process, before anything is kept.

        `stepped`: the optimizers that have stepped since the last commit; `values`: all attributes
        of the states.
        """
        own = {id(o): o for tree in self._trees() for o in tree.optimizers()}
        for optimizer in stepped:
            count = self._intervals[optimizer] = self._intervals.get(optimizer, 0) + 1
            self._trained.update(map(id, trained_by(optimizer)))
            if count == KNOWN_AFTER and id(optimizer) not in own:
                self._judge_stranger(optimizer, Kept(values))
        self._judge_coupled(own)
        if commit == 2:
            idle = [o for o in own.values() if o not in self._intervals]
            self._watch(idle)
        for watch in self._passes.values():
            watch.next_interval()
        if commit >= LAST:
            self._judge_idle(own)
            self.end()

    def end(self) -> None:
        """Watch no backward passes any more."""
        for watch in self._passes.values():
            watch.end()
        self._passes.clear()

    def _watch(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            if optimizer not in self._passes:
                self._passes[optimizer] = PassWatch(optimizer)

    # ---- optimizers outside of the states ----------------------------------------------------

    def _judge_stranger(self, optimizer: Optimizer, kept: Kept) -> None:
        """Judge an optimizer that steps from commit to commit and is a part of no state."""
        if kept.has(optimizer) or kept.has(optimizer.state):
            return  # it is inside of an object that the state keeps, or shares what it remembers
        known = [p for p in trained_by(optimizer) if kept.has_tensor(p)]
        own = [o for tree in self._trees() for o in tree.optimizers()]
        if known:
            by_hand = kept.keeps_dictionary_with("state", "param_groups")
            if not by_hand and _remembers(optimizer):
                self._tell_forgotten(optimizer, own)
        elif not kept.parameters:
            return  # a state of counters: the model is left out on purpose
        elif not any(o in self._intervals for o in own):
            self._tell_other_model(optimizer)
        else:
            self._watch([optimizer, *(o for o in own if o in self._intervals)])

    def _tell_forgotten(self, optimizer: Optimizer, own: Sequence[Optimizer]) -> None:
        mine = set(map(id, trained_by(optimizer)))
        twin = next((o for o in own if mine & set(map(id, trained_by(o)))), None)
        instead = "make it before train(), and give it to the state: TorchState(…, optimizer=…)"
        if twin is not None and twin not in self._intervals:
            instead = f"step the state's own, {self._path(twin)!r}, which never steps"
        tell(
            "made-anew",
            f"{self._name(optimizer)} trains the state's model, but is not in the state, so what "
            f"it remembers of its steps is lost when the workers change; {instead}",
            "optimizer",
        )

    def _tell_other_model(self, optimizer: Optimizer) -> None:
        tell(
            "made-anew",
            f"{self._name(optimizer)} trains a model that is not in the state, and no optimizer of "
            "the state steps: what is trained is lost when the workers change; make model and "
            "optimizer before train(), on every rank, and train state.model with state.optimizer",
            "model",
        )

    def _judge_coupled(self, own: dict[int, Optimizer]) -> None:
        """Tell of an optimizer outside whose parameters share a backward pass with the state's."""
        inside: set[int] = set()
        for optimizer, watch in self._passes.items():
            if id(optimizer) in own:
                inside |= watch.passes
        for optimizer, watch in list(self._passes.items()):
            if id(optimizer) not in own and (inside & watch.passes) - {-1}:
                tell(
                    "made-anew",
                    f"{self._name(optimizer)} is not in the state, and neither are the parameters "
                    "that it trains together with the state's: they are lost when the workers "
                    "change; give both to the state, which takes several models and optimizers: "
                    "TorchState(…, model2=…, optimizer2=…)",
                    "part",
                )

    # ---- optimizers that never step ----------------------------------------------------------

    def _judge_idle(self, own: dict[int, Optimizer]) -> None:
        for optimizer, watch in self._passes.items():
            if id(optimizer) not in own or optimizer in self._intervals:
                continue
            parameters = trained_by(optimizer)
            by_others = any(id(p) in self._trained for p in parameters)
            if watch.intervals < LEAST_PASSES or by_others or watch.has_trained():
                continue
            tell(
                "never-stepped",
                f"the optimizer {self._path(optimizer)!r} of the state has taken no step in "
                f"{LAST} commits, though its parameters get gradients; call its step() before "
                "commit()",
                self._path(optimizer),
            )

    def _path(self, optimizer: Optimizer) -> str:
        """Return the name of an optimizer in its state."""
        for tree in self._trees():
            for path, part in tree.parts.items():
                if part.thing is optimizer:
                    return path
        return type(optimizer).__name__

    def _name(self, optimizer: Optimizer) -> str:
        """Return how to call an optimizer that is in no state."""
        kind = type(optimizer).__name__
        name = self._names(optimizer)
        return f"the optimizer {name!r} ({kind})" if name else f"an optimizer ({kind})"


def _remembers(optimizer: Optimizer) -> bool:
    """Return whether an optimizer keeps tensors from step to step."""
    return any(
        isinstance(value, Tensor) and value.numel() > 1
        for values in optimizer.state.values()
        if isinstance(values, dict)
        for value in values.values()
    )
