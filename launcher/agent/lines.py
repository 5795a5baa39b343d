"""Turns a worker's bytes into lines for a terminal, and holds tracebacks until the worker ends.

Pure: bytes in, lines out, without their newline; `now` is handed in, in monotonic seconds.
"""

import re

MAX_LINE_BYTES = 16 * 1024
QUIET_S = 1.0  # for which a traceback is held after its last line
ALIVE_S = 0.5  # the same, once the process has written to stdout again
AGAIN_S = 0.5  # for which it is held once more if the process is busy, perhaps with its end
LONGEST_S = 20.0  # for which it is held at most; a loaded machine ends a process in seconds
MAX_BYTES = 48 * 1024  # of a traceback that is held

# Torch writes its rank before every line of an uncaught exception once a group exists.
_TRACEBACK = re.compile(rb"(\[rank\d+\]: )?Traceback \(most recent call last\):")
_SYNTAX_ERROR = re.compile(rb'  File ".*", line \d+$')


class LineSplitter:
    """Cuts one stream into whole lines of bounded length; keeps the unfinished last one.

    Text that a carriage return overwrites is dropped, as on a terminal: a progress bar becomes one
    line with its last state.
    """

    def __init__(self, max_line: int = MAX_LINE_BYTES) -> None:
        self._max_line = max_line
        self._rest = b""
        self._shown = b""  # the state of a progress bar that was shown last

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes; one longer than the bound comes in pieces."""
        if b"\n" not in data and len(self._rest) + len(data) <= self._max_line:
            self._rest = _without_overwritten(self._rest + data)
            return []
        returns = b"\r" in data or b"\r" in self._rest
        *whole, self._rest = (self._rest + data).split(b"\n")
        if returns:
            whole = [visible(line) for line in whole]
            if whole and self._shown:
                if whole[0] == self._shown:  # the bar is complete, and was shown like that already
                    del whole[0]
                self._shown = b""
        self._rest = _without_overwritten(self._rest)
        if len(self._rest) > self._max_line:
            whole.append(self._rest)
            self._rest = b""
        if any(len(line) > self._max_line for line in whole):
            return [piece for line in whole for piece in self._pieces(line)]
        return whole

    def progress(self) -> bytes | None:
        """Return the newest state of an unfinished progress bar, unless it was shown before."""
        states = [state for state in self._rest.split(b"\r") if state.strip()]
        if not self.has_progress() or not states or states[-1] == self._shown:
            return None
        self._shown = states[-1]
        return self._shown[: self._max_line]

    def has_progress(self) -> bool:
        """Return whether the unfinished line is a progress bar."""
        return b"\r" in self._rest

    def waits(self) -> bool:
        """Return whether there is an unfinished line, such as a question."""
        return bool(self._rest) and not self.has_progress()

    def finish(self) -> list[bytes]:
        """Return the last line, if it ended without a newline."""
        rest = visible(self._rest)
        self._rest = b""
        return self._pieces(rest) if rest and rest != self._shown else []

    def _pieces(self, line: bytes) -> list[bytes]:
        size = self._max_line
        return [line[i : i + size] for i in range(0, len(line) or 1, size)]


def _without_overwritten(rest: bytes) -> bytes:
    """Keep only the newest state and the one before it: the newest may be half written."""
    states = rest.rstrip(b"\r")  # returns at the end overwrite nothing yet
    end = rest[len(states) :][:1]
    if states.count(b"\r") > 2:
        states = b"\r" + b"\r".join(states.rsplit(b"\r", 2)[1:])
    return states + end


def visible(line: bytes) -> bytes:
    """Return the part of a line with carriage returns that a terminal would still show."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class HoldBack:
    """The lines of one stderr on their way to the terminal; tracebacks are held back.

    An error in a script ends all its workers, and each prints the same traceback, which is worth
    one copy. The text of a worker from its last traceback on waits here. When the process ends with
    a failure, that text goes into the report to the driver, which shows the first one. When the
    process goes on (it only logged an exception), the text is released after a moment. The caller
    checks whether the process may still be busy with its end, because no fixed time is right.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._bytes = 0
        self._since = 0.0
        self._due = 0.0
        self._quiet = QUIET_S

    def feed(self, lines: list[bytes], now: float) -> list[bytes]:
        """Return the lines that may be shown now; those from a traceback on are held."""
        if self._held:
            return self._hold(lines, now)
        start = next((i for i, line in enumerate(lines) if starts_traceback(line)), None)
        if start is None:
            return lines
        self._since, self._quiet = now, QUIET_S
        return lines[:start] + self._hold(lines[start:], now)

    def due(self) -> float | None:
        """Return when to decide between `release` and `extend`; None while nothing is held."""
        return self._due if self._held else None

    def see_alive(self, now: float) -> None:
        """Note that the process has written to its stdout: most likely it goes on."""
        self._quiet = ALIVE_S
        self._due = min(self._due, now + ALIVE_S)

    def extend(self, now: float) -> bool:
        """Hold for `AGAIN_S` more; return False if `LONGEST_S` is over."""
        if now >= self._since + LONGEST_S:
            return False
        self._due = min(now + AGAIN_S, self._since + LONGEST_S)
        return True

    def release(self) -> list[bytes]:
        """Return the held lines and forget them: the process goes on, or ended well."""
        held = self._held
        self._held = []
        self._bytes = 0
        return held

    @property
    def holding(self) -> bool:
        """True while a traceback is being held."""
        return bool(self._held)

    def _hold(self, lines: list[bytes], now: float) -> list[bytes]:
        self._held += lines
        self._bytes += sum(map(len, lines)) + len(lines)
        self._due = min(now + self._quiet, self._since + LONGEST_S)
        return self.release() if self._bytes > MAX_BYTES else []


def starts_traceback(line: bytes) -> bool:
    """Return whether a line is the first of a traceback (a syntax error's has no heading)."""
    return _TRACEBACK.match(line) is not None or _SYNTAX_ERROR.match(line) is not None
