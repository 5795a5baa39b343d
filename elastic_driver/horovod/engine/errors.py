"""The errors of operations."""

from elastic_driver.errors import WorldBrokenError


class HorovodInternalError(WorldBrokenError, RuntimeError):
    """An operation failed: ranks disagree about a tensor, or the world is broken."""


class DuplicateNameError(HorovodInternalError, ValueError):
    """A tensor was given a name under which another one is pending."""


def first_line(error: Exception) -> str:
    """Return an error in one line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
