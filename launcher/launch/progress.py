"""A job in one line while it trains, and in some lines when it is over. Pure."""

import time

from elastic_driver.features.goodput.story import Story, picture
from elastic_driver.runtime.driver import JobNow
from elastic_driver.runtime.reporter import Change
from elastic_driver.words import counted
from elastic_driver.words.log_events import JobSucceeded
from launcher.figures import count, duration, rate

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
    measured, aim = now.measured, max(now.aim, now.workers)
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
    wall, most = ledger.wall(now), max((world.size for world in story.worlds), default=0)
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
