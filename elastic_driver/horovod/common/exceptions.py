"""Horovod's exceptions, which are ours too, so a script may catch either."""

from elastic_driver.errors import HostsUpdatedInterrupt, UsageError
from elastic_driver.horovod.engine.operation import DuplicateNameError, HorovodInternalError
from elastic_driver.worker.current import NotInitializedError

__all__ = [
    "DuplicateNameError",
    "HorovodInternalError",
    "HorovodUsageError",
    "HostsUpdatedInterrupt",
    "NotInYetError",
]


class HorovodUsageError(UsageError, ValueError):
    """An argument that Horovod's functions do not take."""


class NotInYetError(NotInitializedError, ValueError):
    """A function of Horovod was called before `hvd.init()` or after `hvd.shutdown()`."""
