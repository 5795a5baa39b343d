"""The one membership of this process: `elastic.init()` starts it, `elastic.shutdown()` ends it.

Scripts call `init` themselves or leave it to `@elastic.run`. The membership stops when the script
ends, or as soon as an exception that ends it is shown: the process may take seconds to end, and the
others do not wait for that. A forked child drops it: it must neither send heartbeats nor hold on to
the connections of the training process. It keeps rank and size, which the processes of a loader ask
for. No process that a worker has started joins the job beside it.

A worker that makes no progress for long counts as hung (`heartbeat.stall_watch`,
`job.hangs`). A commit is progress. A loop without commits calls `report_progress`; a long
phase that is not training, such as an evaluation, runs inside `busy`. Both do nothing in a process
that `elasticrun` did not start. Scripts call them on the training thread. Times are seconds.
"""

import atexit
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from elastic_driver.errors import UsageError
from elastic_driver.words.progress import MAX_NAME_CHARS, MAX_NUMBERS
from elastic_driver.worker import context, current
from elastic_driver.worker.heartbeat.progress import TrainingProgress
from elastic_driver.worker.worker_log import say
from elastic_driver.worker.world import companions
from elastic_driver.worker.world.backend import choose_backend
from elastic_driver.worker.world.initial import InitialMembership, place_at_start, place_of_now
from elastic_driver.worker.world.membership import JobMembership

BUSY_S = 3600.0  # the default limit of `busy`
LARGEST_COUNT = 2**53  # of steps and samples


class _Session:
    """The mutable field of this module."""

    membership: JobMembership | None = None
    initial: InitialMembership | None = None  # instead, until the script joins the job
    watched: bool = False  # for an exception that ends the script
    alone: bool = False  # no elasticrun has started this process, and that was said


def init(backend: str | None = None) -> None:
    """Join the job: wait for the first round with this process, and build its process group.

    Does nothing when this process is in a world already, or was started by one that is. Without
    `elasticrun` the process becomes a world of one, so that a script can be tried with plain
    `python`.

    Args:
        backend: as for torch's `init_process_group`: "gloo", or the accelerator's own, such as
            "nccl" or "xccl", for its tensors (gloo then carries CPU tensors). None: the
            accelerator's own in every round in which each worker has a device, else gloo.

    Raises:
        UsageError: the backend is unknown, there is no device for it, or the environment of a
            worker is incomplete.
        RendezvousError: the rendezvous cannot be reached or refuses this worker.
    """
    if _Session.membership is None and current.has_parent_in_world():
        return
    member = start(backend)
    if member.group is None:
        member.join("started")


def start(backend: str | None = None) -> JobMembership:
    """Return the membership of this process, started if it was not; do not wait for a round.

    `backend` counts in the first call only; see `init`.
    """
    if _Session.membership is None:
        told = current.rank() if current.is_initialized() else -1  # in a world without the driver
        leave_initial()
        born = _context()
        member = JobMembership(born, choose_backend(backend, born.slot if born else 0))
        member.told = told
        member.start()
        _Session.membership = member
    return _Session.membership


def meet_as_started() -> None:
    """Join the world that this process was started for, and tell the driver nothing.

    For scripts of which nobody knows yet whether they are elastic; see `initial`. Does nothing in
    a process that is in a world.
    """
    if membership() is not None:
        return
    born = _context()
    member = InitialMembership(born, choose_backend(None, born.slot if born else 0))
    member.meet()
    _Session.initial = member


def leave_initial() -> None:
    """Leave the world of `meet_as_started`; does nothing in another one."""
    member, _Session.initial = _Session.initial, None
    if member is not None:
        member.stop()


def _context() -> context.WorkerContext | None:
    """Return the context of this process, and use it; None where elasticrun has not started it."""
    born = context.from_environment()
    if born is not None and current.has_parent_in_world():
        raise UsageError(
            f"this process was started by worker {born.worker}, which trains in the job, and "
            "cannot join beside it; begin the script's training under "
            'if __name__ == "__main__":, which the processes of a loader leave out'
        )
    if born is None:
        if not _Session.alone:
            say("not started by elasticrun: training in this process alone, as a world of one")
        _Session.alone = True
        return None
    if born.scratch:
        context.use_scratch(born.scratch)
    if not _Session.watched:
        _leave_upon_exception()
    return born


