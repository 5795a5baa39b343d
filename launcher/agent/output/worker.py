"""A worker's output on its way: from its two pipes to files, to our terminal, and to the report.

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

from launcher.agent.output.console import Console
from launcher.agent.output.holdback import HoldBack
from launcher.agent.output.lines import LineSplitter
from launcher.agent.output.logs import LogFile
from launcher.agent.processes.descendants import activity

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
