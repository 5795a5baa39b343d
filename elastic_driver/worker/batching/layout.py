"""What a step sums: looked up when it begins, and compared with what is there when it ends.

`batching.gradients` uses it. A `Layout` says which tensors travel, in which order and buckets; it
must be the same on all ranks. Nothing here communicates.
"""

import hashlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from elastic_driver.errors import UsageError
from elastic_driver.worker.batching.buckets import make_buckets
from elastic_driver.worker.batching.buffers import Buffers
from elastic_driver.worker.batching.sight import Sight, Watch, describe, is_lazy, names_of
from elastic_driver.worker.torch_seams.modules import buffers_of

_KIND = attrgetter("requires_grad", "shape", "dtype", "device")

_subjects: "weakref.WeakSet[Subject]" = weakref.WeakSet()  # all of this process


class Layout:
    """The tensors that travel in a step: gradients, and what micro-batches change in buffers.

    Attributes:
        trained: the parameters whose gradients are summed.
        entries: how many tensors are summed: those, and one for each kind of buffers with a mean.
        buckets: the flat tensors in which they travel.
        verdict_size: integers of which the maximum is taken.
        lines: the names of all this, one each.
        digest: of the lines.
    """

    def __init__(self, trained: list[Tensor], names: Sequence[str], buffers: Buffers) -> None:
        starts = buffers.mean_starts()
        self.trained, self.entries = trained, len(trained) + len(starts)
        self.buckets = make_buckets([*trained, *starts])
        self.verdict_size = buffers.verdict_size
        self.lines = [
            describe("parameter", name, each) for name, each in zip(names, trained, strict=True)
        ]
        self.lines += buffers.lines()
        text = "\n".join(self.lines)
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).digest()


class Subject:
    """The model that is trained, and what else the state's optimizers train.

    Attributes:
        given: the parameters of the state's optimizers. Those that are neither in the model nor in
            that of another subject are summed too.
        buffers: of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        first = next(model.parameters(), None)
        if first is None:
            raise UsageError("FixedBatch was given a model without trainable parameters")
        _subjects.add(self)
        self.model, self._first = model, first
        self.given: Sequence[Tensor] = ()
        self.buffers, self._watch = Buffers(model), Watch()
        self._sight: Sight | None = None
        self._layout: Layout | None = None
        self._kinds: list[Any] = []
        self._known: list[Tensor] = []  # all parameters
        self._idle: list[Tensor] = []  # of these, those that do not require gradients
        self._synchronized: list[nn.Module] = []  # modules that compute with other ranks

    @property
    def device(self) -> torch.device:
        """The device of the parameters, and of small messages about them."""
        trained = self._layout.trained if self._layout is not None else []
        device: torch.device = (trained[0] if trained else self._first).device
        return device

    # ---- when a step begins --------------------------------------------------------------

    def look(self, *, alone: bool) -> Layout:
        """Return the layout of now; the same object as before if nothing has changed.

        Raises `UsageError` for what cannot be trained.
        """
        if self._sight is None or not self._sight.holds():
            self._sight, self._layout = Sight(self.model), None
        known = [*self._sight.parameters, *self._outside(self._sight.parameters)]
        if self._layout is None:
            self._require_shapes(known)
        kinds = list(map(_KIND, known))
        others = self.buffers.look(self._sight) or kinds != self._kinds
        if self._layout is None or others or not all(map(is_, known, self._known)):
            self._lay_out(known)
            self._kinds = kinds
        for each in self._synchronized:
            if each.training and not alone:
                raise UsageError(
                    "SyncBatchNorm computes with the samples of as many micro-batches as there "
                    "are workers; FixedBatch needs BatchNorm, whose statistics it combines"
                )
        assert self._layout is not None  # noqa: S101 - it was made above
        if not self._layout.trained and torch.is_grad_enabled():  # else BatchNorm is calibrated
            raise UsageError("FixedBatch has nothing to train: each parameter is frozen")
        self._watch.begin(self._known)
        return self._layout

    def _lay_out(self, known: list[Tensor]) -> None:
        self._layout, self._known = None, known
        trained = [each for each in known if each.requires_grad]
        self._idle = [each for each in known if not each.requires_grad]
        self._synchronized = [m for m in self.model.modules() if isinstance(m, nn.SyncBatchNorm)]
        names = names_of(self.model)
        self._layout = Layout(trained, [self.name(each, names) for each in trained], self.buffers)

    def _outside(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters of the state's optimizers that no subject's model has."""
        if not self.given:
            return []
        seen = {id(each) for each in own}
        for other in _subjects:
            if other.model is not self.model:
                seen.update(id(each) for each in other.model.parameters())
        return [each for each in self.given if id(each) not in seen]

    def _require_shapes(self, known: Sequence[Tensor]) -> None:
        assert self._sight is not None  # noqa: S101 - look() has just made it
        for each in (*known, *(buffer for *_, buffer in self._sight.buffers)):
            if is_lazy(each):
                raise UsageError(
                    f"{self.name(each)} has no shape yet, because its module is lazy; run the "
                    "model once on every rank before it is trained"
                )

    def name(self, tensor: Tensor, names: dict[int, str] | None = None) -> str:
        """Return the name of a parameter; `names` are those of the model."""
        name = (names_of(self.model) if names is None else names).get(id(tensor))
        if name is None:
            at = [number for number, each in enumerate(self.given) if each is tensor]
            name = f"{at[0]} of the optimizers" if at else "outside of the model"
        return name

    # ---- while it lasts ------------------------------------------------------------------

    def drop_gradients(self) -> None:
        """Drop the gradients of all parameters, also of frozen ones: optimizers would use them."""
        for parameter in self._known:
            parameter.grad = None

    def trains_any(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether this step sums the gradient of any of these."""
        trained = {id(each) for each in self._layout.trained} if self._layout is not None else set()
        return any(id(each) in trained for each in parameters)

    # ---- when it ends --------------------------------------------------------------------

    def stray(self, step: str) -> Iterator[UsageError]:
        """Yield what this rank's micro-batches have done and must not do."""
        new: list[Tensor] = []
        if self._sight is not None and not self._sight.holds():
            sight, before = Sight(self.model), set(map(id, self._sight.modules))
            known = set(map(id, self._known))
            new = [each for each in sight.parameters if id(each) not in known]
            if any(buffers_of(each) and id(each) not in before for each in sight.modules):
                yield UsageError(
                    "a module with buffers was added inside the loop over micro-batches; add "
                    "modules between two steps"
                )
        for each in (*self._idle, *new):
            if each.grad is not None:
                yield UsageError(
                    f"parameter {self.name(each)} got a gradient, but did not require one when "
                    f"{step} began; unfreeze and add parameters before the loop over micro-batches"
                )
        if self.buffers.trouble is not None:
            yield self.buffers.trouble
        if (changed := self._watch.changed()) is not None:
            yield UsageError(
                f"parameter {self.name(changed)} was changed inside the loop over micro-batches, "
                "once for each one of this worker; change it once a step, after that loop"
            )
