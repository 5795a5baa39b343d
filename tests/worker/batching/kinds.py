"""Modules with buffers of every kind, as scripts have them; tests train each in a step's loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao import quantization as ao
from torch.nn.utils import parametrizations


class Kept(nn.Module):
    """A linear layer behind a module that keeps what it has seen in buffers."""

    def __init__(self, keeper: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.keeper = keeper
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.keeper(inputs)
        return self.linear(inputs if found is None else found)


class Keeper(nn.Module):
    """Has one buffer, which `update(buffer, inputs)` changes in place, or replaces by its result.

    Each micro-batch of inputs has four columns; `only` names the micro-batches that reach it.
    """

    def __init__(
        self,
        start: Any,
        update: Callable[[Tensor, Tensor], Tensor | None],
        rebind: bool = False,
        persistent: bool = True,
    ) -> None:
        super().__init__()
        start = start if isinstance(start, Tensor) else torch.tensor(start)
        self.register_buffer("kept", start.clone(), persistent=persistent)
        self.update, self.rebind = update, rebind

    def forward(self, inputs: Tensor) -> None:
        found = self.update(self.kept, inputs.detach())
        if found is not None and self.rebind:
            self.kept = found
        elif found is not None:
            self.kept.copy_(found)


class Queue(nn.Module):
    """MoCo's: the newest keys, and where the next ones go."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.randn(4, 64))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

    def forward(self, inputs: Tensor) -> None:
        first = int(self.pointer)
        self.keys[:, first : first + len(inputs)] = inputs.detach().T
        self.pointer[0] = (first + len(inputs)) % 64


class Late(nn.Module):
    """Makes its buffer in the first forward pass."""

    def __init__(self, value: Callable[[Tensor], Tensor], registered: bool) -> None:
        super().__init__()
        self.value = value
        if registered:
            self.register_buffer("made", None)

    def forward(self, inputs: Tensor) -> None:
        if getattr(self, "made", None) is None:
            if "made" in self._buffers:
                self.made = self.value(inputs.detach())
            else:
                self.register_buffer("made", self.value(inputs.detach()), persistent=False)


def mean(inputs: Tensor) -> Tensor:
    return inputs.mean(0)


INFINITE = float("inf")

# What becomes of the buffer `kept` in a step, from its start and the micro-batches with weights.
Expected = Callable[[list[Tensor], list[float]], Any]


def averaged(of: Callable[[Tensor], Tensor]) -> Expected:
    return lambda parts, weights: sum(w * of(p) for p, w in zip(parts, weights, strict=True))


SUMMED: dict[str, tuple[Callable[[], nn.Module], Expected]] = {
    "moving mean": (
        lambda: Keeper([1.0] * 4, lambda kept, x: kept.mul_(0.9).add_(mean(x), alpha=0.1)),
        averaged(lambda x: 0.9 + 0.1 * mean(x)),
    ),
    "moving mean that is rebound": (
        lambda: Keeper([1.0] * 4, lambda kept, x: 0.9 * kept + 0.1 * mean(x), rebind=True),
        averaged(lambda x: 0.9 + 0.1 * mean(x)),
    ),
    "moving mean that is not saved": (
        lambda: Keeper([0.0] * 4, lambda kept, x: kept + mean(x), persistent=False),
        averaged(mean),
    ),
    "running minimum from infinity": (
        lambda: Keeper(INFINITE, lambda kept, x: torch.minimum(kept, x.min())),
        averaged(lambda x: x.min()),
    ),
    "running maximum from minus infinity": (
        lambda: Keeper([-INFINITE] * 4, lambda kept, x: torch.maximum(kept, x.amax(0))),
        averaged(lambda x: x.amax(0)),
    ),
    "best from 1e9": (
        lambda: Keeper(1e9, lambda kept, x: torch.minimum(kept, x.abs().max())),
        averaged(lambda x: x.abs().max()),
    ),
    "best of several from 1e30": (
        lambda: Keeper([1e30] * 4, lambda kept, x: torch.minimum(kept, x.abs().amax(0))),
        averaged(lambda x: x.abs().amax(0)),
    ),
    "best from 1e300": (
        lambda: Keeper(
            torch.tensor([1e300, 0.5], dtype=torch.float64),
            lambda kept, x: torch.minimum(kept, x.double().abs().max()),
        ),
        averaged(lambda x: torch.stack([x.double().abs().max(), torch.tensor(0.5).double()])),
    ),
    "from no number": (
        lambda: Keeper([float("nan")] * 4, lambda kept, x: mean(x)),
        averaged(mean),
    ),
    "from one end to the other": (
        lambda: Keeper(-3e38, lambda kept, x: torch.full_like(kept, 3e38)),
        lambda parts, weights: 3e38,
    ),
    "half precision": (
        lambda: Keeper(
            torch.zeros(4, dtype=torch.bfloat16), lambda kept, x: mean(x).to(torch.bfloat16)
        ),
        averaged(mean),
    ),
    "complex": (
        lambda: Keeper([1j] * 4, lambda kept, x: torch.complex(mean(x), 2 * mean(x))),
        averaged(lambda x: torch.complex(mean(x), 2 * mean(x))),
    ),
    "float counter": (
        lambda: Keeper(7.0, lambda kept, x: kept + 1),
        lambda parts, weights: 8.0,
    ),
    "counter": (lambda: Keeper(7, lambda kept, x: kept + 2), lambda parts, weights: 9),
    "counter of bytes": (
        lambda: Keeper(torch.tensor([7, 8], dtype=torch.uint8), lambda kept, x: kept - 1),
        lambda parts, weights: [6, 7],
    ),
    "flag": (
        lambda: Keeper(False, lambda kept, x: torch.tensor(True)),
        lambda parts, weights: True,
    ),
    "mask": (
        lambda: Keeper([0.0, -INFINITE, 1 / 3, float("nan")], lambda kept, x: None),
        lambda parts, weights: [0.0, -INFINITE, 1 / 3, float("nan")],
    ),
    "large mask": (
        lambda: Keeper(torch.ones(2000, dtype=torch.bool), lambda kept, x: None),
        lambda parts, weights: torch.ones(2000, dtype=torch.bool),
    ),
    "lowest of an observer": (
        lambda: Renamed(ao.MinMaxObserver(), "min_val"),
        lambda parts, weights: min(part.min() for part in parts),
    ),
    "highest of an observer": (
        lambda: Renamed(ao.MinMaxObserver(), "max_val"),
        lambda parts, weights: max(part.max() for part in parts),
    ),
    "lowest of each channel": (
        lambda: Renamed(ao.PerChannelMinMaxObserver(ch_axis=1), "min_val"),
        lambda parts, weights: torch.cat(parts).amin(0),
    ),
    "moving average of the lowest": (
        lambda: Renamed(ao.MovingAverageMinMaxObserver(averaging_constant=0.1), "min_val"),
        averaged(lambda x: x.min()),
    ),
    "moving average of each channel": (
        lambda: Renamed(
            ao.MovingAveragePerChannelMinMaxObserver(averaging_constant=0.1, ch_axis=1), "max_val"
        ),
        averaged(lambda x: x.amax(0)),
    ),
    "made, the same in each": (
        lambda: Renamed(Late(lambda x: torch.arange(5.0), False), "made"),
        lambda parts, weights: torch.arange(5.0),
    ),
    "filled, the same in each": (
        lambda: Renamed(Late(lambda x: torch.arange(5), True), "made"),
        lambda parts, weights: torch.arange(5),
    ),
}


