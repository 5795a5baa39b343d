"""Tells a mistake of the script: one line, once in a process, on the rank that is to say it."""

from elastic_driver.worker import current
from elastic_driver.worker.worker_log import say

PAGE = "docs/common-mistakes.md"
MOST = 4  # lines of one kind: of a script that leaves everything out, the first few are enough


class _Told:
    """The mutable field of this module."""

    keys: set[tuple[str, str]] = set()  # noqa: RUF012 - of this process


def tell(kind: str, text: str, about: str = "") -> bool:
    """Write a line about a mistake, unless it was written before; return whether it was written.

    Args:
        kind: of the mistake: its section on the page.
        text: what happened, to whom, and what to try.
        about: what the line is about, if there may be several of this kind.
    """
    key = kind, about
    if key in _Told.keys or sum(k == kind for k, _ in _Told.keys) >= MOST:
        return False
    _Told.keys.add(key)
    say(f"{text} ({PAGE}#{kind})")
    return True


def is_speaker() -> bool:
    """Return whether this rank tells the mistakes that all ranks make: rank 0 of a world does."""
    return current.is_initialized() and current.rank() == 0


def forget() -> None:
    """Let everything be told again; for tests."""
    _Told.keys.clear()
