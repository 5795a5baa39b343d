"""The random number generators of this process: Python's, NumPy's, torch's, the accelerator's.

`TorchState` keeps their states at a commit, puts them back after a failed step, and gives a
newcomer the states of the member that sends it the model. NumPy and the accelerator count only
where the script has loaded them already; nothing here imports or initialises them.

A script may also keep generators of its own in a state. Those are values: the state of each is
read, written, and put into a new one (`random_state`, `new_random`).
"""

import ctypes
import importlib
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from elastic_driver.worker import accelerator

_WORD_BYTES = 4
_KEY_BYTES = 624 * _WORD_BYTES  # NumPy stores the position behind the key


class MersenneWatch:
    """NumPy's global Mersenne Twister; its state is read again only after it was used.

    Reading takes 80 to 120 µs at the end of a step, when the processor's caches hold other things,
    and most loops draw from torch alone. Two words of its state, which NumPy gives the address of,
    tell whether it moved: the position changes with each draw, and every word of the key when the
    position starts over, or with another seed. (Seeding sets the first word to a constant, so the
    second is read.)

    Args:
        generator: of bits, of the kind MT19937; a reference keeps its memory valid.
        ask: returns the state.
    """

    def __init__(self, generator: Any, ask: Callable[[], Any]) -> None:
        self.generator = generator
        self._ask = ask
        key = generator.ctypes.state_address
        self._second = ctypes.c_uint32.from_address(key + _WORD_BYTES)
        self._position = ctypes.c_uint32.from_address(key + _KEY_BYTES)
        self._seen: tuple[int, int] | None = None
        self._state: Any = None

    def state(self) -> Any:
        """Return the state of the generator now."""
        words = self._second.value, self._position.value
        if words != self._seen:
            self._state = self._ask()
            # Using up a stored Gaussian changes neither word: ask again while one is stored.
            has_gaussian = self._state[3]
            self._seen = None if has_gaussian else words
        return self._state


class RandomStates:
    """Takes and puts back the states of all generators of this process."""

    def __init__(self) -> None:
        self._numpy: MersenneWatch | None = None

    def take(self) -> dict[str, Any]:
        """Return the states now, by generator.

        Torch's is a copy of the generator, which takes half the time of a state tensor. NumPy's is
        a tuple for a Mersenne Twister, and a dictionary for another kind of generator.
        """
        states: dict[str, Any] = {"python": random.getstate()}
        states["torch"] = torch.default_generator.clone_state()
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            states["numpy"] = self._numpy_state(numpy_random)
        if (device := accelerator.in_use()) is not None:
            states["device"] = device.get_rng_state()
        return states

    def _numpy_state(self, numpy_random: Any) -> Any:
        generator = numpy_random.get_bit_generator()
        if self._numpy is not None and self._numpy.generator is generator:
            return self._numpy.state()
        if type(generator).__name__ != "MT19937":
            return numpy_random.get_state(legacy=False)
        self._numpy = MersenneWatch(generator, numpy_random.get_state)
        return self._numpy.state()

    def portable(self) -> dict[str, Any]:
        """Return the states now, made of plain values and tensors only.

        NumPy's is left out where it is not a Mersenne Twister: each process keeps its own.
        """
        states = self.take()
        states["torch"] = states["torch"].get_state()
        numpy_state = states.pop("numpy", None)
        if isinstance(numpy_state, tuple):
            name, key, *rest = numpy_state
            states["numpy"] = (name, torch.from_numpy(key.astype("int64")), *rest)
        return states

    def put(self, states: dict[str, Any]) -> None:
        """Set the generators to the result of `take` or, of another process, of `portable`.

        A generator that is not in `states` stays as it is.
        """
        random.setstate(states["python"])
        kept = states["torch"]
        torch.set_rng_state(kept.get_state() if isinstance(kept, torch.Generator) else kept)
        if "numpy" in states and "numpy.random" in sys.modules:
            sys.modules["numpy.random"].set_state(states["numpy"])
        if "device" in states and (device := accelerator.in_use()) is not None:
            device.set_rng_state(states["device"])


# ---- generators as values ----------------------------------------------------------------

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
