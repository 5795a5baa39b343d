"""Which part an object of a script gets: modules, optimizers, and all that can load a state."""

from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from elastic_driver.worker.state_sync.module_part import ModulePart, OwnStatePart
from elastic_driver.worker.state_sync.optimizer_part import OptimizerPart
from elastic_driver.worker.state_sync.part import Named, Outgoing, Rest, StatePart
from elastic_driver.worker.state_sync.scaler_part import ScalerPart

__all__ = ["ModulePart", "Named", "OptimizerPart", "Outgoing", "Rest", "StatePart", "part_for"]


def part_for(name: str, thing: Any) -> StatePart | None:
    """Return the part that handles `thing`, or None for a plain value."""
    if isinstance(thing, nn.Module):
        keeps_itself = type(thing).state_dict is not nn.Module.state_dict
        empty = not (any(True for _ in thing.parameters()) or any(True for _ in thing.buffers()))
        return OwnStatePart(name, thing) if keeps_itself and empty else ModulePart(name, thing)
    if isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict:
        return OptimizerPart(name, thing)
    if isinstance(thing, GradScaler):
        return ScalerPart(name, thing)
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return StatePart(name, thing)
    return None
