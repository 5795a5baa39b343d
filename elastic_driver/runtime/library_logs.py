"""Shows log records of libraries and of our own modules as few short lines.

The standard library writes records without a handler straight to stderr, which may block, and has
no limit. While `logs_shown` lasts, the warnings and errors of aiohttp, asyncio and our packages,
and those of other loggers that nobody handles, go through one handler: at most `BURST` records at
once, and one each `EACH_S` seconds.

A request's headers and body never reach a line, since libraries put them into messages: a line has
the constant words of the message, numbers and addresses, the type of the error and its place in the
code. Messages of our own packages are shown whole: we never log a header or a body.
"""

import contextlib
import ipaddress
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

OURS = ("rendezvous", "elastic_driver", "launcher")
LIBRARIES = ("aiohttp", "asyncio", "concurrent.futures", "py.warnings")
BURST = 20  # lines that may come together
EACH_S = 5.0  # later, a line each
MAX_CHARS = 2000  # of one line
_WORDS = re.compile(r"""[^(<{\["'=:%]*""")  # of a message, before the first value in it
_PLACE = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]")

_LAST_RESORT = logging.lastResort
_open: "list[FewLines]" = []  # a process may run several drivers
# Takes a line, and whether it is a library's.
Show = Callable[[str, bool], None]


class FewLines(logging.Handler):
    """Hands out records as lines: few, short, and without what a client has sent."""

    def __init__(self, show: Show, clock: Callable[[], float] = time.monotonic) -> None:
        """`show` may be called by any thread, and must not block."""
        super().__init__(logging.WARNING)
        self._show, self._clock = show, clock
        self._allowed, self._since = float(BURST), clock()
        self._left_out = 0
        self._told = threading.local()  # `show` may log, too

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record, or count it; never raises."""
        if getattr(self._told, "busy", False):
            return
        self._told.busy = True
        try:
            self._emit(record)
        except Exception:  # noqa: S110 - a wrong log call must not end a job
            pass
        finally:
            self._told.busy = False

    def _emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        earned = max(0.0, now - self._since) / EACH_S
        self._allowed, self._since = min(float(BURST), self._allowed + earned), now
        if self._allowed < 1.0:
            self._left_out += 1
            return
        self._allowed -= 1.0
        self.tell_left_out()
        ours = record.name.partition(".")[0] in OURS
        for line in (_described(record) if ours else _without_values(record)).splitlines():
            self._show(line[:MAX_CHARS], not ours)

    def tell_left_out(self) -> None:
        """Show the number of records that were not shown since the last line, if there are any."""
        count, self._left_out = self._left_out, 0
        if count:
            self._show(f"{count} more warnings of libraries were left out", True)


@contextlib.contextmanager
def logs_shown(show: Show) -> Iterator[None]:
    """Have all warnings and errors of loggers shown by `show` while the context is open."""
    handler = FewLines(show)
    loggers = [logging.getLogger(name) for name in (*OURS, *LIBRARIES)]
    for logger in loggers:
        logger.addHandler(handler)
    _open.append(handler)
    _choose_last_resort()
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        _open.remove(handler)
        _choose_last_resort()
        handler.tell_left_out()


def _choose_last_resort() -> None:
    """Choose the handler of records that no other handles."""
    logging.lastResort = _open[-1] if _open else _LAST_RESORT


def described(error: BaseException) -> str:
    """Return an unexpected error in a few words: its type and its place in the code.

    Its own words are left out: they may be those of a client.
    """
    return f"a bug of ours: {type(error).__name__}{_place_of(error)}"


def _described(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    text = record.getMessage()
    return text if error is None else f"{text} ({type(error).__name__}{_place_of(error)})"


def _without_values(record: logging.LogRecord) -> str:
    """Return the constant words of a record, its harmless values, its error's type and place."""
    template = str(record.msg).partition("\n")[0]
    if record.args:
        args = record.args if isinstance(record.args, tuple) else (record.args,)
        values = iter(map(_harmless, args))
        words = _PLACE.sub(lambda _match: next(values, "…"), template)
    else:
        match = _WORDS.match(template)
        words = (match[0] if match else "").strip()
    error = record.exc_info[1] if record.exc_info else None
    what = "" if error is None else f" ({type(error).__name__}{_place_of(error)})"
    return f"{record.name}: {words}{what}"


def _harmless(value: Any) -> str:
    """Return a number or a network address as text, and `…` for everything else."""
    if isinstance(value, (int, float)):
        return str(value)
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(value if isinstance(value, str) else ""))
    return "…"


def _place_of(error: BaseException) -> str:
    """Return where an error was raised, in a few characters."""
    trace: TracebackType | None = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f" at {os.path.basename(code.co_filename)}:{trace.tb_lineno}, {code.co_name}"
