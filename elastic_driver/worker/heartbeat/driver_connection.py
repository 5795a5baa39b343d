"""What one worker and the driver say to each other: READY, the next world, the beat.

`world` owns one and calls it from the main thread; the heartbeat has its own connection. Waits
come in slices, and an outage of the driver is said once, then waited out: nothing here gives
up because the driver is away, only when it refuses us. Times are seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from elastic_driver import contract
from elastic_driver.core.documents import Member, Notice, SaveRequest, World, decode, decode_world
from elastic_driver.core.events import WorkerReady
from elastic_driver.worker.context import WorkerContext
from elastic_driver.worker.heartbeat.final_checkpoint import FinalCheckpoint
from elastic_driver.worker.heartbeat.heartbeat import Heartbeat
from elastic_driver.worker.heartbeat.preemption import Notices
from elastic_driver.worker.heartbeat.progress import TrainingProgress
from elastic_driver.worker.heartbeat.stall_watch import StallWatch
from elastic_driver.worker.worker_log import say
from rendezvous.auth import read_token_file
from rendezvous.client import RendezvousClient
from rendezvous.errors import RendezvousError, UnreachableError
from rendezvous.torch_store import HTTPStore
from rendezvous.wire import EVENTS_PATH, Delete, Entry

SLICE_S = 10.0  # of a wait for the next world
LOOK_S = 0.05  # between two looks whether the last checkpoint is written
MAX_REASON_CHARS = 1000
GOODBYE_S = 1.0  # for the driver to hear that we stop beating; it may be gone

_encode_event = msgspec.json.Encoder().encode


class StateVersion(Struct, frozen=True):
    """What a worker says of its state when it is READY: see `core.events.WorkerReady`."""

    version: int = -1
    clean: bool = True


class DriverConnection:
    """The connections of one worker to its driver.

    Raises `TokenError` where the token file cannot be used. `start` connects.
    """

    def __init__(
        self,
        born: WorkerContext,
        progress: TrainingProgress,
        on_notice: Callable[[Notice], None],
        tend: Callable[[], float | None],
    ) -> None:
        self.born = born
        self.port = urlsplit(born.endpoint).port
        self._client = RendezvousClient(born.endpoint, read_token_file(born.token_file))
        self._slice = min(SLICE_S, born.heartbeat_timeout)
        self._seen = 0  # revision of the newest World document
        self._asked = 0  # revision of the newest SaveRequest
        self._notices = Notices(born.worker, born.leave_notice)
        self._heart = Heartbeat(
            born.worker,
            self._client.clone(),
            progress,
            timeout=born.heartbeat_timeout,
            on_notice=on_notice,
            tend=tend,
            watch=StallWatch(born.worker, progress, born.hang_timeout),
            notices=self._notices,
        )

    def start(self) -> None:
        """Begin to beat. Raises `RendezvousError` where the rendezvous cannot be used."""
        self._heart.start()

    def stop(self) -> None:
        """Stop beating, say that we do so on purpose, and close the connections; soon."""
        self._heart.stop()
        self._notices.signals.let_go()
        # A lease that ran out would be taken for a hang: the process may take long to end.
        with contextlib.suppress(RendezvousError):
            worker = self.born.worker
            signs = (
                Delete(contract.worker_lease(worker)),
                Delete(contract.worker_half_lease(worker)),
            )
            self._client.batch(*signs, deadline=GOODBYE_S)
        self._client.close()

    def listen(self) -> None:
        """From now on heed signals that announce this worker's end; for the main thread."""
        self._notices.listen()

    def forget_in_child(self) -> None:
        """Give the signals back in a forked child, whose end is no affair of the job's."""
        self._notices.signals.let_go()

    def store(self, round_id: int) -> HTTPStore:
        """A torch store for the keys of one round."""
        return HTTPStore(self._client, contract.round_prefix(round_id))

    def report_ready(self, left: int, state_version: StateVersion, reason: str) -> None:
        """Report for the next round, having left round `left`; trying on while nobody answers."""
        event = WorkerReady(
            worker=self.born.worker,
            round=left,
            version=state_version.version,
            clean=state_version.clean,
            reason=reason[:MAX_REASON_CHARS],
        )
        silent = False
        while True:
            try:
                if left:
                    self._heart.tell_first_step(self._client, left)
                self._client.post_json(EVENTS_PATH, _encode_event(event))
            except UnreachableError as error:
                if not silent:
                    say(f"cannot report for the next round, trying on ({error})")
                silent = True
            else:
                return

    def await_world(self, left: int, last: FinalCheckpoint | None = None) -> tuple[World, Member]:
        """The first world newer than round `left` in which we take part, and our entry in it.

        Meanwhile `last` may be asked to put the state on disk.
        """
        silent = False
        while True:
            try:
                found = self._wait_between_rounds(last)
            except UnreachableError as error:
                if not silent:
                    say(f"waiting for the next round, and the driver does not answer ({error})")
                silent = True
                continue
            if silent:
                say("the driver answers again; waiting for the next round")
            silent = False
            request = found.get(contract.JOB_SAVE)
            if request is not None and last is not None:
                self._asked = request.revision
                last.asked(decode(SaveRequest, request.value))
            entry = found.get(contract.JOB_WORLD)
            if entry is None:
                continue
            self._seen = entry.revision
            world = decode_world(entry.value)
            me = world.member(self.born.worker)
            if me is not None and world.round > left:
                return world, me

    def _wait_between_rounds(self, last: FinalCheckpoint | None) -> dict[str, Entry]:
        """What is new of the documents we wait for; soon, while we have news ourselves."""
        keys, wait = {contract.JOB_WORLD: self._seen}, self._slice
        if last is not None:
            keys[contract.JOB_SAVE] = self._asked
            news = last.news()
            if news is not None:
                self._client.post_json(EVENTS_PATH, _encode_event(news))
                last.told()
            elif last.pending:
                wait = min(wait, LOOK_S)
        return self._client.watch(keys, wait)