def _leave_upon_exception() -> None:
    """Have this process leave its world as soon as an exception that ends the script is shown."""
    _Session.watched, show = True, sys.excepthook

    def show_and_leave(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            show(kind, error, trace)
        finally:
            if membership() is not None:
                companions.stop_all(broken=True)
            _shutdown(script_is_over=True, error=error)

    sys.excepthook = show_and_leave


def membership() -> JobMembership | None:
    """Return the membership of this process; None before `init()` and after `shutdown()`."""
    return _Session.membership or _Session.initial


def is_in_job() -> bool:
    """Return whether this process has joined the job: it is not in the world of its start only."""
    return _Session.membership is not None


def expect_round() -> None:
    """Take the place that this process will have in a round, until it joins one.

    For newcomers, which need not wait for a round to know their rank.
    """
    born = _context()
    if born is not None and membership() is None:
        place, round_id = place_at_start(born)
        current.enter(place_of_now(born) or place, round_id)


def shutdown() -> None:
    """Leave the world and end the heartbeat. Called at exit; a second call does nothing."""
    _shutdown(script_is_over=False)


def _shutdown(*, script_is_over: bool, error: BaseException | None = None) -> None:
    leave_initial()
    member, _Session.membership = _Session.membership, None
    if member is not None:
        member.stop(script_is_over=script_is_over, error=error)


def report_progress(
    step: int | None = None,
    samples: int | None = None,
    *,
    total: int | None = None,
    **numbers: float,
) -> None:
    """Report that this worker makes progress. `commit()` does so by itself.

        elastic.report_progress(loss=loss.item(), total=10_000)

    Status, page and metrics show what was reported last.

    Args:
        step: the number of the finished step, for loops without commits. The times between reported
            steps determine the length of silence that counts as a hang. None, and nothing else
            either: report life only, from within a long step or an evaluation.
        samples: samples that this process has trained since its last call with samples. Samples
            that a `FixedBatch`, an `ElasticSampler` or a `ShardedDataset` of the state counts need
            not be reported.
        total: the number of steps that the whole training has.
        numbers: up to eight numbers by name, such as the loss. One that is not finite is left out.

    Costs a few microseconds. Raises `UsageError` for what is no number, a count below 0, and too
    many numbers.
    """
    for name, count in (("step", step), ("samples", samples), ("total", total)):
        if count is not None and not 0 <= count <= LARGEST_COUNT:
            raise UsageError(f"report_progress({name}={count}): give a number from 0 on")
    progress, now = _progress(), time.monotonic()
    if numbers:
        progress.numbers = _checked(numbers)
    if total is not None:
        progress.total = int(total)
    if samples is not None:
        progress.reported_samples += int(samples)
    if step is not None:
        progress.reported_by_script(now, int(step))
    elif samples is None and total is None and not numbers:
        progress.active_at = now


def _checked(numbers: dict[str, float]) -> dict[str, float]:
    """Return the finite ones of a script's numbers; raises `UsageError` for what is no number."""
    if len(numbers) > MAX_NUMBERS:
        raise UsageError(
            f"report_progress got {len(numbers)} numbers; up to {MAX_NUMBERS} are shown"
        )
    found = {}
    for name, value in numbers.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            kind = type(value).__name__
            raise UsageError(f"report_progress({name}=…): give a number, not a {kind}") from None
        if math.isfinite(number):
            found[name[:MAX_NAME_CHARS]] = number
    return found


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
    progress = _progress()
    before = progress.busy_until
    progress.busy_until = max(before, time.monotonic() + within)
    try:
        yield
    finally:
        progress.active_at = time.monotonic()
        progress.busy_until = before


def _progress() -> TrainingProgress:
    """Return the record that heartbeats report; outside of a job, a record that no one reads."""
    member = _Session.membership
    return TrainingProgress() if member is None else member.progress


def _forget_in_child() -> None:
    member = membership()
    _Session.membership = _Session.initial = None
    if member is not None:
        member.forget_in_child()
    current.inherit()


atexit.register(_shutdown, script_is_over=True)
os.register_at_fork(after_in_child=_forget_in_child)
