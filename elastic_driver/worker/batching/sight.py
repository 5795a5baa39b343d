"""What a model consists of now, and by which rule each of its buffers is combined.

`batching.gradients` looks in every step, because scripts freeze and unfreeze layers, replace
modules, and rebind, resize and add buffers while they train. Nothing here communicates or changes
a tensor.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import chain
from operator import is_, methodcaller
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from elastic_driver.worker.torch_seams import buffers_of, children_of, parameters_of, version_of

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
        self.module = module
        self.key = key
        self.tensor = tensor
        self.shape = tensor.shape
        self.rule = rule_of(module, key, tensor)
        self.start = tensor
        owner: Any = buffers_of(module)
        self.get: Callable[[str], Any] = getattr(owner, "get", None) or _getter(owner)

    def put_back(self, value: Tensor | None = None) -> None:
        """Bind the tensor that the step began with, in its size then, with `value` or `start`."""
        with torch.no_grad():
            if self.tensor.shape != self.shape:
                self.tensor.resize_(self.shape)
            self.tensor.copy_(self.start if value is None else value)
        buffers: Any = buffers_of(self.module)
        buffers[self.key] = self.tensor


def _getter(owner: Any) -> Callable[[str], Tensor | None]:
    """Return the `get` of a scripted module's buffers, which are no dict."""
    return lambda key: owner[key] if key in owner else None  # noqa: SIM401 - it has no get


class Sight:
    """The parameters and buffers of a model at one moment, each once, in torch's order.

    A walk takes as long as an optimizer's step of a small model; whether its result still holds is
    found in a tenth of that.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters: list[Tensor] = []
        self.buffers: list[Held] = []
        self.modules: list[nn.Module] = []
        self._modules: list[Any] = []  # what each of them has, by name: modules, …
        self._parameters: list[Any] = []
        self._buffers: list[Any] = []
        seen: set[int] = set()
        waiting: list[nn.Module | None] = [model]
        while waiting:
            module = waiting.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            self.modules.append(module)
            self._modules.append(children_of(module))
            self._parameters.append(parameters_of(module))
            self._buffers.append(buffers_of(module))
            for parameter in parameters_of(module).values():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    self.parameters.append(parameter)
            for key, buffer in buffers_of(module).items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self.buffers.append((module, key, buffer))
            waiting.extend(reversed(list(children_of(module).values())))
        self._held = [_values(each) for each in (self._modules, self._parameters, self._buffers)]

    def holds(self) -> bool:
        """Return whether the model still has the same modules, parameters and buffers."""
        modules, parameters, _ = self._held
        return (
            _same(self._modules, modules)
            and _same(self._parameters, parameters)
            and self.buffers_hold()
        )

    def buffers_hold(self) -> bool:
        """Return whether each buffer of these modules is still the same tensor."""
        return _same(self._buffers, self._held[2])


def _values(owners: Iterable[Any]) -> list[Any]:
    return list(chain.from_iterable(map(_VALUES, owners)))


def _same(owners: Iterable[Any], before: list[Any]) -> bool:
    now = _values(owners)
    return len(now) == len(before) and all(map(is_, now, before))


_VALUES = methodcaller("values")


def rule_of(module: nn.Module, key: str, tensor: Tensor) -> Rule:
    """Return the rule for a buffer.

    Observers and fake quantizers (torch.ao.quantization, torchao) are known by what they have, not
    by their classes, so that nothing has to be imported.
    """
    buffers: Any = buffers_of(module)
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
        self._all: Sequence[Tensor] = ()
        self._tensors: list[Tensor] = []
        self._marks: list[tuple[int, int]] = []
        self._moving: dict[int, Tensor] = {}  # by `id`
        self._copies: list[tuple[Tensor, Tensor]] = []

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Note how these parameters are; those of whole numbers are a library's own packing.

        The same list has the same parameters.
        """
        if parameters is not self._all:
            self._all = parameters
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
        return [(version_of(each), each.data_ptr()) for each in tensors]
    except RuntimeError:  # a tensor without versions (inference mode), or without an address
        return [_mark(each) for each in tensors]


def _mark(tensor: Tensor) -> tuple[int, int]:
    try:
        return version_of(tensor), tensor.data_ptr()
    except RuntimeError:
        return 0, 0
