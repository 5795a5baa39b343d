"""A job in one line at the bottom of the terminal while it trains, and in some lines afterwards.

`status_line` and `summary` are pure. `BottomLine` keeps a line in its place while many processes
write above it: driver, agents and workers' output share the terminal, and none of them waits for
another. So the terminal itself keeps the line: everybody else scrolls in a region that ends one row
above (DECSTBM, as apt does it), and the line is drawn by one short write that saves and restores
the cursor. The live display of `rich` would have to pass on every byte of every process.

A thread of its own draws the line, and only while our process group is in the foreground. If the
terminal takes nothing at the moment, the line is not drawn. If the thread fails, the terminal is
given back and the job goes on without a line.
"""

import contextlib
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from elastic_driver.console import Outlet, open_outlet
from elastic_driver.features.goodput.story import Story, picture
from elastic_driver.runtime.driver import JobNow
from elastic_driver.runtime.reporter import Change
from elastic_driver.words import counted
from elastic_driver.words.log_events import JobSucceeded
from launcher.readable import count, duration, rate

# ---- the text; pure -----------------------------------------------------------------------


APART = " | "
LEAST_CHANGE = 20  # columns, for a change to be shown
SHORT_S = 5.0  # a shorter run in which nothing failed is not summed up
PICTURE = 40  # columns


def status_line(now: JobNow | None, columns: int) -> str:
    """Return the line for a terminal of this width; what does not fit is left out."""
    if now is None:
        return ""
    line, *parts = [_cleaned(part)[:columns] for part in _parts(now)]
    for part in parts:
        if len(line) + len(APART) + len(part) <= columns:
            line += APART + part
    room = columns - len(line) - len(APART)
    if now.change is not None and room >= LEAST_CHANGE:
        line += APART + _shortened(_change(now.change), room)
    return line


def _parts(now: JobNow) -> list[str]:
    """Return the parts of the line, the most important one first."""
    measured = now.measured
    aim = max(now.aim, now.workers)
    workers = counted(aim, "worker")
    if not now.workers and now.processes:
        return [f"{counted(now.processes, 'worker')} started"]
    if not now.workers:
        return [f"no world {'now' if now.measured.step else 'yet'}, {workers} wanted"]
    parts = [workers if aim == now.workers else f"{now.workers} of {workers}"]
    speed, left = measured.steps_per_s, None
    if measured.step:
        total = "" if measured.total is None else f" of {count(measured.total)}"
        parts.append(f"step {count(measured.step)}{total}")
        if measured.total is not None and speed:
            left = max(0, measured.total - measured.step) / speed
    if measured.samples_per_s is not None:
        parts.append(f"{rate(measured.samples_per_s)} samples/s")
    elif speed is not None:
        parts.append(f"{rate(speed)} steps/s")
    parts += [f"{name} {value:.4g}" for name, value in measured.numbers.items()]
    if left is not None:
        parts.insert(2, f"about {duration(left)} left")
    return parts


def _change(change: Change) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(change.t))
    return _cleaned(f"{when} {change.text}")


