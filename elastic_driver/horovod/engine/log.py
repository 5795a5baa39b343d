"""Lines about Horovod's operations, on the stderr of the worker.

`HOROVOD_LOG_LEVEL` says how important a line has to be, `HOROVOD_LOG_HIDE_TIME=0` that it begins
with the time. A line says who called what; data never stand in it.
"""

import os
from datetime import datetime

from elastic_driver.errors import UsageError
from elastic_driver.worker.current import say

LEVEL = "HOROVOD_LOG_LEVEL"
HIDE_TIME = "HOROVOD_LOG_HIDE_TIME"
LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
TRACE, DEBUG, INFO, WARNING, ERROR, _ = range(len(LEVELS))


class Log:
    """Writes the lines that are important enough; any thread calls it."""

    def __init__(self, level: int = WARNING, *, with_time: bool = False) -> None:
        self.level = level
        self._with_time = with_time

    def write(self, level: int, text: str) -> None:
        """Write a line, unless its level is below that of the log."""
        if level < self.level:
            return
        now = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S.%f} " if self._with_time else ""
        say(f"{now}{text}")

    def warn(self, text: str) -> None:
        """Write a warning."""
        self.write(WARNING, text)


def log_from_environment() -> Log:
    """Return the log that the variables ask for; raises `UsageError` for an unknown level."""
    name = os.environ.get(LEVEL) or "WARNING"
    if name.upper() not in LEVELS:
        raise UsageError(f"{LEVEL}={name}: give one of {', '.join(LEVELS)}")
    with_time = os.environ.get(HIDE_TIME, "").lower() in ("0", "false")
    return Log(LEVELS.index(name.upper()), with_time=with_time)
