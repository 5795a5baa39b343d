"""The measured part of the status document, and numbers as people read them. Pure.

Every field has a default: a driver that has measured nothing yet sends less.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from msgspec import Struct

T = TypeVar("T", int, float)
UNKNOWN = "-"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class WorkerFigures(Struct, frozen=True):
    """What was measured of one worker's process."""

    step: int | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    memory: int | None = None  # bytes
    cpu: float | None = None  # cores


class HostFigures(Struct, frozen=True):
    """What was measured of one host; bytes, and bytes per second."""

    cpu: float | None = None  # 0 to 1, of all cores
    memory_used: int | None = None
    memory_total: int | None = None
    disk_used: int | None = None
    disk_total: int | None = None
    net_in: float | None = None
    net_out: float | None = None


class Figures(Struct, frozen=True):
    """What was measured of the job: key `measured` of `GET /v1/status`."""

    step: int | None = None
    total: int | None = None  # steps in all
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    samples: int | None = None
    numbers: dict[str, float] = {}  # that the script reports
    workers: dict[str, WorkerFigures] = {}
    hosts: dict[str, HostFigures] = {}


class GoodputFigures(Struct, frozen=True):
    """Where the time of the worker slots went: key `goodput` of `GET /v1/status`."""

    seconds: dict[str, float] = {}  # of slots, by class
    goodput: float | None = None  # 0 to 1


def count(number: int | None) -> str:
    """Return a whole number with its thousands apart; None is unknown."""
    return UNKNOWN if number is None else f"{number:,}"


def rate(number: float | None) -> str:
    """Return a number with three significant digits, without an exponent."""
    if number is None:
        return UNKNOWN
    digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2
    return f"{number:,.{digits}f}"


def size(number: float | None) -> str:
    """Return bytes in the largest unit that leaves a number from 1 on."""
    if number is None:
        return UNKNOWN
    unit = 0
    while abs(number) >= 1024 and unit + 1 < len(_UNITS):
        number, unit = number / 1024, unit + 1
    return f"{number:.1f} {_UNITS[unit]}" if unit else f"{number:.0f} B"


def percent(part: float | None) -> str:
    """Return a part of 1 in per cent."""
    return UNKNOWN if part is None else f"{part:.0%}"


def memory_of(host: HostFigures) -> str:
    """Return used and total memory."""
    if host.memory_used is None:
        return UNKNOWN
    return f"{size(host.memory_used)} of {size(host.memory_total)}"


def over(numbers: Iterable[T | None], fold: Callable[[list[T]], float]) -> float | None:
    """Return `fold` of the numbers that are known; None if there are none."""
    known = [number for number in numbers if number is not None]
    return fold(known) if known else None


def mean(numbers: list[float]) -> float:
    """Return the mean of at least one number."""
    return sum(numbers) / len(numbers)
