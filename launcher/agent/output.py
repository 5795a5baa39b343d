"""Where each worker's two streams go: the terminal, files, or both.

    <log_dir>/<worker>/stdout.log, stderr.log      named by the stable worker id
    <log_dir>/by-rank/<round>/<rank>               link to the folder of that round's rank

`--redirects`, `--tee` and `--local-ranks-filter` mean what they mean to torchrun: a redirected
stream goes to its file only, a teed one to file and terminal, any other to the terminal. The
files get a worker's bytes as they are, at once, and are appended to.

A worker's output on its way: from its two pipes to files, to our terminal, and to the report.

Lines appear as `[rank]<stdout>:text`. The files get the bytes first and as they are; the
terminal gets whole lines, tracebacks a little later or not at all (`holdback`); the last lines
of stderr are kept for the report of the worker's end. Everything runs on the agent's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastic_driver.core.documents import JobSpec
from launcher.agent.console import Console
from launcher.agent.lines import HoldBack, LineSplitter
from launcher.agent.processes import activity

OUT, ERR = 1, 2  # bits of torchrun's Std


@dataclass(frozen=True)
class Routing:
    """For one worker: which streams (bits `OUT`, `ERR`) go to a file, which to the terminal."""

    to_file: int
    to_console: int


def parse_streams(text: str, local_rank: int) -> int:
    """What torchrun's `--redirects`/`--tee` value says for one local rank, as bits.

    Either one number for all ("3"), or local rank by local rank ("0:3,1:1"), where ranks that
    are not named get 0. Raises ValueError for anything else.
    """
    if ":" not in text:
        return _streams(text)
    by_rank: dict[int, int] = {}
    for pair in text.split(","):
        rank, _, streams = pair.partition(":")
        by_rank[int(rank)] = _streams(streams)
    return by_rank.get(local_rank, 0)


def route(spec: JobSpec, local_rank: int) -> Routing:
    """Where the streams of the worker with this `LOCAL_RANK` go.

    Without a log directory there are no files, and nothing is kept from the terminal but what
    the filter keeps.
    """
    redirected = parse_streams(spec.redirects, local_rank) if spec.log_dir else 0
    teed = parse_streams(spec.tee, local_rank) if spec.log_dir else 0
    shown = (OUT | ERR) & (~redirected | teed)
    if spec.local_ranks_filter is not None and local_rank not in spec.local_ranks_filter:
        shown = 0
    return Routing(to_file=redirected | teed, to_console=shown)


class LogFile:
    """One stream's file; a write that fails (disk full) ends the file, not the worker."""

    def __init__(self, path: Path) -> None:
        """Open for appending, with the folders above it; raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes) -> str | None:
        """Append; returns a sentence about what went wrong, once, and None otherwise."""
        while data and self._fd >= 0:
            try:
                data = data[os.write(self._fd, data) :]
            except OSError as error:
                self.close()
                return (
                    f"cannot write {self.path} ({error.strerror}); what follows is missing "
                    "from this file; make room or choose another --log-dir"
                )
        return None

    def close(self) -> None:
        """Close the file; harmless when it is closed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def link_ranks(log_dir: Path, round_id: int, ranks: dict[str, int]) -> None:
    """Make `by-rank/<round>/<rank>` lead to each of these workers' folders; raises OSError."""
    folder = log_dir / "by-rank" / str(round_id)
    folder.mkdir(parents=True, exist_ok=True)
    for worker, rank in ranks.items():
        draft = folder / f".{rank}.{worker}"
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        draft.symlink_to(Path("..") / ".." / worker, target_is_directory=True)
        draft.replace(folder / str(rank))


def _streams(text: str) -> int:
    value = int(text)
    if not 0 <= value <= (OUT | ERR):
        raise ValueError(f"{text!r} is not 0 (none), 1 (stdout), 2 (stderr) or 3 (both)")
    return value


