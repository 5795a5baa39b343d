"""A job's whole state as bytes. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum

import msgspec

from elastic_driver.core.job_parts import JobParts


def encoded(job: JobParts) -> bytes:
    """Return the state of every part as JSON; equal for jobs that behave alike from now on."""
    parts = {name: part for name, part in vars(job).items() if not name.startswith("_")}
    skipped = {id(part) for part in parts.values()}
    return msgspec.json.encode({n: _state(p, skipped) for n, p in parts.items() if n != "settings"})


def _state(part: object, skipped: set[int]) -> object:
    return {
        name: _plain(value, skipped)
        for name, value in _attributes(part).items()
        if id(value) not in skipped and not callable(value)
    }


def _attributes(value: object) -> dict[str, object]:
    if is_dataclass(value) or isinstance(value, msgspec.Struct):
        names = (
            value.__struct_fields__
            if isinstance(value, msgspec.Struct)
            else (f.name for f in fields(value))
        )
        return {name: getattr(value, name) for name in names}
    return dict(vars(value)) if hasattr(value, "__dict__") else {}


def _plain(value: object, skipped: set[int]) -> object:
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return [[_plain(key, skipped), _plain(one, skipped)] for key, one in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (list, tuple, deque)):
        return [_plain(one, skipped) for one in value]
    return _state(value, skipped)
