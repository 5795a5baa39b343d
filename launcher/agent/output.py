"""The output of a worker: from its two pipes to files, our terminal and the report of its end.

    <log_dir>/<worker>/stdout.log, stderr.log      named by the stable worker id
    <log_dir>/by-rank/<round>/<rank>               link to the folder of that round's rank

`--redirects`, `--tee` and `--local-ranks-filter` mean what they mean to torchrun: a redirected
stream goes to its file only, a teed one to file and terminal, any other to the terminal. The files
get a worker's bytes as they are, at once, and are appended to. The terminal gets whole lines as
`[rank]<stdout>:text`, tracebacks a little later or not at all (`HoldBack`). The last lines of
stderr are kept for the report.

`LineSplitter` and `HoldBack` are pure: bytes in, lines out, without their newline; `now` is handed
in, in monotonic seconds. All else runs on the agent's loop.
"""

import asyncio
import contextlib
import datetime
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from elastic_driver.console import Console
from elastic_driver.line_writer import AppendedFile
from elastic_driver.words.orders import JobSpec, StartWorkerOrder
from launcher.agent.driver_link import Record
from launcher.agent.processes import waits_for_line
from rendezvous.own_files import shown_folder

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


OUT, ERR = 1, 2  # bits of torchrun's Std
READ_BYTES = 64 * 1024
PIPE_READS = 16  # reads at the end: enough for a full pipe, if a process still holds it open
PROGRESS_S = 1.0  # between two states of a progress bar that are shown
QUESTION_S, QUESTION_MOST_S = 0.2, 5.0  # between two looks whether a worker waits for an answer
ENDING_CPU_S = 2.0  # CPU seconds; more than an interpreter with torch needs for its end
TAIL_LINES = 30
TAIL_BYTES = 32 * 1024
_BUSY = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP, psutil.STATUS_ZOMBIE)


# ---- where a stream goes -----------------------------------------------------------------


@dataclass(frozen=True)
class Routing:
    """For one worker: which streams (bits `OUT`, `ERR`) go to a file, which to the terminal."""

    to_file: int
    to_console: int


def parse_streams(text: str, local_rank: int) -> int:
    """Return the streams that a `--redirects` or `--tee` value names for one local rank, as bits.

    Either one number for all ("3"), or local rank by local rank ("0:3,1:1"), where ranks that
    are not named get 0. Raises ValueError for anything else.
    """
    pairs = [pair.partition(":") for pair in text.split(",")]
    if ":" not in text:
        pairs = [(str(local_rank), ":", text)]
    values = {int(rank): int(streams) for rank, _, streams in pairs}
    if not all(0 <= value <= (OUT | ERR) for value in values.values()):
        raise ValueError(f"{text!r}: streams are 0 (none), 1 (stdout), 2 (stderr) or 3 (both)")
    return values.get(local_rank, 0)


def route(spec: JobSpec, local_rank: int) -> Routing:
    """Return where the streams of the worker with this `LOCAL_RANK` go.

    Without a log directory there are no files, and only the filter keeps a stream from the
    terminal.
    """
    redirected = parse_streams(spec.redirects, local_rank) if spec.log_dir else 0
    teed = 0
    if spec.log_dir:
        rest = (OUT | ERR) & ~redirected
        teed = rest if spec.tee is None else parse_streams(spec.tee, local_rank)
    shown = (OUT | ERR) & (~redirected | teed)
    if spec.local_ranks_filter is not None and local_rank not in spec.local_ranks_filter:
        shown = 0
    return Routing(to_file=redirected | teed, to_console=shown)


class LogFile:
    """One stream's file, which may be moved; a failed write (disk full) ends it, not the worker."""

    def __init__(self, path: Path) -> None:
        """Open for appending, with the folders above it; raises OSError.

        The folder has a name that others can tell before it is there; one of theirs is refused.
        """
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        shown_folder(path.parent)
        self.path = path
        self._file = AppendedFile(path)

    def write(self, data: bytes) -> str | None:
        """Append; return a sentence about the first error, None otherwise."""
        file = self._file.current()
        while data and not file.closed:
            try:
                data = data[file.write(data) :]
            except OSError as error:
                self.close()
                return (
                    f"cannot write {self.path} ({error.strerror}); what follows is missing "
                    "from this file; make room or choose another --log-dir"
                )
        return None

    def close(self) -> None:
        """Close the file; harmless when it is closed."""
        self._file.close()


