"""`elasticctl top`: the job on a terminal, drawn again and again, with keys to act on it.

`View` and `press` are pure: a key changes what is shown, or asks for an action. `watch` reads the
keys, has actions carried out and draws. Where stdout is no terminal, plain text is printed instead.
"""

import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import quote

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elastic_driver import contract
from elastic_driver.job.status import MemberStatus
from elastic_driver.runtime.status_document import JobDocument
from launcher import readable
from launcher.ctl_commands import job_text, orders
from launcher.ctl_commands.orders import ask_stacks, stacks_after
from rendezvous.client import RendezvousClient
from rendezvous.errors import RequestError

SORTS = ("rank", "host", "steps/s", "samples/s", "memory")
HELP = "q quit   o order   ↑ ↓ choose a host   d drain it   u undo the drain   s stacks"
# An arrow (as ANSI and DEC terminals send it), or any other key.
_KEY = re.compile(rb"\x1b[\[O](.)|(.)", re.DOTALL)
_ARROWS = {b"A": "up", b"B": "down"}
_CHOSEN = "▶"
_GAP = 2  # between two columns
_LEAST_REASON = 30  # columns for a reason before other columns go
_HOST_SHARE = 3  # hosts take at most a third of the lines
_STATE_STYLES = {"usable": "green", "running": "green", "draining": "yellow", "drained": "dim"}


@dataclass(frozen=True)
class View:
    """The part of the job that is shown, and how."""

    sort: str = "rank"
    chosen: int = 0  # the number of the host that keys act on
    asked: str | None = None  # the host whose drain waits for y or n
    message: str = ""
    text: str = ""  # shown in place of the job until a key is pressed
    top: int = 0  # the first line of `text` that is shown


@dataclass(frozen=True)
class Action:
    """An order that a key gives; `host` is empty where it is about none."""

    kind: Literal["quit", "drain", "undrain", "stacks"]
    host: str = ""


def press(view: View, key: str, job: JobDocument) -> tuple[View, Action | None]:
    """Return what is shown after a key, and what it asks for."""
    view = replace(view, message="")
    if view.asked is not None:
        action = Action("drain", view.asked) if key in ("y", "Y") else None
        return replace(view, asked=None), action
    if view.text and key not in ("q", "\x03"):
        step = {"up": -1, "k": -1, "down": 1, "j": 1}.get(key)
        lines = view.text.count("\n")
        if step is not None:
            return replace(view, top=min(lines, max(0, view.top + step))), None
        return replace(view, text="", top=0), None
    host = job.hosts[min(view.chosen, len(job.hosts) - 1)].host if job.hosts else ""
    match key:
        case "q" | "\x03":
            return view, Action("quit")
        case "o":
            return replace(view, sort=SORTS[(SORTS.index(view.sort) + 1) % len(SORTS)]), None
        case "up" | "k":
            return replace(view, chosen=max(0, view.chosen - 1)), None
        case "down" | "j":
            return replace(view, chosen=min(max(0, len(job.hosts) - 1), view.chosen + 1)), None
        case "d" if host:
            return replace(view, asked=host), None
        case "u" if host:
            return view, Action("undrain", host)
        case "s":
            return view, Action("stacks")
        case _:
            return view, None


# ---- drawing -----------------------------------------------------------------------------


