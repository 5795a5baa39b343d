"""`batch.permutation` for many positions at once, by torch: the same values, far cheaper each.

Tensors of 64-bit integers wrap around as the cipher's arithmetic does, but are signed: what the
pure version does with numbers from 0 to 2⁶⁴ − 1 is written here with their halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic_driver.batch.permutation import FACTOR, Permutation

__all__ = ["shuffled"]

_LOW = (1 << 32) - 1


def shuffled(order: Permutation, positions: Sequence[int]) -> list[int]:
    """What stands at each of these positions, which must lie inside the order."""
    places = torch.tensor(positions, dtype=torch.int64)
    found = _encipher(order, places)
    while bool((outside := found >= order.size).any()):
        found[outside] = _encipher(order, found[outside])
    values: list[int] = found.tolist()
    return values


def _encipher(order: Permutation, index: Any) -> Any:
    a, b = order.sides
    left, right = index // b, index % b
    for first, second in order.keys:
        left = (left + _hash(right, first, a)) % a
        right = (right + _hash(left, second, b)) % b
    return left * b + right


def _hash(value: Any, key: int, modulus: int) -> Any:
    """The hash of each value, as an unsigned number, modulo `modulus`."""
    value = (value + _signed(key)) * _signed(FACTOR)
    value = (value ^ ((value >> 32) & _LOW)) * _signed(FACTOR)
    low, high = (value ^ (value >> 32)) & _LOW, (value >> 32) & _LOW
    return (high % modulus * ((_LOW + 1) % modulus) + low % modulus) % modulus


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
