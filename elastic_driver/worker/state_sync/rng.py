"""The random number generators of this process: Python's, NumPy's, torch's and, if in use, CUDA's.

`TorchState` keeps their states at a commit, puts them back after a failed step, and gives a
newcomer those of the member it takes its model from. NumPy and CUDA are looked at only where the
script has them loaded already; nothing here imports or initialises them.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

_WORD_BYTES = 4
_KEY_BYTES = 624 * _WORD_BYTES  # NumPy keeps the position behind the key


class Twister:
    """A Mersenne Twister of this process that is asked for its state only when it has moved.

    Asking takes 30 to 60 µs at the end of a step, when the processor's caches hold other things,
    and most loops draw from torch alone. Two words of the generator's memory tell whether it moved:
    the position changes with each draw, and every word of the key when the position starts over,
    or with another seed (but for the first word, which seeding sets to a constant: so the second).

    Args:
        ask: gives the state.
        holds_gaussian: whether a state has a second Gaussian in store.
        owner: the object that the memory belongs to; held, so that it stays.
        key, position: their addresses.
    """

    __slots__ = (
        "_ask",
        "_holds_gaussian",
        "_position",
        "_second",
        "_seen_position",
        "_seen_second",
        "_state",
        "owner",
    )

    def __init__(
        self,
        ask: Callable[[], Any],
        holds_gaussian: Callable[[Any], bool],
        owner: object,
        key: int,
        position: int,
    ) -> None:
        self.owner = owner
        self._ask, self._holds_gaussian = ask, holds_gaussian
        self._second = ctypes.c_uint32.from_address(key + _WORD_BYTES)
        self._position = ctypes.c_uint32.from_address(position)
        self._seen_second = self._seen_position = -1  # as no word is: ask the first time
        self._state: Any = None

    def words(self) -> tuple[int, int]:
        """The second word of the key, and the position."""
        return self._second.value, self._position.value

    def state(self) -> Any:
        """The state now."""
        second, position = self._second.value, self._position.value
        if position != self._seen_position or second != self._seen_second:
            self._state = self._ask()
            # A stored Gaussian can be used up without moving the bits: then only asking tells.
            certain = not self._holds_gaussian(self._state)
            self._seen_second = second if certain else -1
            self._seen_position = position
        return self._state


class PythonWatch:
    """Python's global generator."""

    def __init__(self) -> None:
        self._twister = _of_python()

    def state(self) -> tuple[Any, ...]:
        """What `random.getstate()` gives."""
        if self._twister is None:
            return random.getstate()
        state: tuple[Any, ...] = self._twister.state()
        return state


def _of_python() -> Twister | None:
    """The interpreter lays a generator out as position and key; None where it does otherwise."""
    owner = getattr(random.getstate, "__self__", None)
    if type(owner) is not random.Random:
        return None
    position = id(owner) + object.__basicsize__
    key = position + _WORD_BYTES
    twister = Twister(random.getstate, _python_holds_gaussian, owner, key, position)
    words = random.getstate()[1]
    return twister if twister.words() == (words[1], words[-1]) else None


def _python_holds_gaussian(state: tuple[Any, ...]) -> bool:
    return state[2] is not None


class NumpyWatch:
    """NumPy's global generator."""

    def __init__(self) -> None:
        self._random: Any = None  # the module numpy.random, once the script has loaded it
        self._twister: Twister | None = None

    def state(self) -> Any:
        """What `numpy.random.set_state()` takes, or None where NumPy is not loaded.

        A tuple for the Mersenne Twister, a dictionary for a generator put in its place.
        """
        if self._random is None:
            self._random = sys.modules.get("numpy.random")
            if self._random is None:
                return None
        generator = self._random.get_bit_generator()
        if self._twister is None or self._twister.owner is not generator:
            self._twister = _of_numpy(self._random, generator)
        if self._twister is None:
            return self._random.get_state(legacy=False)
        return self._twister.state()


def _of_numpy(numpy_random: Any, generator: Any) -> Twister | None:
    """None where it is not the Mersenne Twister, but another kind that was put in its place."""
    if type(generator).__name__ != "MT19937":
        return None
    key = generator.ctypes.state_address
    return Twister(numpy_random.get_state, _numpy_holds_gaussian, generator, key, key + _KEY_BYTES)


def _numpy_holds_gaussian(state: tuple[Any, ...]) -> bool:
    return bool(state[3])


class RandomStates:
    """Takes and puts back all generators of this process."""

    def __init__(self) -> None:
        self._python = PythonWatch()
        self._numpy = NumpyWatch()

    def take(self) -> dict[str, Any]:
        """The states now, by generator; of torch's a copy of the generator, half the price."""
        states: dict[str, Any] = {
            "python": self._python.state(),
            "torch": torch.default_generator.clone_state(),
        }
        if (numpy_state := self._numpy.state()) is not None:
            states["numpy"] = numpy_state
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def portable(self) -> dict[str, Any]:
        """The states now, in a form made of plain values and tensors only.

        Without NumPy's where it has another generator than its own: each process keeps its state.
        """
        states = self.take()
        states["torch"] = states["torch"].get_state()
        numpy_state = states.pop("numpy", None)
        if isinstance(numpy_state, tuple):
            name, key, *rest = numpy_state
            states["numpy"] = (name, torch.from_numpy(key.astype("int64")), *rest)
        return states

    def put_portable(self, states: dict[str, Any]) -> None:
        """Set the generators to what another process's `portable` gave."""
        if "numpy" in states:
            name, key, *rest = states["numpy"]
            states = {**states, "numpy": (name, key.numpy().astype("uint32"), *rest)}
        self.put(states)

    @staticmethod
    def put(states: dict[str, Any]) -> None:
        """Set the generators to `states`; those it does not name stay as they are."""
        random.setstate(states["python"])
        kept = states["torch"]
        torch.set_rng_state(kept.get_state() if isinstance(kept, torch.Generator) else kept)
        if "numpy" in states and "numpy.random" in sys.modules:
            sys.modules["numpy"].random.set_state(states["numpy"])
        if "cuda" in states and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(states["cuda"])