def draw(job: JobDocument, view: View, now: float, lines: int, columns: int) -> RenderableType:
    """Return the screen; `now`: unix seconds, `lines` and `columns`: of the terminal."""
    if view.text:
        shown = view.text.split("\n")[view.top : view.top + lines - 2]
        return Group(Text("\n".join(shown)), Text("↑ ↓ scroll   any other key: back", "dim"))
    *head, last = job_text.heading(job, now)
    why = _reason_of_chosen(job, view)
    wrapped = [text for text in (last, why) if text]  # whole, on as many lines as they take
    taken = len(head) + sum(-(-len(text) // columns) for text in wrapped)
    room = max(2, lines - taken - 6)  # of both tables, without their heads
    most_hosts = max(1, min(len(job.hosts), room // _HOST_SHARE))
    first = max(0, min(view.chosen - most_hosts // 2, len(job.hosts) - most_hosts))
    numbers = range(first, min(first + most_hosts, len(job.hosts)))
    hosts = _hosts(job, view, numbers, columns)
    chosen = ordered(job, view.sort)[: room - most_hosts]
    return Group(
        Text("\n".join(head), no_wrap=True, overflow="ellipsis"),
        Text(last),
        Text(),
        hosts,
        *([Text(why, "bold")] if why else []),
        Text(),
        _workers(job, view, chosen, columns),
        _foot(job, view),
    )


def _reason_of_chosen(job: JobDocument, view: View) -> str:
    """Return the chosen host with its reason; empty if it has none."""
    if not job.hosts:
        return ""
    host = job.hosts[min(view.chosen, len(job.hosts) - 1)]
    return (
        f"{job_text.printable(host.host)}: {job_text.printable(host.reason)}" if host.reason else ""
    )


def _foot(job: JobDocument, view: View) -> Text:
    """Return the last line: a question, a message, or the keys."""
    if view.asked is not None:
        warning = orders.cost_of_drain(job, view.asked)
        why = f"{warning}. " if warning else ""
        return Text(f"{why}Drain host {job_text.printable(view.asked)}? y/N", "bold")
    return Text(job_text.printable(view.message) or HELP, "bold" if view.message else "dim")


def _hosts(job: JobDocument, view: View, numbers: range, columns: int) -> Table:
    rows = []
    for number in numbers:
        host = job.hosts[number]
        here = number == min(view.chosen, len(job.hosts) - 1)
        cells = (
            _CHOSEN if here else "",
            host.host,
            host.state,
            str(host.slots),
            str(host.workers),
            *readable.of_host(job.measured.hosts.get(host.host)),
            f"{readable.duration(host.cooldown_left)} left" if host.cooldown_left else host.reason,
        )
        rows.append(cells)
    names = ("", "HOST", "STATE", "SLOTS", "WORKERS", *readable.HOST_NUMBERS, "WHY")
    return _table(names, rows, columns, range(len(names) - 2, 2, -1))


def _workers(job: JobDocument, view: View, chosen: Sequence[MemberStatus], columns: int) -> Table:
    rows = []
    notes = job_text.notes(job)
    for w in chosen:
        cells = (
            "-" if w.rank < 0 else str(w.rank),
            w.state,
            w.host,
            str(w.slot),
            str(w.pid or "-"),
            w.worker,
            *readable.of_worker(job.measured.workers.get(w.worker)),
            notes.get(w.worker, ""),
        )
        rows.append(cells)
    names = ("RANK", "STATE", "HOST", "SLOT", "PID", "WORKER", *readable.WORKER_NUMBERS, "")
    table = _table(names, rows, columns, [4, 3, *range(len(names) - 2, 5, -1)])
    hidden = len(job.members) - len(chosen)
    table.caption = f"by {view.sort}" + (f", and {hidden} more" if hidden else "")
    table.caption_justify = "left"
    return table


def _table(
    names: Sequence[str], rows: Sequence[tuple[str, ...]], columns: int, drop: Sequence[int]
) -> Table:
    """Return a table that fits into so many columns; only its last column, the reason, is cut.

    `drop`: the columns that may go, the first one first; those in which nothing is known go before
    all others.
    """
    cells = [tuple(map(job_text.printable, row)) for row in rows]
    widths = [max(map(len, each)) for each in zip(names, *cells, strict=True)]
    last = len(names) - 1
    shown = list(range(last))
    reason = min(widths[last], _LEAST_REASON)
    unknown = [n for n in drop if all(row[n] == readable.UNKNOWN for row in cells)]
    for number in dict.fromkeys((*unknown, *drop)):
        if sum(widths[n] + _GAP for n in shown) + reason <= columns:
            break
        shown.remove(number)
    widths[last] = max(1, min(widths[last], columns - sum(widths[n] + _GAP for n in shown)))
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    for number in (*shown, last):
        table.add_column(names[number], no_wrap=True, overflow="ellipsis", width=widths[number])
    for row in cells:
        style = "bold" if row[0] == _CHOSEN else ""
        table.add_row(*(_cell(row[n]) for n in (*shown, last)), style=style)
    return table


def _cell(text: str) -> Text:
    said = job_text.printable(text)
    return Text(said, _STATE_STYLES.get(said, ""))


def ordered(job: JobDocument, sort: str) -> list[MemberStatus]:
    """Return the workers in an order; the largest number first, unknown ones last."""

    def key(w: MemberStatus) -> tuple[float | str, ...]:
        found = job.measured.workers.get(w.worker)
        rank = float("inf") if w.rank < 0 else w.rank
        if sort == "host":
            return w.host, rank
        numbers: dict[str, float | None] = {}
        if found is not None:
            numbers = {"steps/s": found.steps_per_s, "samples/s": found.samples_per_s}
            numbers["memory"] = found.memory
        number = numbers.get(sort)
        return 1.0 if number is None else -number, rank

    return sorted(job.members, key=key)


# ---- running -----------------------------------------------------------------------------


class Remote:
    """The driver of the job: its status, and orders to it. Errors of `status` are raised.

    `job` has a reader's token, `steering` an operator's.
    """

    def __init__(self, job: RendezvousClient, steering: RendezvousClient) -> None:
        self._job, self._steering = job, steering
        self._asked: int | None = None  # the last event before stacks were asked for

    def status(self) -> JobDocument:
        """Return the job now."""
        return job_text.read_job(self._job.get_bytes(contract.STATUS_PATH))

    def stacks(self) -> str | None:
        """Return the stacks that were asked for, once they are there."""
        found = None if self._asked is None else stacks_after(self._job, self._asked)
        if found is not None:
            self._asked = None
        return found

    def act(self, action: Action) -> str:
        """Carry an action out; return a sentence about it."""
        host, who = action.host, "elasticctl top"
        try:
            if action.kind == "stacks":
                self._asked = ask_stacks(self._steering, who)
                return "the workers were asked for their stacks"
            path = contract.DRAIN_PATH if action.kind == "drain" else contract.UNDRAIN_PATH
            body = msgspec.json.encode({"reason": who})
            self._steering.post_json(path.format(host=quote(host, safe="")), body)
        except RequestError as error:
            return error.message
        return (
            f"host {host} {'is being drained' if action.kind == 'drain' else 'may be used again'}"
        )


def watch(remote: Remote, interval: float) -> None:
    """Show the job until q is pressed; look at it every `interval` seconds."""
    view = View()
    job = remote.status()
    console = Console()
    due = time.monotonic() + interval
    with keys() as read, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(draw(job, view, time.time(), console.height, console.width), refresh=True)
            for key in read(max(0.0, due - time.monotonic())):
                view, action = press(view, key, job)
                if action is not None and action.kind == "quit":
                    return
                if action is not None:
                    view = replace(view, message=remote.act(action))
            if time.monotonic() >= due:
                job = remote.status()
                due = time.monotonic() + interval
                if (found := remote.stacks()) is not None:
                    view = replace(view, text=found, top=0, message="")


def pressed(data: bytes) -> list[str]:
    """Return the keys that a terminal sent: arrows by name, others as they are."""
    found = _KEY.findall(data)
    return [_ARROWS.get(arrow, "") if arrow else key.decode("latin-1") for arrow, key in found]


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], list[str]]]:
    """Have keys come at once and unseen; yield a function that waits for some."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def read(patience: float) -> list[str]:
        if not select.select([fd], [], [], patience)[0]:
            return []
        data = os.read(fd, 64)
        if not data:
            return ["q"]  # the terminal is gone
        return pressed(data)

    try:
        tty.setcbreak(fd)
        yield read
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
