"""The output of all workers of a run, in files of the run's folder: for `elasticctl logs`.

    <run>/output/00000001.jsonl    lines in the order in which they came (0600)

A line: `{"t": 1718000000.25, "worker": "a.0.1", "rank": 0, "host": "a", "stream": "stdout",
"text": "…"}`. `rank` is the one that the worker had then, so the lines of a rank are found after
it has moved to another worker. The newest lines are kept: a file that is full is followed by the
next one, and the oldest is removed when there are `FILES` of them. A thread writes, so a disk that
hangs holds nobody up; lines that it does not take are left out and counted.

A *place* is where a reader goes on: the number of a file and an offset in it, as `3-81920`.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

import msgspec
from msgspec import Meta, Struct

from elastic_driver.line_writer import RETRY_S, LineWriter, write_whole
from elastic_driver.words import counted
from elastic_driver.words.orders import Host, WorkerId
from elastic_driver.words.progress import WorkerLine
from rendezvous.wire import UNREADABLE

FILES = 8  # of one run
PAGE_BYTES = 1 << 20  # that are looked through at once
MIB = 1 << 20
WAITING_BYTES = 4 * MIB  # of lines that the disk has not taken yet
_LAST_S = 2.0  # for the disk to take them at the end
STREAMS = {1: "stdout", 2: "stderr"}
_PLACE = r"^[0-9]{1,8}-[0-9]{1,12}\Z"


class LogLine(Struct, frozen=True):
    """One line of a worker. `rank` −1: a spare; `worker` is empty in lines of our own."""

    t: float  # unix seconds, when the agent read it
    worker: str
    rank: int
    host: str
    stream: str  # stdout | stderr
    text: str


class LogQuery(Struct, frozen=True):
    """The lines that a reader wants, and the place to go on from; without one, the oldest."""

    at: Annotated[str, Meta(pattern=_PLACE)] | None = None
    rank: Annotated[int, Meta(ge=0, le=10**6)] | None = None
    worker: WorkerId | None = None
    host: Host | None = None
    since: Annotated[float, Meta(ge=0)] | None = None  # unix seconds

    def wants(self, line: LogLine) -> bool:
        """Return whether a line is wanted."""
        return (
            self.rank in (None, line.rank)
            and self.worker in (None, line.worker)
            and self.host in (None, line.host)
            and (self.since is None or line.t >= self.since)
        )


class LogPage(Struct, frozen=True):
    """Lines, the place to go on from, and whether there is more at once."""

    lines: tuple[LogLine, ...]
    next: str
    more: bool


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(LogLine).decode


class WorkerLogs:
    """The writer of a run's files; `add` may be called by any thread and never blocks.

    Args:
        folder: of the files; made with the first line.
        most: bytes that all files may have together.
        on_broken: called with a sentence when they cannot be written.
    """

    def __init__(self, folder: Path, most: int, on_broken: Callable[[str], None]) -> None:
        self.folder, self._most, self._on_broken = folder, most, on_broken
        self._file: BinaryIO | None = None
        self._number = self._size = 0  # of the newest file; bytes in it
        self._writer = LineWriter(
            self._write,
            limit=WAITING_BYTES,
            retry=RETRY_S,
            on_broken=self._fail,
            on_lost=_left_out,
        )

    @property
    def kept(self) -> bool:
        """Return whether lines are kept at all."""
        return self._most > 0

    def add(self, host: str, lines: Sequence[WorkerLine], dropped: int = 0) -> None:
        """Keep lines of a host's workers; `dropped`: how many were left out before them."""
        data = [
            _encode(LogLine(x.t, x.worker, x.rank, host, STREAMS[x.stream], x.text)) for x in lines
        ]
        if dropped:
            data.insert(0, _left_out(dropped, host).rstrip())
        if data:
            self._writer.put(b"\n".join(data) + b"\n", len(data))

    def close(self) -> None:
        """Write what waits, if the disk takes it soon."""
        self._writer.close(_LAST_S)
        if self._file is not None:
            self._file.close()

    def _write(self, data: bytes) -> None:
        if self._file is None or (self._size and self._size + len(data) > self._most // FILES):
            self._next_file()
        assert self._file is not None  # noqa: S101 - `_next_file` has opened it
        write_whole(self._file, data)
        self._size += len(data)

    def _next_file(self) -> None:
        """Open the next file, and remove the oldest ones."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self.folder.mkdir(mode=0o700, exist_ok=True)
        known = _numbers(self.folder)
        if self._number == 0 and known:  # those of an earlier driver
            self._number = known[-1]
        for old in known[: max(0, len(known) + 1 - FILES)]:
            _path(self.folder, old).unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(_path(self.folder, self._number + 1), flags, 0o600)
        self._file, self._size = os.fdopen(descriptor, "ab", buffering=0), 0
        self._number += 1

    def _fail(self, error: OSError) -> None:
        self._on_broken(
            f"cannot keep the workers' output in {self.folder} ({error.strerror or error}); "
            f"the next {WAITING_BYTES >> 20} MiB wait until it can be written, the job goes on"
        )


def _left_out(count: int, host: str = "") -> bytes:
    text = f"{counted(count, 'line was', 'lines were')} left out here: there were too many at once"
    return _encode(LogLine(time.time(), "", -1, host, "stderr", text)) + b"\n"


# ---- reading -----------------------------------------------------------------------------


class _Place(NamedTuple):
    number: int
    offset: int

    def __str__(self) -> str:
        return f"{self.number}-{self.offset}"


def read_page(folder: Path, query: LogQuery) -> LogPage:
    """Return the wanted lines of the next page; an empty one if there are none yet.

    A place in a file that was removed meanwhile is the beginning of the oldest file.
    """
    numbers, place = _numbers(folder), _place(query.at)
    later = [n for n in numbers if n >= place.number]
    if not later:
        return LogPage((), str(place), more=False)
    if later[0] != place.number:
        place = _Place(later[0], 0)
    data = b""
    with contextlib.suppress(OSError):  # it was removed at this moment
        file = _path(folder, place.number)
        if query.since is None or file.stat().st_mtime >= query.since:
            data = _whole_lines(file, place.offset)
    lines = tuple(line for line in _lines_in(data) if query.wants(line))
    if data:
        return LogPage(lines, str(_Place(place.number, place.offset + len(data))), more=True)
    if len(later) > 1:  # whoever begins a file has completed the one before
        return LogPage((), str(_Place(later[1], 0)), more=True)
    return LogPage((), str(place), more=False)


def _place(text: str | None) -> _Place:
    number, _, offset = (text or "0-0").partition("-")
    return _Place(int(number), int(offset))


def _whole_lines(path: Path, offset: int) -> bytes:
    """Return a page of whole lines from an offset on."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(PAGE_BYTES)
    return data[: data.rfind(b"\n") + 1]


def _lines_in(data: bytes) -> list[LogLine]:
    """Return lines; those that a crash has left broken are skipped."""
    found = []
    for line in data.splitlines():
        with contextlib.suppress(*UNREADABLE):
            found.append(_decode(line))
    return found


def _numbers(folder: Path) -> list[int]:
    """Return the numbers of the files, the oldest first."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(int(n[:8]) for n in names if re.fullmatch(r"\d{8}\.jsonl", n))


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:08}.jsonl"
