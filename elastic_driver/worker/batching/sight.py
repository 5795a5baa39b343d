"""What a model consists of now, and by which rule each of its buffers is combined.

`batching.gradients` looks in every step, because scripts freeze and unfreeze layers, replace
modules, and rebind, resize and add buffers while they train. Nothing here communicates or changes
a tensor.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

LARGEST_COUNT = 1024  # elements of an integer buffer that may count; a larger one is a table


class Rule(Enum):
    """How the values that micro-batches leave in a buffer become the step's value."""

    MEAN = "moved by the mean of the changes"
    COUNT = "moved by what every micro-batch adds"
    LOWEST = "the lowest"
    HIGHEST = "the highest"
    DERIVED = "computed from an observer"
    CONSTANT = "must stay as it is"


# A buffer: its module, its name there, and the tensor.
Held: TypeAlias = tuple[nn.Module, str, Tensor]


class Place:
    """A buffer's place in a module, and the tensor that is there when a step begins.

    `start` is its value then, of the same shape. The group of the buffer sets it.
    """

    __slots__ = ("get", "key", "module", "rule", "shape", "start", "tensor")

    def __init__(self, module: nn.Module, key: str, tensor: Tensor) -> None:
        self.module, self.key, self.tensor, self.shape = module, key, tensor, tensor.shape
        self.rule = rule_of(module, key, tensor)
        self.start = tensor
        owner: Any = module._buffers
        self.get: Callable[[str], Tensor | None] = getattr(owner, "get", None) or _getter(owner)

    def put_back(self, value: Tensor | None = None) -> None:
        """Bind the tensor that the step began with, in its size then, with `value` or `start`."""
        with torch.no_grad():
            if self.tensor.shape != self.shape:
                self.tensor.resize_(self.shape)
            self.tensor.copy_(self.start if value is None else value)
        buffers: Any = self.module._buffers
        buffers[self.key] = self.tensor


def _getter(owner: Any) -> Callable[[str], Tensor | None]:
    """Return the `get` of a scripted module's buffers, which are no dict."""
    return lambda key: owner[key] if key in owner else None  # noqa: SIM401 - it has no get


class Sight:
    """The parameters and buffers of a model at one moment, each once, in torch's order."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters: list[Tensor] = []
        self.buffers: list[Held] = []
        self.vacant: list[tuple[Any, str]] = []  # names of buffers that are None
        self.owners: list[Any] = []  # the buffers of each module, by name
        seen: set[int] = set()
        waiting: list[nn.Module | None] = [model]
        while waiting:
            module = waiting.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    self.parameters.append(parameter)
            owner = module._buffers
            self.owners.append(owner)
            if owner:
                for key, buffer in owner.items():
                    if buffer is None:
                        self.vacant.append((owner, key))
                    elif id(buffer) not in seen:
                        seen.add(id(buffer))
                        self.buffers.append((module, key, buffer))
            if module._modules:
                waiting.extend(reversed(list(module._modules.values())))


def rule_of(module: nn.Module, key: str, tensor: Tensor) -> Rule:
    """Return the rule for a buffer.

    Observers and fake quantizers (torch.ao.quantization, torchao) are known by what they have, not
    by their classes, so that nothing has to be imported.
    """
    buffers: Any = module._buffers
    if callable(getattr(module, "calculate_qparams", None)):
        if "histogram" in buffers and key != "eps":
            return Rule.CONSTANT
        if key in ("min_val", "max_val") and not hasattr(module, "averaging_constant"):
            return Rule.LOWEST if key == "min_val" else Rule.HIGHEST
        if key in ("scale", "zero_point") and hasattr(module, "activation_post_process"):
            return Rule.DERIVED
    if tensor.is_floating_point() or tensor.is_complex():
        return Rule.MEAN if tensor.element_size() > 1 else Rule.CONSTANT
    return Rule.COUNT if tensor.numel() <= LARGEST_COUNT else Rule.CONSTANT


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the names of all parameters and buffers, by the `id` of each tensor."""
    found: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.setdefault(id(tensor), name)
    return found


def is_lazy(tensor: Tensor) -> bool:
    """Return whether a parameter or buffer has no shape yet: its first forward gives it one."""
    return bool(nn.parameter.is_lazy(tensor))


def describe(kind: str, name: str, tensor: Tensor) -> str:
    """Return one line: "parameter 0.weight (8, 4) float32"."""
    return f"{kind} {name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


class Watch:
    """Finds parameters that change while micro-batches run, which only the optimizer may move.

    A change is visible by the version or the address of a tensor. Both move also where the values
    stay (`flatten_parameters` of a recurrent module). So the first move of a tensor makes a copy of
    it at the start of each later step, with which it is compared.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._marks: list[tuple[int, int]] = []
        self._moving: dict[int, Tensor] = {}  # by `id`
        self._copies: list[tuple[Tensor, Tensor]] = []

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Note how these parameters are; those of whole numbers are a library's own packing."""
        self._tensors = [each for each in parameters if each.is_floating_point()]
        self._marks = _marks(self._tensors)
        if self._moving:
            here = [each for each in self._tensors if id(each) in self._moving]
            self._moving = {id(each): each for each in here}
            self._copies = [(each, each.detach().clone()) for each in here]

    def changed(self) -> Tensor | None:
        """Return the first parameter that is known to have changed since `begin`."""
        marks = _marks(self._tensors)
        if marks != self._marks:
            for tensor, before, now in zip(self._tensors, self._marks, marks, strict=True):
                if before != now:
                    self._moving[id(tensor)] = tensor
        for tensor, copy in self._copies:
            if tensor.shape != copy.shape or not torch.equal(tensor.detach(), copy):
                return tensor
        return None


def _marks(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    try:
        return [(each._version, each.data_ptr()) for each in tensors]
    except RuntimeError:  # a tensor without versions (inference mode), or without an address
        return [_mark(each) for each in tensors]


def _mark(tensor: Tensor) -> tuple[int, int]:
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:
        return 0, 0