READ_BYTES = 64 * 1024
PROGRESS_S = 1.0  # a progress bar is shown anew that often
ENDING_CPU_S = 2.0  # more than an interpreter with torch in it needs for its end
_ASLEEP = "STtI"  # states of proc(5): sleeping, stopped, traced, idle
TAIL_LINES = 30
TAIL_BYTES = 32 * 1024


class Stream:
    """One pipe of one worker."""

    def __init__(
        self,
        label: str,
        worker: WorkerOutput,
        console: Console | None,
        file: LogFile | None,
        holdback: HoldBack | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._prefix_end = f"]<{label}>:".encode()
        self._worker, self._console, self._file = worker, console, file
        self._holdback = holdback
        self._lines = LineSplitter()
        self._tail = b""
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self.ended = asyncio.Event()
        self._fd, self.child_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._fd, False)
        self._loop.add_reader(self._fd, self._on_readable)
        if console is not None:
            console.attach(self.flow)

    def flow(self, go_on: bool) -> None:
        """Stop or go on reading: the worker waits when its pipe is full."""
        if self._fd < 0 or go_on is not self._paused:
            return
        self._paused = not go_on
        if self._paused:
            self._loop.remove_reader(self._fd)
        else:
            self._loop.add_reader(self._fd, self._on_readable)

    def close_child_side(self) -> None:
        """The worker has its copy; ours would keep the pipe from ending."""
        if self.child_fd >= 0:
            os.close(self.child_fd)
            self.child_fd = -1

    def see_alive(self) -> None:
        """The worker has written to its other stream: what is held back may come soon."""
        if self._holdback is not None and self._holdback.holding:
            self._holdback.see_alive(self._loop.time())
            self._wake_when_due()

    def finish(self, failed: bool) -> str:
        """The worker is gone: show the rest and return the tail.

        After a failure a traceback that is still held is not shown: it is the tail.
        """
        self.close_child_side()
        self._read_what_is_there()
        self._end()
        self._show(self._lines.finish())
        held = self._holdback.release() if self._holdback is not None else []
        if not failed:
            self._show_now(held)
        if self._timer is not None:
            self._timer.cancel()
        if self._file is not None:
            self._file.close()
        return last_lines(self._tail, held)

    # ---- reading -------------------------------------------------------------------------

    def _on_readable(self) -> None:
        try:
            data = os.read(self._fd, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        if data:
            self._take(data)
        else:
            self._end()

    def _read_what_is_there(self) -> None:
        """At most a full pipe more, from a process that was not ours to end."""
        for _ in range(16):
            if self._fd < 0:
                return
            try:
                data = os.read(self._fd, READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            if not data:
                return
            self._take(data)

    def _end(self) -> None:
        if self._fd >= 0:
            if not self._paused:
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self._console is not None:
            self._console.detach(self.flow)
        self.ended.set()

    # ---- forwarding ----------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        if self._file is not None and (trouble := self._file.write(data)):
            self._worker.on_trouble(trouble)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._holdback is None:
            self._worker.wrote_to_stdout()
        self._show(self._lines.feed(data))
        if self._lines.has_progress():
            self._wake_at(self._loop.time() + PROGRESS_S)

    def _show(self, lines: list[bytes]) -> None:
        """Lines in their order: through the hold-back, where there is one."""
        if self._holdback is not None and lines:
            was_holding = self._holdback.holding
            lines = self._holdback.feed(lines, self._loop.time())
            if self._holdback.holding and not was_holding:
                self._worker.note_traceback()
            self._wake_when_due()
        self._show_now(lines)

    def _show_now(self, lines: list[bytes]) -> None:
        if not lines or self._console is None:
            return
        prefix = b"%s[%d%s" % (self._worker.stamp(), self._worker.rank, self._prefix_end)
        text = prefix + (b"\n" + prefix).join(lines) + b"\n"
        if not text.isascii():
            text = text.decode(errors="replace").encode()
        self._console.write(text)

    def _wake_at(self, when: float) -> None:
        """Wake at `when` or before."""
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._wake)

    def _decide_on_traceback(self) -> None:
        """Show a traceback that is due, unless its process may be on its way to the end."""
        hold, now = self._holdback, self._loop.time()
        due = None if hold is None else hold.due()
        if hold is None or due is None or due > now:
            return
        if not self._worker.may_be_ending() or not hold.extend(now):
            self._show_now(hold.release())

    def _wake_when_due(self) -> None:
        if self._holdback is not None and (due := self._holdback.due()) is not None:
            self._wake_at(due)

    def _wake(self) -> None:
        """Time has passed: a held traceback is due, or a progress bar has moved."""
        self._timer = None
        self._decide_on_traceback()
        self._wake_when_due()
        if self._lines.has_progress() and (state := self._lines.progress()) is not None:
            self._show([state])


class WorkerOutput:
    """Both streams of one worker.

    Args:
        rank: shown in the prefix; set anew when a round gives the worker another one.
        consoles, files: for stdout and stderr; None where a stream does not go there.
        timestamp: begin each line with the local time.
        on_trouble: told a sentence when a file cannot be written any more.
    """

    def __init__(
        self,
        rank: int,
        consoles: tuple[Console | None, Console | None],
        files: tuple[LogFile | None, LogFile | None],
        *,
        timestamp: bool,
        on_trouble: Callable[[str], None],
    ) -> None:
        self.rank = rank
        self.pid = 0  # of the worker, once it was started
        self._cpu_then = 0.0  # what it had used when its last traceback began
        self.on_trouble = on_trouble
        self._timestamp = timestamp
        self._stdout = Stream("stdout", self, consoles[0], files[0], None)
        self._stderr = Stream("stderr", self, consoles[1], files[1], HoldBack())
        self._streams = (self._stdout, self._stderr)

    @property
    def child_fds(self) -> tuple[int, int]:
        """What the worker gets as stdout and stderr."""
        return self._stdout.child_fd, self._stderr.child_fd

    def close_child_side(self) -> None:
        """To be called once the worker has been started, or could not be."""
        for stream in self._streams:
            stream.close_child_side()

    async def drained(self, timeout: float) -> None:
        """Wait until both pipes have ended, at most `timeout` seconds."""
        both = asyncio.gather(*(stream.ended.wait() for stream in self._streams))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(both, timeout)

    def finish(self, failed: bool) -> str:
        """Show what is left, free everything, and return the last lines of stderr."""
        self._stdout.finish(failed)
        return self._stderr.finish(failed)

    def wrote_to_stdout(self) -> None:
        """A sign of life, seen from the other stream."""
        self._stderr.see_alive()

    def note_traceback(self) -> None:
        """A traceback begins: from here on its CPU time tells an ending from going on."""
        seen = activity(self.pid)
        self._cpu_then = 0.0 if seen is None else seen[1]

    def may_be_ending(self) -> bool:
        """Whether the worker is busy, and has not been for longer than an ending takes."""
        seen = activity(self.pid)
        if seen is None:
            return True
        state, cpu = seen
        return state not in _ASLEEP and cpu < self._cpu_then + ENDING_CPU_S

    def stamp(self) -> bytes:
        """What a line begins with: the time, where that is wanted."""
        if not self._timestamp:
            return b""
        now = datetime.datetime.fromtimestamp(time.time())
        return f"{now.isoformat(timespec='milliseconds')} ".encode()


def last_lines(tail: bytes, held: list[bytes]) -> str:
    """The report's excerpt: the last `TAIL_LINES` lines, or all of a held traceback.

    At most about `TAIL_BYTES`; of something longer the end counts more than the beginning.
    """
    lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in tail.rstrip().split(b"\n")]
    wanted = held if len(held) > TAIL_LINES else lines[-TAIL_LINES:]
    data = b"\n".join(wanted).rstrip()
    if len(data) > TAIL_BYTES:
        data = data[: TAIL_BYTES // 4] + b"\n...\n" + data[-(TAIL_BYTES - TAIL_BYTES // 4) :]
    return data.decode(errors="replace")
