"""Writes the final checkpoint of a job whose workers all have to leave.

The driver requests it while this worker waits for a world. The state writes its shares in the
background; the first of the requested workers reports the result. All calls come from the training
thread, which trains nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from elastic_driver.core.documents import SaveRequest
from elastic_driver.core.events import WorkerSaved

MAX_PROBLEM_CHARS = 1000


class CheckpointableState(Protocol):
    """The part of `State` that this module calls."""

    def begin_final_checkpoint(self, request: SaveRequest, rank: int) -> Path | None:
        """Begin to write one share; return the checkpoint's folder, None if the state has none.

        Raises an exception that says why it cannot be written.
        """

    def final_checkpoint_problem(self, folder: Path) -> str | None:
        """Return "" once the checkpoint is complete, why it failed, or None while it is written."""


class FinalCheckpointTask:
    """One worker's part in the final checkpoint."""

    def __init__(self, worker: str, state: CheckpointableState) -> None:
        self._worker, self._state = worker, state
        self._pending: tuple[SaveRequest, Path] | None = None  # being written; this worker reports
        self._result: WorkerSaved | None = None

    def begin(self, request: SaveRequest) -> None:
        """Carry out the driver's request; a failure becomes the result and is not raised."""
        self._pending = self._result = None
        if self._worker not in request.members:
            return
        rank = request.members.index(self._worker)
        try:
            folder = self._state.begin_final_checkpoint(request, rank)
        except Exception as error:  # of any kind: the others must not wait for this worker
            self._finish(request, problem=str(error) or type(error).__name__)
            return
        if rank == 0 and folder is None:
            self._finish(request)
        elif rank == 0 and folder is not None:
            self._pending = request, folder

    def report(self, post: Callable[[WorkerSaved], object]) -> bool:
        """Post the result once it is known; return whether it is still pending.

        The result is kept for the next call where `post` raises.
        """
        if self._pending is not None:
            request, folder = self._pending
            problem = self._state.final_checkpoint_problem(folder)
            if problem is not None:
                self._finish(request, folder="" if problem else str(folder), problem=problem)
        if self._result is not None:
            post(self._result)
            self._result = None
        return self._pending is not None

    def _finish(self, request: SaveRequest, *, folder: str = "", problem: str = "") -> None:
        self._pending = None
        problem = problem[:MAX_PROBLEM_CHARS]
        self._result = WorkerSaved(self._worker, request.number, folder, problem)
