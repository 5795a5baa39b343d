"""The engine of this process, one for each world, with the settings of Horovod's variables."""

import atexit
import math
import os
from collections.abc import Callable
from datetime import timedelta

from elastic_driver.errors import UsageError
from elastic_driver.horovod.engine.engine import Engine
from elastic_driver.horovod.engine.negotiation import NegotiationLimits
from elastic_driver.horovod.engine.operation import EngineWorld
from elastic_driver.horovod.engine.operation_log import (
    ERROR,
    INFO,
    Log,
    Timeline,
    log_from_environment,
)
from elastic_driver.worker import current as current_world

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


class _Running:
    """The mutable field of this module."""

    engine: Engine | None = None
    log = Log()
    at_end: Callable[[], None] | None = None
    awaits_run = False  # a newcomer, which joins the job in `hvd.elastic.run`


def await_run() -> None:
    """Record that this process has a rank, and joins the others in `hvd.elastic.run` only."""
    _Running.awaits_run = True


def awaits_run() -> bool:
    """Return whether this process joins the others in `hvd.elastic.run` only."""
    return _Running.awaits_run


def start(world: EngineWorld) -> None:
    """Start the engine of a world; a collective of all its ranks, on the training thread."""
    stop()
    log = _Running.log = log_from_environment()
    engine = _Running.engine = Engine(world, limits_from_environment(), log.warn)
    log.write(INFO, f"rank {world.rank} of {world.size} takes part in Horovod's operations")
    path = timeline_from_environment()
    if path is not None and world.rank == 0:
        # Each world has its own file: the present one stays as it is.
        round_id = current_world.round_id()
        try:
            engine.start_timeline(
                Timeline(path if round_id == 1 else f"{path}.{round_id}", cycles_are_marked())
            )
        except UsageError as error:
            log.write(ERROR, str(error))


def stop() -> None:
    """End the engine within seconds, whatever the peers do.

    Pending operations fail with `HorovodInternalError`. Called before the world's groups are taken
    down, when it is healthy as well as when it is broken. A second call does nothing.
    """
    _Running.awaits_run = False
    engine, _Running.engine = _Running.engine, None
    if engine is not None:
        engine.close()
        if _Running.at_end is not None:
            _Running.at_end()
        world = engine.world
        _Running.log.write(INFO, f"rank {world.rank} of {world.size} has left Horovod's operations")


def abandon(reason: str) -> None:
    """Fail all operations of the engine, so that `stop` waits for no peer."""
    if _Running.engine is not None:
        _Running.engine.fail(reason)


def current() -> Engine | None:
    """Return the engine of this process; None where there is none."""
    return _Running.engine


def at_end(call: Callable[[], None]) -> None:
    """Call this whenever an engine has ended."""
    _Running.at_end = call


def log() -> Log:
    """Return where lines about operations go."""
    return _Running.log


def _forget_in_child() -> None:
    _Running.engine = None  # its threads are the parent's


atexit.register(stop)  # before the world is left, which `session` does at exit
os.register_at_fork(after_in_child=_forget_in_child)
