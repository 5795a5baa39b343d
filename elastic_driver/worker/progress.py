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

BUSY_S = 3600.0  # the default limit of `busy`


def report_progress(step: int | None = None, samples: int | None = None) -> None:
    """Report that this worker makes progress. `commit()` does so by itself.

    Args:
        step: the number of the finished step, for loops without commits. The times between reported
            steps determine the length of silence that counts as a hang. None: report life only,
            from within a long step or an evaluation.
        samples: the number of samples of this process in that step; not used yet.

    Costs a microsecond.
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
    """Allow this worker to be silent inside: `with elastic.busy("evaluation"): ...`.

    Peers that wait for it meanwhile do not count as hung either. Blocks may be nested; the later
    end counts. Heartbeats go on: a worker that is stopped or killed is noticed as always.

    Args:
        what: a name for readers of the script.
        within: seconds after which silence counts again.
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
