"""Progress that a script reports itself, where no `commit()` reports it.

A worker that makes no progress for long counts as hung (`heartbeat.stall_watch`,
`core.rules.hangs`). A commit is progress. A loop without commits calls `report_progress`; a long
phase that is not training, such as an evaluation, runs inside `busy`. Both do nothing in a process
that `elasticrun` did not start. Scripts call them on the training thread. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_driver.worker.world import session

__all__ = ["busy", "report_progress"]

BUSY_S = 3600.0  # that `busy` lasts unless told otherwise: nothing is silent for ever


def report_progress(step: int | None = None, samples: int | None = None) -> None:
    """Say that this worker is getting on. `commit()` does so by itself.

    Args:
        step: the step just finished, for loops that train without commits: from the time between
            two of them follows how long a silence is too long. None: a sign of life only, from
            the midst of a long step or an evaluation.
        samples: how many samples that were, in this process; not used yet.

    Costs a microsecond; may be called as often as one likes.
    """
    del samples
    member = session.membership()
    if member is None:
        return
    if step is None:
        member.progress.active_at = time.monotonic()
    else:
        member.progress.reported(time.monotonic())


@contextmanager
def busy(what: str, within: float = BUSY_S) -> Iterator[None]:
    """Inside, this worker may be silent: `with elastic.busy("evaluation"): ...`.

    Peers that wait for it meanwhile are not taken to hang either. May be nested; the later end
    counts. The worker still has to beat: one that is stopped or killed is noticed as ever.

    Args:
        what: for readers of the script.
        within: after this many seconds silence counts again.
    """
    del what
    member = session.membership()
    if member is None:
        yield
        return
    progress = member.progress
    before = progress.busy_until
    progress.busy_until = max(before, time.monotonic() + within)
    try:
        yield
    finally:
        progress.active_at = time.monotonic()
        progress.busy_until = before