class Renamed(nn.Module):
    """Shows a buffer of a module under the name `kept`."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.inner, self.name = inner, name

    @property
    def kept(self) -> Tensor:
        found: Tensor = getattr(self.inner, self.name)
        return found

    def forward(self, inputs: Tensor) -> Any:
        return self.inner(inputs)


def fake_quantizer() -> nn.Module:
    return ao.FakeQuantize(ao.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)


def exact_quantizer() -> nn.Module:
    return ao.FakeQuantize(ao.MinMaxObserver, quant_min=0, quant_max=255)


def fused_quantizer() -> nn.Module:
    return ao.FusedMovingAvgObsFakeQuantize(
        ao.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
    )


def channel_quantizer() -> nn.Module:
    return ao.FakeQuantize(
        ao.MovingAveragePerChannelMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        ch_axis=1,
    )


QUANTIZERS = {
    "per tensor": fake_quantizer,
    "lowest and highest": exact_quantizer,
    "fused": fused_quantizer,
    "per channel": channel_quantizer,
}


class Spectral(nn.Module):
    """Divides a layer by its largest singular value, found by iteration in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layer(inputs)
        return found


# Trained without complaint; the same on every number of workers.
TRAINED: dict[str, Callable[[], nn.Module]] = {
    **{name: make for name, (make, _) in SUMMED.items()},
    **QUANTIZERS,
    "BatchNorm": lambda: nn.BatchNorm1d(4),
    "BatchNorm of all steps": lambda: nn.BatchNorm1d(4, momentum=None),
    "spectral norm": Spectral,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
}

# Refused, and the words by which.
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "samples counted": (
        lambda: Keeper(0, lambda kept, x: kept + (x[:, 0] > 0).sum()),
        "buffer keeper.kept of whole numbers was changed by",
    ),
    "flag of some": (
        lambda: Keeper(False, lambda kept, x: x[0, 0] > 0),
        "buffer keeper.kept of whole numbers was changed by 0 in one micro-batch and by 1",
    ),
    "permutation": (
        lambda: Keeper(torch.arange(6), lambda kept, x: x.flatten()[:6].argsort()),
        "buffer keeper.kept of whole numbers was changed by",
    ),
    "labels of a queue": (
        lambda: Keeper(torch.arange(4096), lambda kept, x: kept.roll(1)),
        "buffer keeper.kept was changed by micro-batches, and a table of integers",
    ),
    "queue": (Queue, "buffer keeper.keys is a queue, in which keeper.pointer points"),
    "histogram": (
        ao.HistogramObserver,
        "buffer keeper.(histogram|min_val) was changed by micro-batches",
    ),
    "another type": (
        lambda: Keeper(3, lambda kept, x: kept * 0.5, rebind=True),
        "buffer keeper.kept became torch.float32 inside the loop over micro-batches, from torch.in",
    ),
    "another size in each": (
        lambda: Keeper([0.0], lambda kept, x: torch.zeros(1 + int(x[0, 0] > 0)), rebind=True),
        "buffer keeper.kept",
    ),
}
