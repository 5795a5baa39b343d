"""`hvd.elastic.TorchState`, and handlers for types of the script's own."""

from collections.abc import Callable
from typing import Any

import torch

from elastic_driver.horovod.common.elastic import Kept, ObjectState, State
from elastic_driver.horovod.common.exceptions import HorovodUsageError
from elastic_driver.horovod.torch.elastic.sampler import ElasticSampler
from elastic_driver.horovod.torch.optimizer import forget_reductions, unfinished
from elastic_driver.worker.state_sync.module_parts import part_for
from elastic_driver.worker.state_sync.part import Outgoing, StatePart

__all__ = ["StateHandler", "TorchState", "get_handler_registry", "set_handler_registry"]


class StateHandler:
    """Keeps one attribute of a state; a script derives its own for a type of its own.

    `value` is the attribute. `save` copies it, `restore` puts the copy back, and `sync`, which all
    ranks call, makes it the one of rank 0.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Copy the value, at a commit."""
        raise NotImplementedError

    def restore(self) -> None:
        """Put the copy back."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the value that of rank 0, on all ranks."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Keep another object from now on."""
        self.value = value
        self.save()


Registry = list[tuple[type, Callable[[Any], StateHandler]]]


class _Handlers:
    """The mutable field of this module."""

    registry: Registry = []  # noqa: RUF012 - replaced as a whole


def get_handler_registry() -> Registry:
    """Return pairs of a type and the handler of its objects; the first that fits counts.

    Modules, optimizers and samplers need none.
    """
    return _Handlers.registry


def set_handler_registry(registry: Registry) -> None:
    """Use these handlers for states that are made from now on."""
    _Handlers.registry = registry


class _HandledPart(StatePart):
    """An attribute that a handler of the script keeps."""

    def __init__(self, name: str, handler: StateHandler) -> None:
        super().__init__(name, handler.value)
        self.handler = handler

    def take(self) -> None:
        """See `StatePart.take`."""
        self.handler.save()

    def roll_back(self) -> None:
        """See `StatePart.roll_back`."""
        self.handler.restore()

    def values(self) -> list[tuple[str, Any]]:
        """Return nothing: only the handler knows what its value holds."""
        return []

    def outgoing(self) -> Outgoing:
        """Return nothing: the handler's `sync` sends it."""
        return [self._class(), None], []

    def accept(self, _document: Any, _tensors: Any, /) -> None:
        """Do nothing, as above."""


class _KeptTorch(Kept):
    """The models, optimizers and values of a `TorchState`."""

    def __init__(self, owner: State) -> None:
        self._handled: dict[str, _HandledPart] = {}
        self._registry = list(_Handlers.registry)  # as it is now, for good
        super().__init__(owner)

    def _keep_values(self) -> None:
        for optimizer in self._all(torch.optim.Optimizer):
            if why := unfinished(optimizer):
                raise HorovodUsageError(
                    f"commit() amid a step: {why}; commit after optimizer.step()"
                )
        super()._keep_values()

    def _is_between_steps(self) -> bool:
        return not any(unfinished(each) for each in self._all(torch.optim.Optimizer))

    def _put_back(self) -> None:
        for optimizer in self._all(torch.optim.Optimizer):
            forget_reductions(optimizer)
        super()._put_back()

    def _make_equal(self) -> None:
        super()._make_equal()
        for part in self._handled.values():
            part.handler.sync()
        for sampler in self._all(ElasticSampler):
            sampler.reset()

    def _part_for(self, name: str, thing: Any) -> StatePart | None:
        """Return the part of an object: that of the script's handler where there is one."""
        if "." not in name and (handler := self._handler(name, thing)) is not None:
            part = self._handled[name] = _HandledPart(name, handler)
            return part
        return part_for(name, thing)

    def _handler(self, name: str, thing: Any) -> StateHandler | None:
        before = self._handled.get(name)
        if before is None:
            return next((make(thing) for k, make in self._registry if isinstance(thing, k)), None)
        before.handler.set_value(thing)
        return before.handler

    def _has_part(self, value: Any) -> bool:
        return super()._has_part(value) or any(isinstance(value, k) for k, _ in self._registry)


class TorchState(ObjectState):
    """A model, an optimizer, and everything else that a script trains with.

    Args:
        model: a module; further ones may be given by keyword.
        optimizer: of the module; further ones likewise.
        kwargs: attributes; `snapshot=False` makes a commit free, see `ObjectState`.

    `save` raises `HorovodUsageError` in the middle of a step; `restore` drops gradients.
    """

    _kind_of_kept = _KeptTorch

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs, model=model, optimizer=optimizer)
