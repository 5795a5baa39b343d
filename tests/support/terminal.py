"""A terminal of any size, as a person sees it: a pty whose screen is that of a real emulator."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import threading
from typing import Any

import pyte


class Terminal:
    """A context manager; `slave` is the end that programs get."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self._master, self.slave = os.openpty()
        self._screen = pyte.HistoryScreen(columns, rows, history=100_000)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._set_size(columns, rows)

    def __enter__(self) -> Terminal:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.slave)
        self._reader.join(10)
        os.close(self._master)

    @property
    def inside(self) -> tuple[str, ...]:
        """A command that makes this the controlling terminal of the command that follows."""
        path = os.ttyname(self.slave)
        return ("setsid", "sh", "-c", f'exec "$@" <{path} >{path} 2>&1', "sh")

    def press(self, keys: bytes) -> None:
        """Type something."""
        os.write(self._master, keys)

    def resize(self, columns: int, rows: int) -> None:
        """Change the size of the window."""
        with self._lock:
            self._screen.resize(rows, columns)
        self._set_size(columns, rows)

    def rows(self) -> list[str]:
        """What the window shows, from top to bottom."""
        with self._lock:
            return [row.rstrip() for row in self._screen.display]

    def lines(self) -> list[str]:
        """What has scrolled out of the window, and what it shows."""
        with self._lock:
            width = self._screen.columns
            past = [
                "".join(line[x].data for x in range(width)).rstrip()
                for line in self._screen.history.top
            ]
            return past + [row.rstrip() for row in self._screen.display]

    def state(self) -> tuple[Any, ...]:
        """What a program may leave changed: scroll region, modes, style and line discipline."""
        with self._lock:
            screen = self._screen
            style = screen.cursor.attrs._replace(data=" ")
            seen = screen.margins, frozenset(screen.mode), style, screen.cursor.hidden
        return (*seen, termios.tcgetattr(self.slave))

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # every program has closed its end
                return
            with self._lock:
                self._stream.feed(data)
