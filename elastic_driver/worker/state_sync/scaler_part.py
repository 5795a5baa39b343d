"""The part of a gradient scaler: its state, and how far it is in the step of each optimizer.

`unscale_()` notes that an optimizer's gradients are unscaled, and what was found in them, until
`update()`. No `state_dict()` has that. A step that was begun and is done again would find it:
`step()` would take new gradients for unscaled ones, and `unscale_()` would refuse to work twice.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.amp import GradScaler

from elastic_driver.worker.state_sync.part import StatePart
from elastic_driver.worker.torch_seams import scalers


class _Kept(NamedTuple):
    """What a commit keeps of a scaler."""

    state: dict[str, Any]  # its own, with tensors in place of numbers that are on its device
    steps: dict[int, dict[str, Any]]  # by identity of an optimizer; between steps there are none

    def plain(self) -> dict[str, Any]:
        """Return the state as `state_dict()` would have."""
        return {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in self.state.items()
        }


class ScalerPart(StatePart):
    """A `torch.amp.GradScaler`."""

    def take(self) -> _Kept:
        """See `StatePart.take`. Waits for no device, as `state_dict()` would."""
        steps = scalers.steps_of(self.thing)
        return _Kept(self._read(), {key: dict(step) for key, step in steps.items()})

    def _read(self) -> dict[str, Any]:
        scaler = self.thing
        scale, tracker = scalers.numbers_of(scaler)
        if scale is None or tracker is None or type(scaler).state_dict is not GradScaler.state_dict:
            state: dict[str, Any] = super().take()
            return state
        return {
            "scale": scale.clone(),
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            "_growth_tracker": tracker.clone(),
        }

    def roll_back(self) -> None:
        """See `StatePart.roll_back`."""
        kept: _Kept = self.kept
        self.thing.load_state_dict(kept.plain())
        self._put(kept.steps)

    def values(self) -> list[tuple[str, Any]]:
        """See `StatePart.values`."""
        kept: _Kept = self.kept
        return [(f"{self.name}.{key}", value) for key, value in kept.plain().items()]

    def accept(self, document: Any, tensors: Sequence[Tensor], /) -> None:
        """See `StatePart.accept`: the sender is between two steps."""
        super().accept(document, tensors)
        self._put({})

    def _put(self, kept: dict[int, dict[str, Any]]) -> None:
        steps = scalers.steps_of(self.thing)
        steps.clear()
        steps.update({key: dict(step) for key, step in kept.items()})
