"""Numbers of the status document as people read them. Pure."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from elastic_driver.words.progress import GpuUsage, HostUsage, WorkerMeasured

T = TypeVar("T", int, float)
UNKNOWN = "-"
HOST_NUMBERS = ("CPU", "MEMORY", "GPUS", "IN/S", "OUT/S")
WORKER_NUMBERS = ("STEP", "STEPS/S", "SAMPLES/S", "MEMORY", "CPU")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


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
        number = number / 1024
        unit = unit + 1
    return f"{number:.1f} {_UNITS[unit]}" if unit else f"{number:.0f} B"


def duration(seconds: float) -> str:
    """Return seconds as people say them: `12 s`, `3 min`, `5 h 20 min`, `2 d 4 h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60 % 60
    hours = whole // 3600 % 24
    days = whole // 86400
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def percent(part: float | None) -> str:
    """Return a part of 1 in per cent."""
    return UNKNOWN if part is None else f"{part:.0%}"


def of_host(found: HostUsage | None) -> tuple[str, ...]:
    """Return `HOST_NUMBERS` of a host."""
    if found is None:
        return (UNKNOWN,) * len(HOST_NUMBERS)
    memory = f"{size(found.memory_used)} of {size(found.memory_total)}"
    network = size(found.net_in), size(found.net_out)
    return percent(found.cpu), memory, _gpus(found.gpus), *network


def _gpus(gpus: tuple[GpuUsage, ...]) -> str:
    """Return how busy the GPUs of a host are on average, and their memory."""
    if not gpus:
        return UNKNOWN
    used = sum(g.memory_used for g in gpus)
    total = sum(g.memory_total for g in gpus)
    return f"{percent(mean([g.used for g in gpus]))}, {size(used)} of {size(total)}"


def of_worker(found: WorkerMeasured | None) -> tuple[str, ...]:
    """Return `WORKER_NUMBERS` of a worker."""
    if found is None:
        return (UNKNOWN,) * len(WORKER_NUMBERS)
    speeds = rate(found.steps_per_s), rate(found.samples_per_s)
    step = count(found.step if found.step >= 0 else None)
    return step, *speeds, size(found.memory), percent(found.cpu)


def over(numbers: Iterable[T | None], fold: Callable[[list[T]], float]) -> float | None:
    """Return `fold` of the numbers that are known; None if there are none."""
    known = [number for number in numbers if number is not None]
    return fold(known) if known else None


def mean(numbers: list[float]) -> float:
    """Return the mean of at least one number."""
    return sum(numbers) / len(numbers)
