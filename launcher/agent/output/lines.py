"""A worker's bytes become lines for a terminal: whole ones, and of bounded length.

Pure: bytes in, lines out, without their newline. What a carriage return overwrites is
dropped, as a terminal would, so that a progress bar is one line that ends up as its last state.
"""

from __future__ import annotations

MAX_LINE_BYTES = 16 * 1024


class LineSplitter:
    """Cuts one stream into lines; keeps the unfinished last one."""

    def __init__(self, max_line: int = MAX_LINE_BYTES) -> None:
        self._max_line = max_line
        self._rest = b""
        self._shown = b""  # the state of a progress bar that was shown last

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes; a longer line than the bound comes in pieces."""
        if b"\n" not in data and len(self._rest) + len(data) <= self._max_line:
            self._rest = self._without_overwritten(self._rest + data)
            return []
        returns = b"\r" in data or b"\r" in self._rest
        *whole, self._rest = (self._rest + data).split(b"\n")
        if returns:
            whole = self._resolve_returns(whole)
        self._rest = self._without_overwritten(self._rest)
        if len(self._rest) > self._max_line:
            whole.append(self._rest)
            self._rest = b""
        if any(len(line) > self._max_line for line in whole):
            return [piece for line in whole for piece in self._pieces(line)]
        return whole

    def progress(self) -> bytes | None:
        """The newest state of an unfinished progress bar, unless it was shown before."""
        if b"\r" not in self._rest:
            return None
        states = [state for state in self._rest.split(b"\r") if state.strip()]
        if not states or states[-1] == self._shown:
            return None
        self._shown = states[-1]
        return self._shown[: self._max_line]

    def has_progress(self) -> bool:
        """Whether the unfinished line is a progress bar, so that `progress` is worth asking."""
        return b"\r" in self._rest

    def finish(self) -> list[bytes]:
        """The last line, where it ended without a newline."""
        rest, self._rest = _visible(self._rest), b""
        return self._pieces(rest) if rest and rest != self._shown else []

    def _resolve_returns(self, whole: list[bytes]) -> list[bytes]:
        lines = [_visible(line) for line in whole]
        if lines and self._shown:
            if lines[0] == self._shown:  # the bar is complete, and was shown like that already
                del lines[0]
            self._shown = b""
        return lines

    @staticmethod
    def _without_overwritten(rest: bytes) -> bytes:
        """Keep the newest state only, and the one before it: the newest may be half written."""
        if rest.count(b"\r") > 2:
            return b"\r" + b"\r".join(rest.rsplit(b"\r", 2)[1:])
        return rest

    def _pieces(self, line: bytes) -> list[bytes]:
        if len(line) <= self._max_line:
            return [line]
        return [line[i : i + self._max_line] for i in range(0, len(line), self._max_line)]


def _visible(line: bytes) -> bytes:
    """What a terminal would still show of a line with carriage returns in it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
