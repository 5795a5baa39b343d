"""Holds a traceback back until it is known whether its process goes on.

An error in a script ends all its workers, and each prints the same traceback. It is worth
one copy: what a worker wrote from its last traceback on waits here. When the process ends with a
failure, that text travels in the report to the driver, which shows the first one. When the
process goes on (it only logged an exception), the text is released after a moment.

Pure: `now` is handed in, in monotonic seconds.
"""

from __future__ import annotations

import re

QUIET_S = 3.0  # after the last line: an interpreter with torch in it takes a while to end
LONGEST_S = 6.0  # for a process that keeps on writing to stderr
ALIVE_S = 0.5  # after the last line, once the process has written to stdout again
MAX_BYTES = 48 * 1024

_TRACEBACK = b"Traceback (most recent call last):"
_SYNTAX_ERROR = re.compile(rb'  File ".*", line \d+$')


class HoldBack:
    """The lines of one stderr on their way to the terminal."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._bytes = 0
        self._since = 0.0
        self._last = 0.0
        self._alive = False

    def feed(self, lines: list[bytes], now: float) -> list[bytes]:
        """The lines that may be shown now; those from a traceback on are held."""
        if self._held:
            return self._hold(lines, now)
        start = next((i for i, line in enumerate(lines) if starts_traceback(line)), None)
        if start is None:
            return lines
        self._since, self._alive = now, False
        return lines[:start] + self._hold(lines[start:], now)

    def due(self) -> float | None:
        """When `release` is to be called, if nothing more is fed; None while nothing is held."""
        if not self._held:
            return None
        quiet = ALIVE_S if self._alive else QUIET_S
        return min(self._last + quiet, self._since + LONGEST_S)

    def see_alive(self) -> None:
        """The process has written to its stdout: most likely it goes on."""
        self._alive = True

    def release(self) -> list[bytes]:
        """Let go of what is held: the process goes on, or ended well."""
        held, self._held, self._bytes = self._held, [], 0
        return held

    @property
    def holding(self) -> bool:
        """Whether a traceback is being held."""
        return bool(self._held)

    def _hold(self, lines: list[bytes], now: float) -> list[bytes]:
        self._held += lines
        self._bytes += sum(map(len, lines)) + len(lines)
        self._last = now
        return self.release() if self._bytes > MAX_BYTES else []


def starts_traceback(line: bytes) -> bool:
    """Whether a line is the first of a traceback (a syntax error's has no heading)."""
    return line.startswith(_TRACEBACK) or (
        line.startswith(b'  File "') and _SYNTAX_ERROR.match(line) is not None
    )
