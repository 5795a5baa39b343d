"""The random number generators of this process: Python's, NumPy's, torch's and, if in use, CUDA's.

`TorchState` keeps their states at a commit, puts them back after a failed step, and gives a
newcomer those of the member it takes its model from. NumPy and CUDA are looked at only where the
script has them loaded already; nothing here imports or initialises them.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch

_MT19937_BYTES = 624 * 4 + 4  # the key and the position, as NumPy lays them out


class NumpyWatch:
    """NumPy's global generator; asking for its state takes 60 µs, so ask only when it moved."""

    def __init__(self) -> None:
        self._bits = b""
        self._state: tuple[Any, ...] | None = None

    def state(self) -> tuple[Any, ...] | None:
        """The legacy state tuple of `numpy.random`, or None where NumPy is not loaded."""
        numpy = sys.modules.get("numpy")
        if numpy is None or "numpy.random" not in sys.modules:
            return None
        bits = self._raw_bits(numpy)
        # A stored Gaussian can be used up without moving the bits: then only asking tells.
        if bits is None or bits != self._bits or self._state is None or self._state[3]:
            self._state = numpy.random.get_state()
            self._bits = bits or b""
        return self._state

    @staticmethod
    def _raw_bits(numpy: Any) -> bytes | None:
        """The generator's memory, or None where it is not the Mersenne Twister."""
        generator = numpy.random.get_bit_generator()
        if type(generator).__name__ != "MT19937":
            return None
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


class RandomStates:
    """Takes and puts back all generators of this process."""

    def __init__(self) -> None:
        self._numpy = NumpyWatch()

    def take(self) -> dict[str, Any]:
        """The states now, by generator."""
        states: dict[str, Any] = {
            "python": random.getstate(),
            "torch": torch.get_rng_state(),
        }
        if (numpy_state := self._numpy.state()) is not None:
            states["numpy"] = numpy_state
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def portable(self) -> dict[str, Any]:
        """The states now, in a form made of plain values and tensors only."""
        states = self.take()
        if "numpy" in states:
            name, key, *rest = states["numpy"]
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
        torch.set_rng_state(states["torch"])
        if "numpy" in states and "numpy.random" in sys.modules:
            sys.modules["numpy"].random.set_state(states["numpy"])
        if "cuda" in states and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(states["cuda"])