def _cleaned(text: str) -> str:
    """Return a text of hosts or scripts in which each character takes one column."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text)


def _shortened(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: columns - 3]}..."


def summary(story: Story, now: float, more: str) -> list[str]:
    """Return sentences about a job that is over; none if it was short and nothing failed.

    Args:
        now: unix seconds.
        more: where to read more.
    """
    ledger, failed = story.ledger, story.ledger.failures
    wall = ledger.wall(now)
    most = max((world.size for world in story.worlds), default=0)
    if not most or (wall < SHORT_S and not (failed and ledger.step)):
        return []
    steps = f", {counted(ledger.step, 'step')}" if ledger.step else ""
    lines = [f"ran {duration(wall)}{steps}, goodput {ledger.document(now)['goodput']:.1%}"]
    began = now if ledger.began is None else ledger.began
    drawn = picture(story.worlds, began, began + wall, PICTURE)
    lines.append(f"workers, 0 to {most}: {drawn}".rstrip())
    told = []
    if failed:
        survived = story.end is not None and isinstance(story.end.what, JobSucceeded)
        workers = counted(failed, "worker failure")
        told.append(f"survived {workers}" if survived else workers)
    if story.resumed:
        told.append(f"another driver went on {counted(story.resumed, 'time')}")
    if redone := ledger.steps_redone:
        told.append(f"{counted(redone, 'step')} trained again")
    if told:
        lines.append(", ".join(told))
    return [*lines, f"more: {more}"]


# ---- the terminal -------------------------------------------------------------------------


LOOK_S = 0.5  # between two looks at the job and at the terminal
FIRST_S = 2.0  # a job that is over sooner gets no line
LATE_S = 3.0  # without a look, we were stopped, and others may have changed the terminal
ROOM_S = 0.2  # for a terminal to take the line
JOIN_S = 2.0  # for the thread to end
LEAST_COLUMNS, LEAST_ROWS = 20, 4
_SAVE = "\x1b7"
_RESTORE = "\x1b8"
_CLEAR_BELOW = "\x1b[J"
_REVERSE, _PLAIN = "\x1b[7m", "\x1b[0m"


def has_room_for_line(environ: Mapping[str, str]) -> bool:
    """Return whether people look at our stderr on a terminal, and no program reads our stdout."""
    if environ.get("TERM", "dumb") == "dumb":
        return False
    with contextlib.suppress(OSError):
        return os.isatty(2) and not stat.S_ISFIFO(os.fstat(1).st_mode)
    return False


class BottomLine:
    """A context manager that keeps the line, and leaves the terminal as it was.

    Args:
        fd: the terminal; it is left as it is.
        text: returns the line for a number of columns, "" for none; called by a thread.
        on_failed: called by the thread with an unexpected error; the terminal is given back.
        plain: the line is not set off by colors (https://no-color.org).
    """

    def __init__(
        self,
        fd: int,
        text: Callable[[int], str],
        on_failed: Callable[[Exception], None],
        *,
        plain: bool = False,
        first: float = FIRST_S,
        look: float = LOOK_S,
    ) -> None:
        self._text = text
        self._plain = plain
        self._first = first
        self._pause = look
        self._fd, self._on_failed = fd, on_failed
        self._outlet: Outlet | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bottom-line", daemon=True)
        self._up = False  # the last row is ours
        self._drawn: tuple[os.terminal_size, str] | None = None  # None: not known
        self._looked = 0.0  # the time of the last look

    def __enter__(self) -> "BottomLine":
        self._outlet = open_outlet(self._fd)
        if self._outlet is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._outlet is not None:
            self._thread.join(JOIN_S)
            if self._thread.is_alive():  # `text` does not return
                self._leave()
            else:
                self._outlet.close()

    def _run(self) -> None:
        try:
            pause = self._first
            while not self._over.wait(pause):
                self._look()
                pause = self._pause
            self._leave()
        except Exception as error:  # a bug of ours; the terminal is not to stay as it is
            self._leave()
            self._on_failed(error)

    def _look(self) -> None:
        """Draw the line if it has changed, or if the terminal has."""
        now = time.monotonic()
        before = self._looked
        self._looked = now
        size = self._size()
        text = "" if size is None else self._text(size.columns)[: size.columns]
        if self._over.is_set():  # maybe the terminal was given back meanwhile
            return
        if size is None or not text:
            self._leave()
            return
        known = self._drawn if now < before + LATE_S else None
        if known == (size, text):
            return
        frame = _line(text, size, plain=self._plain)
        if known is None or known[0] != size:
            frame = _region(size) + frame
            self._up = True
        self._drawn = (size, text) if self._write(frame) else None

    def _size(self) -> os.terminal_size | None:
        """Return the size of the terminal; None if it has no room for the line, or for us."""
        try:
            size = os.get_terminal_size(self._fd)
        except OSError:  # it has gone
            return None
        if size.columns < LEAST_COLUMNS or size.lines < LEAST_ROWS:
            return None
        with contextlib.suppress(OSError):  # it is not the one that controls us
            if os.tcgetpgrp(self._fd) != os.getpgrp():
                return None
        return size

    def _leave(self) -> None:
        """Give the whole terminal back."""
        if self._up:
            self._up = not self._write(f"{_SAVE}\x1b[r{_RESTORE}{_CLEAR_BELOW}")
            self._drawn = None

    def _write(self, frame: str) -> bool:
        """Write the whole text; return False if the terminal does not take it now."""
        assert self._outlet is not None  # noqa: S101 - `__enter__` has opened it
        rest = frame.encode()
        room = select.poll()
        room.register(self._outlet.fd, select.POLLOUT)
        with contextlib.suppress(OSError):  # it has gone
            while rest and room.poll(ROOM_S * 1000):
                with contextlib.suppress(BlockingIOError):
                    rest = rest[self._outlet.write(rest[: self._outlet.piece]) :]
        return not rest


def _region(size: os.terminal_size) -> str:
    """Return what lets everybody write in all rows but the last.

    The cursor is at the beginning of an empty line, maybe in the last row: a line feed makes room.
    Below the cursor there is at most an old line of ours.
    """
    return f"\n{_SAVE}\x1b[1;{size.lines - 1}r{_RESTORE}\x1b[A{_CLEAR_BELOW}"


def _line(text: str, size: os.terminal_size, *, plain: bool) -> str:
    """Return what draws the line in the last row; nothing wraps there."""
    shown = text if plain else f"{_REVERSE}{text.ljust(size.columns)}{_PLAIN}"
    go = f"\x1b[{size.lines};1H{_PLAIN}\x1b[2K"
    return f"{_SAVE}\x1b[?7l{go}{shown}\x1b[?7h{_RESTORE}"