def link_ranks(log_dir: Path, round_id: int, ranks: dict[str, int]) -> None:
    """Make `by-rank/<round>/<rank>` lead to each of these workers' folders; raises OSError."""
    folder = log_dir / "by-rank" / str(round_id)
    log_dir.mkdir(parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        shown_folder(each)
    for worker, rank in ranks.items():
        draft = folder / f".{rank}.{worker}"
        draft.unlink(missing_ok=True)
        draft.symlink_to(Path("..") / ".." / worker, target_is_directory=True)
        draft.replace(folder / str(rank))


# ---- the two streams of a worker ---------------------------------------------------------


class Stream:
    """One pipe of one worker."""

    def __init__(
        self,
        label: str,
        worker: "WorkerOutput",
        console: Console | None,
        file: LogFile | None,
        holdback: HoldBack | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._label, self._worker = label, worker
        self._console = console
        self._file = file
        self._holdback = holdback
        self._lines = LineSplitter()
        self._tail = b""
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._patience = QUESTION_S
        self.ended = asyncio.Event()
        self._fd, self.child_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._fd, False)
        self._loop.add_reader(self._fd, self._read)
        if console is not None:
            console.attach(self.flow)

    def flow(self, go_on: bool) -> None:
        """Stop or go on reading: the worker waits when its pipe is full."""
        if self._fd >= 0 and go_on is self._paused:
            self._paused = not go_on
            if go_on:
                self._loop.add_reader(self._fd, self._read)
            else:
                self._loop.remove_reader(self._fd)

    def close_child_side(self) -> None:
        """Close our copy of the worker's end, which would keep the pipe from ending."""
        if self.child_fd >= 0:
            os.close(self.child_fd)
            self.child_fd = -1

    def see_alive(self) -> None:
        """Note that the worker has written to its other stream: it most likely goes on."""
        if self._holdback is not None and self._holdback.holding:
            self._holdback.see_alive(self._loop.time())
            self._wake_at(self._holdback.due())

    def finish(self, failed: bool) -> str:
        """Show the remaining output after the worker's end; return the last lines.

        After a failure a traceback that is still held is not shown: it is returned.
        """
        self.close_child_side()
        for _ in range(PIPE_READS):
            if self._fd < 0 or not self._read():
                break
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

    def _read(self) -> bool:
        """Take in the bytes that can be read now; return whether there were any."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end()
            return False
        if self._file is not None and (trouble := self._file.write(data)):
            self._worker.say(trouble)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._holdback is None:
            self._worker.stderr.see_alive()
        self._show(self._lines.feed(data))
        if self._lines.has_progress():
            self._wake_at(self._loop.time() + PROGRESS_S)
        elif self._asks():
            self._patience = QUESTION_S
            self._wake_at(self._loop.time() + QUESTION_S)
        return True

    def _asks(self) -> bool:
        """Return whether the unfinished line may be a question to the person at the terminal."""
        return self._worker.on_terminal and self._lines.waits()

    def _end(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self._console is not None:
            self._console.detach(self.flow)
        self.ended.set()

    # ---- showing -------------------------------------------------------------------------

    def _show(self, lines: list[bytes]) -> None:
        """Show lines in their order, after `HoldBack` if this stream has one."""
        self._worker.record(self._label, lines)
        if self._holdback is not None and lines:
            was_holding = self._holdback.holding
            lines = self._holdback.feed(lines, self._loop.time())
            if self._holdback.holding and not was_holding:
                self._worker.note_traceback()
            self._wake_at(self._holdback.due())
        self._show_now(lines)

    def _show_now(self, lines: list[bytes]) -> None:
        if not lines or self._console is None:
            return
        prefix = f"[{self._worker.rank}]<{self._label}>:".encode()
        if self._worker.timestamp:
            now = datetime.datetime.now().isoformat(timespec="milliseconds")
            prefix = f"{now} ".encode() + prefix
        text = prefix + (b"\n" + prefix).join(lines) + b"\n"
        if not text.isascii():
            text = text.decode(errors="replace").encode()
        self._console.write(text)

    def _wake_at(self, when: float | None) -> None:
        """Call `_wake` at `when` or before; not at all for None."""
        if when is None or (self._timer is not None and self._timer.when() <= when):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._wake)

    def _wake(self) -> None:
        """Show a held traceback that is due, a progress bar that has moved, and a question."""
        self._timer = None
        now = self._loop.time()
        if (hold := self._holdback) is not None and (due := hold.due()) is not None:
            # A process that may be on its way to its end keeps its traceback a little longer.
            if due <= now and not (self._worker.may_be_ending() and hold.extend(now)):
                self._show_now(hold.release())
            self._wake_at(hold.due())
        if (state := self._lines.progress()) is not None:
            self._show([state])
        if self._asks():
            if waits_for_line(self._worker.pid):
                self._show(self._lines.finish())
            else:
                self._patience = min(2 * self._patience, QUESTION_MOST_S)
                self._wake_at(now + self._patience)


class WorkerOutput:
    """Both streams of one worker.

    Args:
        order: its worker and its place; `rank` is set anew when a round gives it another one.
        spec: where the streams go, and whether each line begins with the local time.
        log_dir: the folder for files; None: there are none.
        consoles: our stdout and stderr.
        say: shows a sentence to the user when a file cannot be written.
        record: takes the lines for the driver; None: it wants none.
        on_terminal: the worker reads a terminal, so a question is shown without a newline, too.
    """

    def __init__(
        self,
        order: StartWorkerOrder,
        spec: JobSpec,
        log_dir: Path | None,
        consoles: tuple[Console, Console],
        say: Callable[[str], None],
        *,
        record: Record | None = None,
        on_terminal: bool = False,
    ) -> None:
        self._worker = order.worker
        self._record = record
        self.on_terminal = on_terminal
        self.rank = order.place.rank
        self.timestamp = spec.timestamp
        self.say = say
        self.pid = 0  # of the worker, once it was started
        self._cpu_then = 0.0  # CPU seconds of the worker when its last traceback began
        routing = route(spec, order.place.slot)

        def stream(number: int, label: str, holdback: HoldBack | None) -> Stream:
            console = consoles[number - 1] if routing.to_console & number else None
            file = None
            if log_dir is not None and routing.to_file & number:
                path = log_dir / order.worker / f"{label}.log"
                try:
                    file = LogFile(path)
                except OSError as error:
                    say(f"cannot open {path} ({error.strerror}); it will be missing")
            return Stream(label, self, console, file, holdback)

        self.stdout = stream(OUT, "stdout", None)
        self.stderr = stream(ERR, "stderr", HoldBack())

    def close_child_side(self) -> None:
        """Close our copies of the worker's ends, once it has been started."""
        self.stdout.close_child_side()
        self.stderr.close_child_side()

    async def drained(self, timeout: float) -> None:
        """Wait until both pipes have ended, at most `timeout` seconds."""
        both = asyncio.gather(self.stdout.ended.wait(), self.stderr.ended.wait())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(both, timeout)

    def finish(self, failed: bool) -> str:
        """Show the remaining output, free everything, and return the last lines of stderr."""
        self.stdout.finish(failed)
        return self.stderr.finish(failed)

    def record(self, label: str, lines: list[bytes]) -> None:
        """Hand lines of one stream on to the driver."""
        if self._record is not None and lines:
            self._record(self._worker, self.rank, ERR if label == "stderr" else OUT, lines)

    def note_traceback(self) -> None:
        """Note the CPU time when a traceback begins; much more means that the worker goes on."""
        self._cpu_then = 0.0
        with contextlib.suppress(psutil.Error):
            self._cpu_then = _cpu_time(psutil.Process(self.pid))

    def may_be_ending(self) -> bool:
        """Return whether the worker is busy, and has used no more CPU time than its end takes."""
        try:
            process = psutil.Process(self.pid)
            return process.status() in _BUSY and _cpu_time(process) < self._cpu_then + ENDING_CPU_S
        except psutil.Error:
            return True


def _cpu_time(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))  # user and system


def last_lines(tail: bytes, held: list[bytes]) -> str:
    """Return the report's excerpt: the last `TAIL_LINES` lines, or all of a held traceback.

    It has about `TAIL_BYTES` at most; more is kept of the end of a long text than of its beginning.
    """
    lines = [visible(line) for line in tail.rstrip().split(b"\n")]
    wanted = held if len(held) > TAIL_LINES else lines[-TAIL_LINES:]
    data = b"\n".join(wanted).rstrip()
    if len(data) > TAIL_BYTES:
        data = data[: TAIL_BYTES // 4] + b"\n...\n" + data[-(TAIL_BYTES - TAIL_BYTES // 4) :]
    return data.decode(errors="replace")
