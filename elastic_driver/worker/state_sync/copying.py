"""Copies of small values: what `commit()` keeps of plain attributes, schedulers and scalers.

`copy.deepcopy` is thorough and slow; almost every value met here is a number, a string, or a
container of those, and takes a few tenths of a microsecond this way. Anything else goes to
`copy.deepcopy`. Never used for parameters or optimizer state.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

IMMUTABLE = frozenset({int, float, bool, str, bytes, complex, type(None), type, range, slice})


def lasts(value: Any) -> bool:
    """Whether a value can never change, so that it is its own copy."""
    kind = type(value)
    return kind in IMMUTABLE or (kind is tuple and all(map(lasts, value)))


def copied(value: Any) -> Any:
    """A copy of `value` that no later change of `value` reaches."""
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list:
        return [copied(item) for item in value]
    if kind is tuple:
        return tuple(copied(item) for item in value)
    if kind is set:
        return set(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value)
