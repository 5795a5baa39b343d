"""A seeded shuffle of any number of things that takes no memory.

A data set of 10⁹ samples is shuffled without a list of 10⁹ indices: the position of each one is
computed by a small cipher over 0 … n−1. Samplers and the shard ledger use it; it is for spreading
samples, never for secrets.

The cipher is the alternating Feistel network of Black and Rogaway, "Ciphers with arbitrary
finite domains" (CT-RSA 2002): an index is written as (left, right) in mixed radix a × b ≥ n,
and each round adds a hash of one half to the other. Results ≥ n are enciphered again.
"""

from math import isqrt
from typing import Any

_ROUNDS = 8
_ROUNDS_IF_SMALL = 24  # few elements have few distinct round functions, so more are needed
_SMALL = 256
_MASK = (1 << 64) - 1
_FACTOR = 0xD6E8FEB86659FD93  # the multiplier of the hash


def mix(*numbers: int) -> int:
    """Return a well-mixed 64-bit number from whole numbers, the same on every machine and version.

    It is the finaliser of SplitMix64, chained. Used to derive seeds: mix(seed, epoch, …).
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + (number & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


class Permutation:
    """A shuffled order of 0 … size − 1: `order[position]` is the number at that position."""

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        a = isqrt(max(0, size - 1)) + 1
        self._sides = a, -(-size // a) if size else 1
        rounds = _ROUNDS if size > _SMALL else _ROUNDS_IF_SMALL
        self._keys = [(mix(key, turn), mix(key, turn + 1)) for turn in range(0, rounds, 2)]

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} is outside an order of {self.size}")
        found: int = self.encipher(position)
        while found >= self.size:  # a·b exceeds size by less than a: this is rare
            found = self.encipher(found)
        return found

    def position(self, number: int) -> int:
        """Return the position at which the order has this number: the inverse of `order[…]`."""
        if not 0 <= number < self.size:
            raise IndexError(f"{number} is outside an order of {self.size}")
        found = self._decipher(number)
        while found >= self.size:
            found = self._decipher(found)
        return found

    def _decipher(self, index: int) -> int:
        a, b = self._sides
        left, right = divmod(index, b)
        for first, second in reversed(self._keys):
            right = (right - _hash(left, second) % b) % b
            left = (left - _hash(right, first) % a) % a
        return left * b + right

    def encipher(self, index: Any) -> Any:
        """Apply the cipher once to a number, or to each of a NumPy array of 64-bit unsigned ones.

        A result that is not below the size has to be enciphered again.
        """
        a, b = self._sides
        left, right = divmod(index, b)
        for first, second in self._keys:
            left = (left + _hash(right, first) % a) % a
            right = (right + _hash(left, second) % b) % b
        return left * b + right


def _hash(value: Any, key: int) -> Any:
    value = ((value + key) * _FACTOR) & _MASK
    value = ((value ^ (value >> 32)) * _FACTOR) & _MASK
    return value ^ (value >> 32)
