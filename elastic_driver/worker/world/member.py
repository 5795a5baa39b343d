"""Joins and leaves the worlds of a job: one process, one membership, one round at a time.

`run` and `elastic.init()` call `JobMembership` on the main thread: report READY, wait for a round
with this worker in it, build its process group, train, leave, again. A process that `elasticrun`
did not start is a world of one.

`RoundNotices` carries out notices: the training thread has to leave its round after a named step,
or at once. The heartbeat thread brings them. A notice to leave at once also ends the construction
of a group, or a collective that waits for a lost peer. Times are seconds.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, Protocol, TypeVar
from urllib.parse import urlsplit

from torch.distributed import HashStore, Store

from elastic_driver import contract
from elastic_driver.errors import ExitCode, UsageError, WorldBrokenError
from elastic_driver.failure_causes import looks_like_peer_loss
from elastic_driver.words.orders import Notice, World
from elastic_driver.words.world import Member, SlotInfo, StateVersion
from elastic_driver.worker import context, current, torch_seams
from elastic_driver.worker.current import say
from elastic_driver.worker.heartbeat.driver_connection import (
    Checkpointed,
    DriverConnection,
    FinalCheckpointTask,
)
from elastic_driver.worker.heartbeat.training_progress import AT_ONCE, NEVER, TrainingProgress
from elastic_driver.worker.heartbeat.watches import TrainingThread
from elastic_driver.worker.state_sync.contents import accelerator_in_use
from elastic_driver.worker.state_sync.sharing import UnfitError
from elastic_driver.worker.state_sync.steps import collectives_of_world
from elastic_driver.worker.world import groups
from elastic_driver.worker.world.device import Accelerator, DeviceHalf
from elastic_driver.worker.world.gloo import CollectiveWaits, link_usage
from elastic_driver.worker.world.groups import (
    BackendChoice,
    RoundGroup,
    RoundOverError,
    stop_companions,
)
from rendezvous.errors import AbortedError, UnreachableError
from rendezvous.torch_store import HTTPStore

# ---- notices ---------------------------------------------------------------------------

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

    def enter(self, group: RoundGroup, round_id: int, steps: int, size: int, rank: int) -> bool:
        """Begin a round after `steps` committed steps; return whether it is over already."""
        with self._lock:
            self.group = group
            self.waits = CollectiveWaits()
            CollectiveWaits.use(self.waits if group.half is None else None)
            self._broken_since = None
            self._thread = TrainingThread()
            self._progress.links = lambda: link_usage(group.connections.held)
            self._progress.collectives = collectives_of_world
            self._progress.enter(round_id, steps, size, rank)
            self._apply(self._notice)  # it may have come while the group was built
            if self.alone is not None:
                self._progress.leave_after = AT_ONCE
            return self._broken_since is not None

    def leave(self) -> RoundGroup | None:
        """End the round; return its group, which is still to be taken down."""
        with self._lock:
            group, self.group = self.group, None
            self._progress.leave()
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


# ---- the membership --------------------------------------------------------------------

CONNECT_DEVICES_S = 120.0  # the longest wait for the peers' devices
END_S = 5.0  # at the end of the script, for gloo's old groups to end; usually milliseconds
MAX_DEVICE_FAILURES = 3  # in a row, of devices to connect in rounds that no notice has ended
ALONE = SlotInfo("localhost", 0, 0, 0, 0, 1, 1, 1, 0, 1)  # rank 0 of 1


class TrainedState(Checkpointed, Protocol):
    """What a membership needs of a state; see `State`."""

    def state_version(self) -> StateVersion:
        """Return the version to report with READY."""

    def save_without_driver(self, worker: str, world: Sequence[str], seconds: float) -> str:
        """Write the last commit with the others that leave; return a clause: what is on disk."""

    def _restore_all(self) -> None:
        """Go back to the last commit of each state of this process."""


class JobMembership:
    """This process's membership in the job; made once, by the main thread.

    `world` is that of the current round, or of the one before between two rounds.
    """

    def __init__(
        self, born: context.WorkerContext | None, choice: BackendChoice = BackendChoice()
    ) -> None:
        self.progress = TrainingProgress()
        self.world: World | None = None
        self._notices = RoundNotices(self.progress)
        self._choice = choice
        self._driver: DriverConnection | None = None
        self._port: int | None = None  # of the rendezvous
        if born is not None:
            self._port = urlsplit(born.endpoint).port
            self._driver = DriverConnection(
                born,
                self.progress,
                self._notices.on_notice,
                self._notices.check,
                on_new_driver=self._notices.on_new_driver,
                leave_alone=self._leave_alone,
            )
        self._left = 0  # the round left last
        self._device_failures = 0  # in a row
        self.phase = 0  # the number of the training function's call
        self.told = -1  # the rank that the script knows before its first round; −1: none
        self._left_groups: list[RoundGroup] = []  # a peer may still be in them
        self._endings: list[threading.Thread] = []  # of gloo's old groups

    @property
    def group(self) -> RoundGroup | None:
        """The group of the current round; None between two rounds."""
        return self._notices.group

    @property
    def has_notice(self) -> bool:
        """Whether a signal has told this worker to leave."""
        return self._driver is not None and self._driver.preemption.has_come

    def phase_of_others(self) -> int:
        """Return the furthest training function that the job's workers are in; 0: not known."""
        return 0 if self._driver is None or self._left else self._driver.phase_of_others()

    def start(self) -> None:
        """Start the heartbeat, after waiting for a driver that is away.

        Raises `RendezvousError` where the rendezvous cannot be used, and ends the process with one
        line where the next driver does not come in time.
        """
        if self._driver is None:
            return
        if self._choice.device is not None and self._choice.early:
            self._choice.device.open()
        try:
            self._driver.start()
        except UnreachableError as error:
            if self._driver.born.driver_timeout == 0:
                raise
            say(f"no driver came within --driver-timeout; this worker ends ({error})")
            raise SystemExit(ExitCode.UNAVAILABLE) from error

    def stop(self, *, script_is_over: bool = False, error: BaseException | None = None) -> None:
        """Leave the world and end the heartbeat; bounded, whatever the peers do.

        Args:
            script_is_over: tell the driver that this process takes part no more.
            error: what has ended the script.
        """
        round_id = self.progress.round
        if script_is_over and error is None and round_id:
            self.progress.on_end()
        self.leave()
        if self._driver is not None:
            lost = isinstance(error, WorldBrokenError) or looks_like_peer_loss(str(error))
            over_in = round_id if script_is_over else None
            unfit = str(error) if isinstance(error, UnfitError) else ""
            failed = error is not None and not lost
            self._driver.stop(over_in=over_in, failed=failed, unfit=unfit)
        self._end_left_groups()
        until = time.monotonic() + END_S
        for ending in self._endings:
            ending.join(max(0.0, until - time.monotonic()))
        current.forget()

    def forget_in_child(self) -> None:
        """Drop the world's connections and the signal handlers in a forked child."""
        if self.group is not None:
            self.group.connections.close_in_child()
        if self._driver is not None:
            self._driver.preemption.close()

    # ---- joining -------------------------------------------------------------------------

    def join(self, reason: str, state: TrainedState | None = None, *, broken: bool = False) -> None:
        """Leave this round, if any, and become a member of the next one.

        If no round comes because all workers have to leave, `state` writes a final checkpoint.
        A round that ends while its group is built costs nothing: we report READY for the next one.
        Raises `RendezvousError` only where the rendezvous refuses us; silence is waited out.

        Args:
            reason: why we left the round; reported with READY.
            state: that this worker trains.
            broken: whether the round broke, so that the state goes back to its last commit.
        """
        version = StateVersion() if state is None else state.state_version()
        self._leave_and_report(version, reason, state if broken else None)
        driver = self._driver
        if driver is None:
            me = Member(worker="localhost.0.0", place=ALONE)
            world = World(round=self._left + 1, members=(me,), reason="started alone")
            self._enter(world, me, HashStore(), version.steps)
            return
        try:
            self._enter_next(driver, version, state)
        except AbortedError:
            if self._notices.alone is None:
                raise
            self._end_without_driver(*self._notices.alone, driver.born.worker, state)

    def _enter_next(
        self, driver: DriverConnection, version: StateVersion, state: TrainedState | None
    ) -> None:
        checkpoint = None if state is None else FinalCheckpointTask(driver.born.worker, state)
        while True:
            world, me = driver.await_world(self._left, checkpoint)
            store = HTTPStore(driver.client, contract.round_prefix(world.round))
            try:
                self._enter(world, me, store, version.steps)
                return
            except RoundOverError as error:
                self._left = world.round
                reason = f"round {world.round} ended while its group was built: {error}"
                self._report_ready(version, reason)

    def _end_without_driver(
        self, reason: str, until: float, worker: str, state: TrainedState | None
    ) -> NoReturn:
        """Write the final checkpoint with the others, if `state` has one, and end the script."""
        done = "it has trained nothing"
        if state is not None:
            world = [] if self.world is None else [member.worker for member in self.world.members]
            done = state.save_without_driver(worker, world, until - time.monotonic())
        say(f"{reason}: this worker leaves; {done}")
        raise SystemExit(ExitCode.UNAVAILABLE)

    def _enter(self, world: World, me: Member, store: Store, version: int) -> None:
        run = partial(self._notices.run_attempt, world.round, groups.CONNECT_TIMEOUT_S + 1)
        build = partial(groups.build, run, device=groups.gloo_device(world), port=self._port)
        choice = self._choice
        vote = None  # there is no vote on whether devices take part
        if choice.by_vote:
            vote = choice.device.identity() if choice.device is not None else ""
        group = build(store, me.place.rank, world.size, vote=vote)

        def create_subgroup(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
            part = build(store, rank, size, vote=None)
            torch_seams.set_timeout(part.backend, timeout)
            group.connections.held += part.connections.held
            group.subgroups.append(part.backend)
            return part.backend

        if choice.device is not None:
            choice.device.begin()  # also where gloo carries its tensors
        if choice.device is None or not group.elected:
            group.install(create_subgroup)
        else:
            self._install_with_device(choice.device, group, world.round, create_subgroup)
        self.world = world
        self._left = world.round
        over = self._notices.enter(group, world.round, version, world.size, me.place.rank)
        self._end_left_groups()  # their other members are in this round, or gone
        if self._driver is not None:
            self._driver.preemption.listen()
            if over:
                self._driver.preemption.wake()  # so that `RoundNotices.check` does not come late
        current.enter(me.place, world.round)

    def _install_with_device(
        self, device: Accelerator, group: RoundGroup, round_id: int, create: groups.GroupCreator
    ) -> None:
        """Give the group to torch, and connect the device to those of the peers."""
        group.half = DeviceHalf(device)
        try:
            group.install(create, device.backends)
            self._notices.run_attempt(round_id, CONNECT_DEVICES_S, group.half.connect)
        except Exception as error:
            if problem := group.cut_off_device(broken=True):
                self._notices.end_process(problem)
            self._take_down(group)
            if isinstance(error, RoundOverError | UsageError):
                raise
            self._device_failures += 1
            if self._device_failures >= MAX_DEVICE_FAILURES:
                raise
            raise RoundOverError(str(error).partition("\n")[0]) from error
        self._device_failures = 0

    # ---- leaving -------------------------------------------------------------------------

    def _leave_and_report(
        self, version: StateVersion, reason: str, to_restore: TrainedState | None
    ) -> None:
        """Leave this round and report READY for the next, in the order that the backend needs.

        With gloo alone READY comes first, to save time. A device may still write where the state
        is to be rolled back, and the next round must not begin before all have left this one
        (a rank that connected to others while one was still aborting has been seen to hang). So a
        device is cut off first, and READY comes last.
        """
        group = self.group
        has_device = group is not None and group.half is not None
        broken = to_restore is not None
        if not has_device:
            self._report_ready(version, reason, broken=broken)
        elif group and (problem := group.cut_off_device(broken=broken)):
            self._notices.end_process(problem)
        if to_restore is not None:
            to_restore._restore_all()
        if self._notices.alone is not None and group and to_restore is None:
            group.linger()  # others may need our last data to finish this step
        self.leave()
        if has_device:
            self._report_ready(version, reason, broken=broken)

    def _report_ready(self, version: StateVersion, reason: str, *, broken: bool = False) -> None:
        if self._driver is not None:
            bound = self._choice.device is not None or accelerator_in_use() is not None
            undone = time.monotonic() - self.progress.committed_at if broken else 0.0
            try:
                self._driver.report_ready(
                    self._left,
                    version,
                    reason,
                    bound=bound,
                    undone=undone,
                    phase=self.phase,
                    told=-1 if self._left else self.told,
                )
            except AbortedError:
                if self._notices.alone is None:
                    raise

    def settle(self) -> None:
        """Wait until the results of collectives are there, before they change the state.

        With gloo they always are. Called on the training thread. Raises `WorldBrokenError` where
        they will never be.
        """
        if self.group is not None and self.group.half is not None:
            self.group.half.settle()

    def exchanging(self) -> AbstractContextManager[None]:
        """Return a context for an exchange that gloo carries: a wait in it can be given up."""
        return self._notices.waits.exchanging()

    def leave(self) -> None:
        """Take the process group down, healthy or broken, without waiting for a peer.

        A peer that has not got the notice to leave yet finds its group broken. The connections
        themselves stay open until the next round: see `gloo`.
        """
        stop_companions()
        # Before `group` is reset: a notice that comes meanwhile has to reach the device.
        problem = self.group.cut_off_device(broken=False) if self.group is not None else None
        group = self._notices.leave()
        if group is not None and problem is None:
            self._take_down(group)

    def _take_down(self, group: RoundGroup) -> None:
        self._endings = [thread for thread in self._endings if thread.is_alive()]
        with self._notices.taking_down():
            self._endings.append(group.take_down(self._notices.waits.ended))
        self._left_groups.append(group)

    def _end_left_groups(self) -> None:
        while self._left_groups:
            self._left_groups.pop().end()

    def _leave_alone(self, reason: str, seconds: float) -> None:
        """Leave without a driver; called on the heartbeat thread."""
        self._notices.leave_alone(reason, seconds)
        if self._driver is not None:
            self._driver.client.abort()  # the training thread may wait for a world
