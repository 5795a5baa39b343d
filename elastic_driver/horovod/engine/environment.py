"""Settings of the engine, as Horovod's variables give them."""

import math
import os
from datetime import timedelta

from elastic_driver.errors import UsageError
from elastic_driver.horovod.engine.negotiation import NegotiationLimits

FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"  # bytes
STALL_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"
STALL_WARNING = "HOROVOD_STALL_CHECK_TIME_SECONDS"
STALL_FAILURE = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
TIMELINE = "HOROVOD_TIMELINE"  # a path; "DYNAMIC": none until the script starts one
TIMELINE_CYCLES = "HOROVOD_TIMELINE_MARK_CYCLES"


def timeline_from_environment() -> str | None:
    """Return the path of the timeline; None where there is none at the start."""
    path = os.environ.get(TIMELINE, "")
    return path if path and path.upper() != "DYNAMIC" else None


def cycles_are_marked() -> bool:
    """Return whether the timeline shows when orders go to the ranks."""
    return bool(_number(TIMELINE_CYCLES))


def limits_from_environment() -> NegotiationLimits:
    """Return the limits; raises `UsageError` for a value that is no number."""
    default = NegotiationLimits()
    fusion = _number(FUSION_THRESHOLD)
    warning, failure = _number(STALL_WARNING), _number(STALL_FAILURE)
    disabled = bool(_number(STALL_DISABLE))
    return NegotiationLimits(
        default.fusion_bytes if fusion is None else int(fusion),
        None if disabled else warning or default.stall_warning,
        None if disabled else failure or None,
    )


def exchange_timeout() -> timedelta | None:
    """Return the longest that one exchange between ranks may take; None: torch's half an hour."""
    seconds = _number(GLOO_TIMEOUT)
    return timedelta(seconds=seconds) if seconds else None


def _number(name: str) -> float | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(f"{name}={text}: give a number from 0 on")
    return number
