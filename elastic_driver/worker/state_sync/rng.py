"""The random number generators of this process: Python's, NumPy's, torch's, the accelerator's.

`TorchState` keeps their states at a commit, puts them back after a failed step, and gives a
newcomer the states of the member that sends it the model. NumPy and the accelerator count only
where the script has loaded them already; nothing here imports or initialises them.

Random generators as values: the state of each is read, written, and put into a new one.
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
    """A Mersenne Twister of this process; its state is read again only after it was used.

    Reading takes 30 to 60 µs at the end of a step, when the processor's caches hold other things,
    and most loops draw from torch alone. Two words of the generator's memory tell whether it moved:
    the position changes with each draw, and every word of the key when the position starts over,
    or with another seed. (Seeding sets the first word to a constant, so the second is read.)

    Args:
        ask: returns the state.
        gaussian: index in a state of its stored second Gaussian: None or 0 where there is none.
        owner: the object that the memory belongs to; a reference keeps the memory valid.
        key, position: their addresses.
    """

    def __init__(
        self, ask: Callable[[], Any], gaussian: int, owner: object, key: int, position: int
    ) -> None:
        self.owner = owner
        self._ask, self._gaussian = ask, gaussian
        self._second = ctypes.c_uint32.from_address(key + _WORD_BYTES)
        self._position = ctypes.c_uint32.from_address(position)
        self._seen: tuple[int, int] | None = None
        self._state: Any = None

    def words(self) -> tuple[int, int]:
        """Return the second word of the key, and the position."""
        return self._second.value, self._position.value

    def state(self) -> Any:
        """Return the state of the generator now."""
        words = self.words()
        if words != self._seen:
            self._state = self._ask()
            # Using up a stored Gaussian changes neither word: ask again while one is stored.
            self._seen = None if self._state[self._gaussian] else words
        return self._state


def python_state() -> Callable[[], tuple[Any, ...]]:
    """Return a function with the result of `random.getstate`, but faster where that is possible.

    CPython stores a generator as position and key. Where memory shows another layout, the result
    is `random.getstate` itself.
    """
    owner = getattr(random.getstate, "__self__", None)
    if type(owner) is not random.Random:
        return random.getstate
    position = id(owner) + object.__basicsize__
    watch = MersenneWatch(random.getstate, 2, owner, position + _WORD_BYTES, position)
    words = random.getstate()[1]
    return watch.state if watch.words() == (words[1], words[-1]) else random.getstate


class RandomStates:
    """Takes and puts back the states of all generators of this process."""

    def __init__(self) -> None:
        self._python_state = python_state()
        self._numpy: MersenneWatch | None = None

    def take(self) -> dict[str, Any]:
        """Return the states now, by generator.

        Torch's is a copy of the generator, which takes half the time of a state tensor. NumPy's is
        a tuple for a Mersenne Twister, and a dictionary for another kind of generator.
        """
        states: dict[str, Any] = {"python": self._python_state()}
        states["torch"] = torch.default_generator.clone_state()
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            states["numpy"] = self._numpy_state(numpy_random)
        if (device := accelerator.in_use()) is not None:
            states["device"] = device.get_rng_state()
        return states

    def _numpy_state(self, numpy_random: Any) -> Any:
        generator = numpy_random.get_bit_generator()
        if self._numpy is not None and self._numpy.owner is generator:
            return self._numpy.state()
        if type(generator).__name__ != "MT19937":
            return numpy_random.get_state(legacy=False)
        key = generator.ctypes.state_address
        position = key + _KEY_BYTES
        self._numpy = MersenneWatch(numpy_random.get_state, 3, generator, key, position)
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
