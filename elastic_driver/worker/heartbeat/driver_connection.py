"""A worker's connection to its driver: READY, the next world, and the heartbeat.

The training thread uses it; the heartbeat thread has a connection of its own. Waits are cut into
slices. An outage of the driver is logged once and then waited out: only a refusal ends the wait.
Times are seconds.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from elastic_driver import contract
from elastic_driver.core.documents import Member, Notice, SaveRequest, World, decode, decode_world
from elastic_driver.core.events import WorkerReady, WorkerSaved
from elastic_driver.core.state_version import StateVersion
from elastic_driver.worker.context import WorkerContext
from elastic_driver.worker.heartbeat.heartbeat import Heartbeat
from elastic_driver.worker.heartbeat.progress import TrainingProgress
from elastic_driver.worker.worker_log import say
from rendezvous.auth import read_token_file
from rendezvous.client import RendezvousClient
from rendezvous.errors import RendezvousError, UnreachableError
from rendezvous.torch_store import HTTPStore
from rendezvous.wire import EVENTS_PATH, Delete

SLICE_S = 10.0  # the longest request that waits for a world
CHECKPOINT_POLL_S = 0.05  # between two checks of a final checkpoint that is being written
MAX_REASON_CHARS = 1000
GOODBYE_S = 1.0  # the longest wait for the driver when the heartbeat ends


class CheckpointableState(Protocol):
    """The part of `State` that writes a final checkpoint."""

    def begin_final_checkpoint(self, request: SaveRequest, rank: int) -> Path | None:
        """Begin to write one share; return the checkpoint's folder, None if the state has none.

        Raises an exception that says why it cannot be written.
        """

    def final_checkpoint_problem(self, folder: Path) -> str | None:
        """Return "" once the checkpoint is complete, why it failed, or None while it is written."""


class FinalCheckpointTask:
    """One worker's part in the final checkpoint of a job whose workers all have to leave.

    The driver requests it while this worker waits for a world. The state writes its shares in the
    background; the first of the requested workers reports the result. All calls come from the
    training thread, which trains nothing meanwhile.
    """

    def __init__(self, worker: str, state: CheckpointableState) -> None:
        self._worker, self._state = worker, state
        self._pending: tuple[SaveRequest, Path] | None = None  # being written; this worker reports
        self._result: WorkerSaved | None = None

    def begin(self, request: SaveRequest) -> None:
        """Carry out the driver's request; a failure becomes the result and is not raised."""
        self._pending = self._result = None
        if self._worker not in request.members:
            return
        folder, problem, rank = None, "", request.members.index(self._worker)
        try:
            folder = self._state.begin_final_checkpoint(request, rank)
        except Exception as error:  # of any kind: the others must not wait for this worker
            problem = (str(error) or type(error).__name__)[:MAX_REASON_CHARS]
        if rank == 0 and folder is not None:
            self._pending = request, folder
        elif rank == 0 or problem:
            self._result = WorkerSaved(self._worker, request.number, "", problem)

    def report(self, post: Callable[[WorkerSaved], object]) -> bool:
        """Post the result once it is known; return whether it is still pending.

        The result is kept for the next call where `post` raises.
        """
        if self._pending is not None:
            request, folder = self._pending
            problem = self._state.final_checkpoint_problem(folder)
            if problem is not None:
                self._pending, saved_in = None, "" if problem else str(folder)
                problem = problem[:MAX_REASON_CHARS]
                self._result = WorkerSaved(self._worker, request.number, saved_in, problem)
        if self._result is not None:
            post(self._result)
            self._result = None
        return self._pending is not None


class DriverConnection:
    """The connections of one worker to its driver; `heartbeat.start` opens the first one.

    Raises `TokenError` where the token file cannot be used.
    """

    def __init__(
        self,
        born: WorkerContext,
        progress: TrainingProgress,
        on_notice: Callable[[Notice], None],
        before_heartbeat: Callable[[], float | None],
    ) -> None:
        self.born = born
        self.port = urlsplit(born.endpoint).port
        self._client = RendezvousClient(born.endpoint, read_token_file(born.token_file))
        self._slice = min(SLICE_S, born.heartbeat_timeout)
        self._world_seen = 0  # revision of the newest World
        self._request_seen = 0  # revision of the newest SaveRequest
        client = self._client.clone()
        self.heartbeat = Heartbeat(born, client, progress, on_notice, before_heartbeat)

    def stop(self) -> None:
        """Stop the heartbeat, delete the leases and close the connections, within seconds."""
        self.heartbeat.stop()
        # A lease that expired would count as a hang, and the process may take long to end.
        with contextlib.suppress(RendezvousError):
            worker = self.born.worker
            leases = contract.worker_lease(worker), contract.worker_half_lease(worker)
            self._client.batch(*map(Delete, leases), deadline=GOODBYE_S)
        self._client.close()

    def store(self, round_id: int) -> HTTPStore:
        """Return a torch store for the keys of one round."""
        return HTTPStore(self._client, contract.round_prefix(round_id))

    def report_ready(self, left: int, state_version: StateVersion, reason: str) -> None:
        """Report READY for the next round after round `left`; retry while the driver is away."""
        steps, clean = state_version.steps, state_version.clean
        event = WorkerReady(self.born.worker, left, steps, clean, reason[:MAX_REASON_CHARS])
        silent = False
        while True:
            try:
                if left:
                    self.heartbeat.report_first_step(self._client, left)
                self._post(event)
                return
            except UnreachableError as error:
                if not silent:
                    say(f"cannot report for the next round, trying on ({error})")
                silent = True

    def await_world(
        self, left: int, checkpoint: FinalCheckpointTask | None = None
    ) -> tuple[World, Member]:
        """Wait for the first world after round `left` with this worker in it; return both.

        `checkpoint` carries out a request for the final checkpoint that comes meanwhile.
        """
        silent = False
        while True:
            keys, wait = {contract.JOB_WORLD: self._world_seen}, self._slice
            try:
                if checkpoint is not None:
                    keys[contract.JOB_SAVE] = self._request_seen
                    if checkpoint.report(self._post):  # it is being written
                        wait = min(wait, CHECKPOINT_POLL_S)
                found = self._client.watch(keys, wait)
            except UnreachableError as error:
                if not silent:
                    say(f"waiting for the next round, and the driver does not answer ({error})")
                silent = True
                continue
            if silent:
                say("the driver answers again; waiting for the next round")
            silent = False
            request = found.get(contract.JOB_SAVE)
            if request is not None and checkpoint is not None:
                self._request_seen = request.revision
                checkpoint.begin(decode(SaveRequest, request.value))
            if (entry := found.get(contract.JOB_WORLD)) is None:
                continue
            self._world_seen = entry.revision
            world = decode_world(entry.value)
            me = world.member(self.born.worker)
            if me is not None and world.round > left:
                return world, me

    def _post(self, event: Any) -> None:
        self._client.post_json(EVENTS_PATH, msgspec.json.encode(event))
