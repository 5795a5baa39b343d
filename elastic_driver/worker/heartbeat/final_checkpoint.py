"""Puts a state on disk because all who hold it are to go, while this worker waits for a world.

`run` makes one for its state, `link` tells it what the driver asks and passes on its news. The
state is written in the background by those who were asked, each its share; the first of them
reports how it went. Called by the training thread, which trains nothing meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from elastic_driver.core.documents import SaveRequest
from elastic_driver.core.events import WorkerSaved

MAX_PROBLEM_CHARS = 1000


class CheckpointableState(Protocol):
    """A state, as far as it is of interest here."""

    def begin_final_checkpoint(self, request: SaveRequest, rank: int) -> Path | None:
        """Begin to write a share; the checkpoint's folder, None where the state has none.

        Raises where it cannot be written, with a reason for people.
        """

    def final_checkpoint_problem(self, folder: Path) -> str | None:
        """ "" once the checkpoint is complete, why it will not be, None while it is written."""


class FinalCheckpoint:
    """One worker's part in the last checkpoint."""

    def __init__(self, worker: str, state: CheckpointableState) -> None:
        self._worker, self._state = worker, state
        self._request: SaveRequest | None = None  # while it is being written, and ours to report
        self._folder: Path | None = None
        self._news: WorkerSaved | None = None

    @property
    def pending(self) -> bool:
        """Whether there will be news soon."""
        return self._request is not None

    def asked(self, request: SaveRequest) -> None:
        """The driver asks; never raises: trouble becomes news."""
        self._request = self._news = None
        if self._worker not in request.members:
            return
        rank = request.members.index(self._worker)
        try:
            folder = self._state.begin_final_checkpoint(request, rank)
        except Exception as error:  # whatever it is, the others are not to wait for this worker
            self._report(request, problem=str(error) or type(error).__name__)
            return
        if rank == 0 and folder is None:
            self._report(request)
        elif rank == 0:
            self._request, self._folder = request, folder

    def news(self) -> WorkerSaved | None:
        """What the driver has to hear; the same until it was `told`."""
        if self._news is None and self._request is not None and self._folder is not None:
            problem = self._state.final_checkpoint_problem(self._folder)
            if problem is not None:
                folder = "" if problem else str(self._folder)
                self._report(self._request, folder=folder, problem=problem)
        return self._news

    def told(self) -> None:
        """The driver has heard the news."""
        self._news = None

    def _report(self, request: SaveRequest, *, folder: str = "", problem: str = "") -> None:
        self._request = None
        problem = problem[:MAX_PROBLEM_CHARS]
        self._news = WorkerSaved(self._worker, request.number, folder, problem)
