"""Random generators as values: the state of each is read, written, and put into a new one."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

_RANDOM = (  # module, class, how its state is read and written
    ("random", "Random", "getstate", "setstate"),
    ("numpy.random", "RandomState", "get_state", "set_state"),
)


def random_state(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """Return how the state of a random generator is read and written; None for other objects."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and type(value) is numpy.Generator:
        bits = value.bit_generator
        if getattr(numpy, type(bits).__name__, None) is not type(bits):
            return None
        return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    for module, name, read, write in _RANDOM:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and type(value) is kind:
            return getattr(value, read), getattr(value, write)
    return None


_OF_TORCH = "torch on "


def new_random(name: str, more: Any) -> Any:
    """Return a new random generator of the class `name`; `more` is what `random_more` returned."""
    if name == "Generator" and more.startswith(_OF_TORCH):
        return torch.Generator(device=more.removeprefix(_OF_TORCH))
    if name == "Generator":
        import numpy  # noqa: PLC0415 - only where a script uses it

        bits = getattr(numpy.random, more)
        if not issubclass(bits, numpy.random.BitGenerator):
            raise ValueError(f"numpy.random.{more} generates no bits")
        return numpy.random.Generator(bits())
    for module, each, *_ in _RANDOM:
        if name == each:
            return getattr(importlib.import_module(module), name)()
    raise ValueError(f"{name} is no random generator")


def random_more(value: Any) -> Any:
    """Return what it takes to make a random generator: its device, or the name of its bits."""
    if isinstance(value, torch.Generator):
        return f"{_OF_TORCH}{value.device.type}"
    bits = getattr(value, "bit_generator", None)
    return None if bits is None else type(bits).__name__
