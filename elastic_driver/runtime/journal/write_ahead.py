"""Checks the write-ahead log of a journal: whether all of it is still as SQLite has written it.

SQLite ends its log at the first frame whose checksum is wrong, without a word: after a crash that
is where the writing had stopped. A byte that has changed on the disk looks the same, and all that
is behind it is lost, at worst the whole journal. What tells them apart: a process writes one frame
after the other, so behind the frame at which it was killed there is none of the same log.
The form of the files: https://www.sqlite.org/fileformat2.html#the_write_ahead_log and
https://www.sqlite.org/walformat.html
"""

import struct
from pathlib import Path
from typing import NamedTuple

SUFFIX, INDEX_SUFFIX = "-wal", "-shm"
_HEADER = struct.Struct(">IIIIIIII")  # magic, version, page size, number, two salts, two sums
_FRAME = struct.Struct(">IIIIII")  # page, pages after a commit, two salts, two sums
_INDEX = struct.Struct("=16xI12x8s8x")  # frames, salts; of this machine's byte order
_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}  # and the byte order of the sums
_MASK = (1 << 32) - 1
_TRIES = 3  # at a log that a driver begins anew in the same moment


class _Log(NamedTuple):
    """A log whose header is whole."""

    content: bytes
    salts: bytes
    frame: int  # bytes of a frame, with its page
    order: str  # of the bytes in the sums
    sums: tuple[int, int]  # of the header

    @property
    def frames(self) -> range:
        """The places of all whole frames, also of those that are a rest of an earlier log."""
        return range(_HEADER.size, len(self.content) - self.frame + 1, self.frame)

    def owns(self, at: int) -> bool:
        """Return whether a frame is of this log; one of its salts may be damaged.

        The salts of two logs that follow each other both differ.
        """
        first, second = self.content[at + 8 : at + 12], self.content[at + 12 : at + 16]
        return first == self.salts[:4] or second == self.salts[4:]


def damage(path: Path, *, indexed: bool = False) -> str:
    """Return what is wrong with the log beside this database, "" if nothing is.

    `indexed`: SQLite has read the log just now, and its index says how far: nothing is added up if
    that is all. No connection of this process may be open then, since its locks would be lost.
    Raises OSError where the log cannot be read. A log that is being written may be read.
    """
    place = path.with_name(path.name + SUFFIX)
    for _ in range(_TRIES):
        content = _read(place)
        log = _header(content) if content else None
        if log is None or (indexed and _is_indexed(path, log)):
            return ""
        found = log if isinstance(log, str) else _first_change(log)
        if not found or _read(place, _HEADER.size) == content[: _HEADER.size]:
            return found
    return ""


def _read(place: Path, size: int = -1) -> bytes:
    """Return the bytes of a file from its beginning; none if it is not there."""
    try:
        with place.open("rb") as file:
            return file.read(size)
    except FileNotFoundError:
        return b""


def _header(content: bytes) -> _Log | str:
    """Return the log with these bytes, or what is wrong with its header."""
    order = _MAGIC.get(int.from_bytes(content[:4], "big"))
    if len(content) < _HEADER.size or order is None:
        return "its write-ahead log has no header"
    _magic, _version, page, *_salts, first, second = _HEADER.unpack_from(content)
    sums = _sum(order, content[: _HEADER.size - 8], (0, 0))
    if sums != (first, second):
        return "the header of its write-ahead log has changed since it was written"
    return _Log(content, content[16:24], _FRAME.size + page, order, sums)


def _is_indexed(path: Path, log: _Log | str) -> bool:
    """Return whether SQLite has found all frames of this log whole."""
    index = _read(path.with_name(path.name + INDEX_SUFFIX), _INDEX.size)
    if isinstance(log, str) or len(index) < _INDEX.size:
        return False
    return _INDEX.unpack(index) == (len(log.frames), log.salts)


def _first_change(log: _Log) -> str:
    """Return where the log has changed since it was written, "" if it may just end there."""
    content, sums = log.content, log.sums
    for at in log.frames:
        *_fields, first, second = _FRAME.unpack_from(content, at)
        sums = _sum(log.order, content[at : at + 8], sums)
        sums = _sum(log.order, content[at + _FRAME.size : at + log.frame], sums)
        if content[at + 8 : at + 16] == log.salts and sums == (first, second):
            continue
        end = at + log.frame
        is_last = end == len(content) and log.owns(at)
        if is_last or any(log.owns(later) for later in log.frames if later >= end):
            return f"its write-ahead log has changed between the bytes {at} and {end}"
        break
    return ""


def _sum(order: str, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    """Return SQLite's checksum of data, which goes on from that of what is before."""
    first, second = sums
    for left, right in struct.iter_unpack(f"{order}II", data):
        first = (first + left + second) & _MASK
        second = (second + right + first) & _MASK
    return first, second
