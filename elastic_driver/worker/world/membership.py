"""Joins and leaves the worlds of a job: one process, one membership, one round at a time.

`run` and `elastic.init()` drive it from the main thread: say READY, wait for a round with us in
it, build its process group, train, leave, again. The heartbeat thread brings notices: to leave
after a named step, or at once, which also ends a construction or a collective that waits for a
peer that is gone. A process that `elasticrun` did not start is a world of one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar

from torch.distributed import HashStore, Store

from elastic_driver.core.documents import Member, Notice, World
from elastic_driver.core.state_version import StateVersion
from elastic_driver.errors import ExitCode, UsageError, WorldBrokenError
from elastic_driver.worker import current
from elastic_driver.worker.context import WorkerContext, alone
from elastic_driver.worker.heartbeat.driver_connection import DriverConnection
from elastic_driver.worker.heartbeat.final_checkpoint import CheckpointableState, FinalCheckpoint
from elastic_driver.worker.heartbeat.progress import AT_ONCE, TrainingProgress
from elastic_driver.worker.heartbeat.training_thread import TrainingThread
from elastic_driver.worker.worker_log import say
from elastic_driver.worker.world import groups
from elastic_driver.worker.world.attempts import Attempt, RoundOverError
from elastic_driver.worker.world.backends import Choice
from elastic_driver.worker.world.devices import CONNECT_S, DeviceHalf
from elastic_driver.worker.world.groups import Group, GroupBuilder
from elastic_driver.worker.world.wrapping import tear_down_wrappers

GRACE_S = 0.25  # for collectives to fail by themselves, once told to leave at once
LOOK_S = 1.0  # between two looks at a training thread that has not left yet
HOPELESS_LOOKS = 8  # a collective that is to end does so within milliseconds
TAKE_DOWN_S = 20.0  # for torch to let go of a group; a destructor that waits for a lost peer hangs
T = TypeVar("T")
SAME_AGAIN = 3  # devices that refuse to meet, in a row, in rounds that nobody has ended


class JobMembership:
    """This process's part in the job; made once, by the main thread.

    `world` and `group` are those of the round it is in; `group` is None between two rounds.
    """

    def __init__(self, born: WorkerContext | None, choice: Choice | None = None) -> None:
        self.progress = TrainingProgress()
        self._choice = choice or Choice()
        self.world: World | None = None
        self.group: Group | None = None
        self._driver = (
            DriverConnection(born, self.progress, self._on_notice, self._tend)
            if born is not None
            else None
        )
        self._left = 0  # the round left last
        self._speaker: object | None = None  # the state that READY was said of
        self._lock = threading.Lock()  # guards what follows: notices come on the heartbeat thread
        self._notice: Notice | None = None
        self._builder: GroupBuilder | Attempt[None] | None = None
        self._building = 0  # round `_builder` is at work for
        self._refused = 0  # times in a row that the devices have not met
        self._broken_since: float | None = None  # when we were told to leave this round at once
        self._leaving_since: float | None = None  # when it began to be taken down
        self._thread = TrainingThread()
        self._parting: list[Group] = []  # left, while some peer may still be in it

    def last_ready_described(self, state: object) -> bool:
        """Whether what this process said of its state when READY was said of this one.

        The first state to ask is the one; a second one in the same script is not.
        """
        if self._speaker is None:
            self._speaker = state
        return self._speaker is state

    def start(self) -> None:
        """Begin to beat. Raises `RendezvousError` where the rendezvous cannot be used."""
        # One request a rank in place of one a peer; gloo reads it when a group is built.
        os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
        if self._driver is not None:
            self._driver.start()

    def stop(self) -> None:
        """Leave the world, if in one, and stop beating; bounded, whatever the peers do."""
        self.leave()
        if self._driver is not None:
            self._driver.stop()
        self._end_parted()
        current.forget()

    def forget_in_child(self) -> None:
        """In a forked child: let go of the world's connections and of the signals."""
        if self.group is not None:
            self.group.close_in_child()
        if self._driver is not None:
            self._driver.preemption.close()

    # ---- joining -------------------------------------------------------------------------

    def report_ready(
        self, state_version: StateVersion, reason: str, speaker: object | None = None
    ) -> None:
        """Report for the next round what `speaker`, a state, stands for; see `leave_and_report`."""
        self._speaker = speaker
        if self._driver is not None:
            self._driver.report_ready(self._left, state_version, reason)

    def join(self, state_version: StateVersion, state: CheckpointableState | None = None) -> World:
        """Become a member of the next round, however many attempts it takes.

        Where none comes, for all are to go, `state` is put on disk.
        A round that ends while its group is built costs nothing: we report for the next one.
        Raises `RendezvousError` only where the rendezvous refuses us; silence is waited out.
        """
        connection = self._driver
        if connection is None:
            return self._enter_alone()
        last = FinalCheckpoint(connection.born.worker, state) if state is not None else None
        while True:
            world, me = connection.await_world(self._left, last)
            try:
                self._enter(connection, world, me, state_version)
            except RoundOverError as error:
                self._left = world.round
                reason = f"round {world.round} ended while its group was built: {error}"
                connection.report_ready(self._left, state_version, reason)
            else:
                return world

    def _enter(
        self, connection: DriverConnection, world: World, me: Member, state_version: StateVersion
    ) -> None:
        store = connection.store(world.round)
        device = groups.gloo_device(world, connection.born.endpoint)
        rank, size = me.place.rank, world.size

        def build(store: Store, rank: int, size: int, ballot: str | None = None) -> Group:
            builder = GroupBuilder(store, rank, size, device, not_to=connection.port, ballot=ballot)
            name = f"elastic-group-{world.round}"
            return self._attempt(builder, world.round, lambda: builder.build(name))

        try:
            group = build(store, rank, size, self._ballot())
        except RoundOverError:
            store.abort()  # its thread may still be waiting for keys
            raise
        group.at_end = store.close

        def subgroup(store: Store, rank: int, size: int, _timeout: timedelta) -> Any:
            part = build(store, rank, size)
            group.connections += part.connections
            return part.backend

        self._install(
            group, world.round, partial(groups.install, group, store, rank, size, subgroup)
        )
        self._entered(world, me, group, state_version.steps)

    def _attempt(
        self, builder: GroupBuilder | Attempt[None], round_id: int, work: Callable[[], T]
    ) -> T:
        """Do what a notice that the round is over makes `builder` give up."""
        with self._lock:
            self._builder, self._building = builder, round_id
            if self._notice is not None and _at_once(self._notice, round_id):
                builder.abandon(self._notice.reason)
        try:
            return work()
        finally:
            with self._lock:
                self._builder = None

    def _ballot(self) -> str | None:
        """What this worker says in the vote on whether devices take part, if there is one."""
        choice = self._choice
        if not choice.by_vote:
            return None
        return choice.device.identity() if choice.device is not None else ""

    def _install(self, group: Group, round_id: int, install: Callable[..., None]) -> None:
        """Give the group to torch; where a device takes part, have it meet its peers."""
        device = self._choice.device if group.elected else None
        if device is None:
            install()
            return
        device.begin()
        group.half = half = DeviceHalf(device)
        try:
            install(beside=device.backends)
            meeting: Attempt[None] = Attempt()
            self._attempt(
                meeting,
                round_id,
                lambda: meeting.make(half.connect, f"elastic-device-{round_id}", CONNECT_S),
            )
        except (RoundOverError, UsageError):
            self._drop(group, half)
            raise
        except Exception as error:
            self._drop(group, half)
            self._refused += 1
            if self._refused >= SAME_AGAIN:
                raise
            raise RoundOverError(str(error).partition("\n")[0]) from error
        self._refused = 0

    def _entered(self, world: World, me: Member, group: Group, version: int) -> None:
        with self._lock:
            self.world, self.group = world, group
            self._left = world.round
            self._broken_since = None
            self._thread.reset_asleep()
            self.progress.links = group.links
            self.progress.entered(world.round, version, len(world.members))
            if self._notice is not None:  # it may have come while the group was built
                self._obey(self._notice)
        self._end_parted()  # whoever was in it is in this round, or gone
        if self._driver is not None:
            self._driver.preemption.listen()
        current.enter(me.place, world.round)

    def _enter_alone(self) -> World:
        me = Member(worker="localhost.0.0", place=alone())
        world = World(round=self._left + 1, members=(me,), reason="started alone")
        device = groups.gloo_device(world, None)

        def subgroup(store: Store, rank: int, size: int, _timeout: timedelta) -> Any:
            return groups.make_gloo(store, rank, size, device)

        store = HashStore()
        builder = GroupBuilder(store, 0, 1, device, not_to=None, ballot=self._ballot())
        group = builder.build("elastic-group")
        self._install(group, world.round, partial(groups.install, group, store, 0, 1, subgroup))
        self._entered(world, me, group, self.progress.version)
        return world

    # ---- leaving -------------------------------------------------------------------------

    def leave_and_report(
        self,
        state_version: StateVersion,
        reason: str,
        speaker: object,
        roll_back: Callable[[], None] | None = None,
    ) -> None:
        """Leave this round and report for the next, in the order that the backend demands.

        With gloo alone READY comes first, to save time. A device may still write where the state
        is to be rolled back, and the next round must not begin before everybody has left this one
        (a rank that met others while one was still aborting has been seen to hang): there it is
        told to stop first, and READY comes last. `roll_back` is for rounds that broke.
        """
        group, half = self.group, self.group.half if self.group is not None else None
        if group is None or half is None:
            self.report_ready(state_version, reason, speaker)
        elif (trouble := _ended(group, half, broken=roll_back is not None)) is not None:
            self._give_up(trouble)
        if roll_back is not None:
            roll_back()
        self._leaving_since = time.monotonic()
        self.leave()
        self._leaving_since = None
        if half is not None:
            self.report_ready(state_version, reason, speaker)

    def settle(self) -> None:
        """Wait until what came out of collectives is there; raises where it never will be.

        With gloo it always is. Called on the training thread, before state is changed by it.
        """
        group = self.group
        if group is not None and group.half is not None:
            group.half.settle()

    def leave(self) -> None:
        """Take the process group down, healthy or broken; never waits for a peer.

        A peer that should leave here too and has not heard of it finds its group broken. The
        connections themselves stay open until the next round: see `sockets`.
        """
        trouble = None
        if self.group is not None and self.group.half is not None:  # while notices still reach it
            trouble = _ended(self.group, self.group.half, broken=False)
        with self._lock:
            group, self.group = self.group, None
            self.progress.left()
            self._broken_since = None
        if group is not None and trouble is None:
            self._take_down(group)

    def _drop(self, group: Group, half: DeviceHalf) -> None:
        """Take down a group whose devices have not met."""
        if (trouble := _ended(group, half, broken=True)) is not None:
            self._give_up(trouble)
        self._take_down(group)

    def _take_down(self, group: Group) -> None:
        group.hang_up()
        tear_down_wrappers()
        group.let_go()
        groups.uninstall(group.half)
        self._parting.append(group)

    def _end_parted(self) -> None:
        for group in self._parting:
            group.end()
        self._parting.clear()

    # ---- notices, on the heartbeat thread ------------------------------------------------

    def _on_notice(self, notice: Notice) -> None:
        with self._lock:
            self._notice = notice
            if self._builder is not None and _at_once(notice, self._building):
                self._builder.abandon(notice.reason)
            self._obey(notice)

    def _obey(self, notice: Notice) -> None:
        """Pass a notice of the round we are in on to the training thread. Needs the lock."""
        progress = self.progress
        if progress.round == 0 or notice.round < progress.round:
            return
        progress.leave_reason = notice.reason
        if _at_once(notice, progress.round):
            progress.leave_after = AT_ONCE
            self._broken_since = time.monotonic()
            if self.group is not None and self.group.half is not None:
                self.group.half.cut_off(notice.reason)
        elif notice.after_step is not None:
            progress.leave_after = notice.after_step

    def _tend(self) -> float | None:
        """See that the training thread leaves a broken round; seconds until the next look.

        A lost peer ends collectives by itself, at once. One that is stopped or cut off does not:
        then we end them. Where even that does not help, this process is of no more use (see
        `stuck`) and ends. Called by the heartbeat before each beat.
        """
        since = self._leaving_since
        if since is not None and time.monotonic() - since > TAKE_DOWN_S:
            self._give_up(f"its group was not taken down within {TAKE_DOWN_S:g} s")
        with self._lock:
            if self._broken_since is None or self.group is None:
                return None
            waited = time.monotonic() - self._broken_since
            if waited < GRACE_S:
                return GRACE_S - waited
            self.group.stop_hearing()
            trouble = self.group.half.trouble() if self.group.half is not None else None
            if trouble is None and self._thread.count_asleep() < HOPELESS_LOOKS:
                return LOOK_S
        return self._give_up(trouble or "a collective was not ended by the loss of its peer")

    def _give_up(self, what: str) -> NoReturn:
        """End this process, which nothing can bring into the next round."""
        say(
            f"WorldBrokenError: round {self.progress.round}: {what} "
            f"({self.progress.leave_reason}); this worker ends, to be replaced"
        )
        os._exit(ExitCode.UNAVAILABLE)


def _ended(group: Group, half: DeviceHalf, *, broken: bool) -> str | None:
    """Wait until the device does nothing any more; why that cannot be. Unless `broken`, or cut
    off already, it first gets done what it was asked for.
    """
    if not broken and not half.is_cut_off:
        with contextlib.suppress(WorldBrokenError):
            half.settle()
            group.linger()
    half.cut_off("this round is left")
    half.wait_until_cut_off()
    return half.trouble()


def _at_once(notice: Notice, round_id: int) -> bool:
    """Whether this notice ends that round now: it says so, or it speaks of a later one."""
    return notice.round > round_id or (notice.round == round_id and notice.after_step is None)
