"""A job's whole state as bytes. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import MISSING, fields, is_dataclass

import msgspec

from elastic_driver.core.job_parts import JobParts
from elastic_driver.core.rules.rounds import OfRound


def encoded(job: JobParts) -> bytes:
    """Return the own state of every part; equal for jobs that heard the same."""
    parts = {name: _own(part) for name, part in vars(job).items() if not name.startswith("_")}
    return msgspec.msgpack.encode(parts, enc_hook=_plain, order="deterministic")


def _own(part: object) -> object:
    """The fields of a part but for the other parts, which have no default there."""
    if not is_dataclass(part):
        return part
    own = (f for f in fields(part) if not f.init or not f.default is f.default_factory is MISSING)
    return {field.name: getattr(part, field.name) for field in own}


def _plain(value: object) -> object:
    if isinstance(value, OfRound):
        return value.get()
    return list(value) if isinstance(value, deque) else vars(value)
