"""A file that is appended to, also after logrotate has moved it away.

The event log and the files of `--log-dir` are such files. Nobody has to be told of a move: before a
write the path is looked at, once a second at most. Times are seconds.
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from rendezvous.own_files import open_own

LOOK_S = 1.0  # between two looks; until the next one, a moved file is written to


class AppendedFile:
    """The file that has this path now; it is made again if it was moved or deleted."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Open for appending, without a buffer; raises OSError, for another user's link, too."""
        self.path, self._clock = path, clock
        self._file = self._open()
        self._looked = clock()

    def current(self) -> BinaryIO:
        """Return the file to write to.

        It is the old one if the path leads nowhere and no file can be made there: what is written
        goes on to the moved file then.
        """
        now = self._clock()
        if now - self._looked >= LOOK_S and not self._file.closed:
            self._looked = now
            with contextlib.suppress(OSError):
                if not self._in_place():
                    fresh = self._open()
                    self._file.close()
                    self._file = fresh
        return self._file

    def close(self) -> None:
        """Close the file; harmless when it is closed."""
        self._file.close()

    def _open(self) -> BinaryIO:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        return open(open_own(self.path, flags, 0o666), "ab", buffering=0)

    def _in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False
