"""Carries out notices: the training thread has to leave its round after a named step, or at once.

The heartbeat thread brings them. A notice to leave at once also ends the construction of a group,
or a collective that waits for a lost peer. Times are seconds.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar

from elastic_driver.errors import ExitCode
from elastic_driver.words.orders import Notice
from elastic_driver.worker.current import say
from elastic_driver.worker.heartbeat.progress import AT_ONCE, NEVER, TrainingProgress
from elastic_driver.worker.heartbeat.watches import TrainingThread
from elastic_driver.worker.state_sync.steps import collectives_of_world
from elastic_driver.worker.world.gloo import CollectiveWaits, link_usage
from elastic_driver.worker.world.groups import RoundGroup, RoundOverError

GRACE_S = 0.25  # for collectives to fail by themselves, after a notice to leave at once
SILENT_GRACE_S = 0.05  # the same, if a peer's host answers no more
CHECK_S = 0.25  # between two checks of a training thread that has not left yet
# Checks in a row that find it asleep, after which it gives up its wait (2 s, or 0.5 s if all other
# threads sleep too): then gloo writes no more into the script's tensors.
GIVE_UP_CHECKS = 8
# Checks in a row that find it asleep (8 s, or 2 s if all other threads sleep too); a collective
# that can end takes milliseconds.
HOPELESS_CHECKS = 32
TAKE_DOWN_S = 20.0  # for torch to drop a group; a destructor that waits for a lost peer hangs
FORGOTTEN = "a collective was not ended by the loss of its peer"
T = TypeVar("T")


class RoundNotices:
    """The notices about rounds, and the round that they end: its group, or the attempt to build it.

    `group` is that of the current round, None between two rounds. `alone`: why and until when
    (monotonic) this worker leaves without a driver.
    """

    def __init__(self, progress: TrainingProgress) -> None:
        self.group: RoundGroup | None = None
        self.alone: tuple[str, float] | None = None
        self.waits = CollectiveWaits()  # of this round
        self._progress = progress
        self._lock = threading.Lock()  # guards the next two: the heartbeat thread brings notices
        self._notice: Notice | None = None
        self._attempt: tuple[int, SimpleQueue[Any]] | None = None  # a round, its thread's result
        self._broken_since: float | None = None  # when a notice told us to leave at once
        self._grace = GRACE_S  # after that, before we end our collectives
        self._taken_down_since: float | None = None  # when taking the group down began
        self._thread = TrainingThread()

    # ---- on the training thread ----------------------------------------------------------

    def run_attempt(self, round_id: int, timeout: float, work: Callable[[], T]) -> T:
        """Return what `work` returns in a thread.

        Raises what it raises, and `RoundOverError` after a notice of the end of this round, or
        after `timeout` seconds. The thread is left alone then and ends when it can.
        """
        outcome: SimpleQueue[tuple[T] | Exception] = SimpleQueue()

        def carry_out() -> None:
            try:
                outcome.put((work(),))
            except Exception as error:  # raised below
                outcome.put(error)

        with self._lock:
            self._attempt = round_id, outcome
            self._apply(self._notice)
        threading.Thread(target=carry_out, name=f"elastic-round-{round_id}", daemon=True).start()
        try:
            found = outcome.get(timeout=timeout)
        except Empty:
            raise RoundOverError(f"no group within {timeout:.0f} s") from None
        finally:
            with self._lock:
                self._attempt = None
        if isinstance(found, tuple):
            return found[0]
        raise found

    def entered(self, group: RoundGroup, round_id: int, steps: int, size: int, rank: int) -> bool:
        """Begin a round after `steps` committed steps; return whether it is over already."""
        with self._lock:
            self.group = group
            self.waits = CollectiveWaits()
            CollectiveWaits.use(self.waits if group.half is None else None)
            self._broken_since = None
            self._thread = TrainingThread()
            self._progress.links = lambda: link_usage(group.connections.held)
            self._progress.collectives = collectives_of_world
            self._progress.entered(round_id, steps, size, rank)
            self._apply(self._notice)  # it may have come while the group was built
            if self.alone is not None:
                self._progress.leave_after = AT_ONCE
            return self._broken_since is not None

    def left(self) -> RoundGroup | None:
        """End the round; return its group, which is still to be taken down."""
        with self._lock:
            group, self.group = self.group, None
            self._progress.left()
            self._broken_since = None
        return group

    @contextmanager
    def taking_down(self) -> Iterator[None]:
        """Bound the time for taking a group down: after `TAKE_DOWN_S` this process ends."""
        self._taken_down_since = time.monotonic()
        try:
            yield
        finally:  # an error of torch ends the script, which may take longer than `TAKE_DOWN_S`
            self._taken_down_since = None

    # ---- on the heartbeat thread ---------------------------------------------------------

    def on_notice(self, notice: Notice) -> None:
        """Carry out a notice of the driver."""
        with self._lock:
            before = self._progress.leave_after
            self._notice = notice
            self._apply(notice)
            planned = before == NEVER and self._progress.leave_after not in (NEVER, AT_ONCE)
        if planned:
            self._progress.on_planned()

    def on_new_driver(self) -> None:
        """End a meeting: what its members wrote was in the memory of the driver that has died."""
        with self._lock:
            if self._attempt is not None:
                self._attempt[1].put(RoundOverError("another driver has taken over"))

    def leave_alone(self, reason: str, seconds: float) -> None:
        """Leave at the next commit, or now if this worker waits for a round; there is no driver.

        All ranks leave after the same step although nobody names it: the first to leave takes no
        part in the next one, so no other rank can finish that.
        """
        say(f"{reason}: leaving after the next step, within {seconds:.3g} s")
        with self._lock:
            self.alone = reason, time.monotonic() + seconds
            self._progress.leave_reason, self._progress.leave_after = reason, AT_ONCE
            if self._attempt is not None:
                self._attempt[1].put(RoundOverError(reason))

    def _apply(self, notice: Notice | None) -> None:
        """Let a notice end what is built for its round, or this round. Needs the lock."""
        if notice is None:
            return
        if self._attempt is not None and _ends_now(notice, self._attempt[0]):
            self._attempt[1].put(RoundOverError(notice.reason))
        progress = self._progress
        if progress.round == 0 or notice.round < progress.round:
            return
        progress.leave_reason = notice.reason
        if _ends_now(notice, progress.round):
            progress.leave_after = AT_ONCE
            if self._broken_since is not None:  # told again, by the next driver
                return
            self._broken_since = time.monotonic()
            self._grace = SILENT_GRACE_S if notice.silent else GRACE_S
            if self.group is not None and self.group.half is not None:
                self.group.half.cut_off(notice.reason)
        elif notice.after_step is not None:
            progress.leave_after = notice.after_step

    def check(self) -> float | None:
        """Make the training thread leave a broken round; return the seconds until the next check.

        The loss of a peer ends collectives at once, but a peer that is stopped or cut off does
        not: then we end them. Where gloo has forgotten one, the training thread gives up its wait;
        where that cannot be given up (see `gloo`), this process ends, to be replaced.
        The heartbeat thread calls it before each heartbeat.
        """
        since = self._taken_down_since
        if since is not None and time.monotonic() - since > TAKE_DOWN_S:
            self.end_process(f"its group was not taken down within {TAKE_DOWN_S:g} s")
        with self._lock:
            if self._broken_since is None or self.group is None:
                return None
            waited = time.monotonic() - self._broken_since
            if waited < self._grace:
                return self._grace - waited
            self.group.connections.shut_reads()
            half = self.group.half
            problem = half and half.problem()
            if half is not None and half.is_ending() and problem is None:
                return CHECK_S  # the training thread waits for that, which has a limit of its own
            asleep = self._thread.count_asleep()
            of_gloo = half is None or self.waits.is_exchanging
            if problem is None and asleep >= GIVE_UP_CHECKS and of_gloo:
                self.waits.give_up(FORGOTTEN)
            if problem is None and asleep < HOPELESS_CHECKS:
                return CHECK_S
        return self.end_process(problem or FORGOTTEN)

    # ---- on both -------------------------------------------------------------------------

    def end_process(self, problem: str) -> NoReturn:
        """End this process, because nothing can bring it into the next round."""
        why = f"round {self._progress.round}: {problem} ({self._progress.leave_reason})"
        say(f"WorldBrokenError: {why}; this worker ends, to be replaced")
        os._exit(ExitCode.UNAVAILABLE)


def _ends_now(notice: Notice, round_id: int) -> bool:
    """Return whether this notice ends that round now: it says so, or is about a later round."""
    return notice.round > round_id or (notice.round == round_id and notice.after_step is None)
