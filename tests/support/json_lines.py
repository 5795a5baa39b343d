"""Reads files of JSON lines while they grow; each line is parsed once.

A test that waits reads the same files a hundred times a second. If it parsed all lines each time,
it would take the processor from the job that it watches.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class JsonLines(Generic[T]):
    """The whole lines of one file, each made an object by `make`."""

    def __init__(self, path: Path, make: Callable[[dict[str, Any]], T]) -> None:
        self._path, self._make = path, make
        self._inode = 0
        self._read_to = 0  # bytes, up to the end of a line
        self._lines: list[T] = []

    def read(self) -> list[T]:
        """Return the lines that the file has now; none if there is no file.

        A file that was replaced or truncated is read from its beginning.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            self._lines, self._read_to = [], 0
            return []
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._read_to:
                self._inode, self._lines, self._read_to = found.st_ino, [], 0
            file.seek(self._read_to)
            whole, end, _ = file.read().rpartition(b"\n")
        self._lines += [self._make(json.loads(line)) for line in whole.splitlines() if end]
        self._read_to += len(whole) + len(end)
        return list(self._lines)
