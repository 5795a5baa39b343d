"""One worker's part in the final checkpoint of a job whose workers all have to leave."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_driver.words.orders import SaveRequest
from elastic_driver.words.wire_events import WorkerSaved

MAX_PROBLEM_CHARS = 1000


class FinalCheckpointTask:
    """Writes this worker's part of the final checkpoint, and reports the result.

    The driver requests it while this worker waits for a world. The state writes its shares in the
    background; the first of the requested workers reports the result. All calls come from the
    training thread, which trains nothing meanwhile. `state`: a `State`, whose module imports this.
    """

    def __init__(self, worker: str, state: Any) -> None:
        self._worker, self._state = worker, state
        self._asked: tuple[int, tuple[str, ...]] | None = None  # number and members of the request
        self._folder: Path | None = None  # is being written; set where this worker reports
        self._unsent: WorkerSaved | None = None
        self._sent: WorkerSaved | None = None

    def begin(self, request: SaveRequest) -> None:
        """Carry out the driver's request; a failure becomes the result and is not raised.

        If a new driver repeats a request, its result is reported again, once it is known.
        """
        asked = request.number, request.members
        if asked == self._asked:
            self._unsent = self._unsent or self._sent
            return
        self._asked, self._folder, self._unsent, self._sent = asked, None, None, None
        if self._worker not in request.members:
            return
        rank = request.members.index(self._worker)
        try:
            folder = self._state.begin_final_checkpoint(request, rank)
        except Exception as error:  # of any kind: the others must not wait for this worker
            self._conclude(str(error) or type(error).__name__)
        else:
            if rank == 0:
                self._folder = folder
                if folder is None:
                    self._conclude("")

    def report(self, post: Callable[[WorkerSaved], object]) -> bool:
        """Post the result once it is known; return whether it is still pending.

        The result is kept for the next call where `post` raises.
        """
        if self._folder is not None:
            problem = self._state.final_checkpoint_problem(self._folder)
            if problem is not None:
                self._conclude(problem)
        if self._unsent is not None:
            post(self._unsent)
            self._sent, self._unsent = self._unsent, None
        return self._folder is not None

    def _conclude(self, problem: str) -> None:
        number, _ = self._asked or (0, ())
        folder = "" if problem or self._folder is None else str(self._folder)
        problem = problem[:MAX_PROBLEM_CHARS]
        self._unsent = WorkerSaved(self._worker, number, folder, problem)
        self._folder = None
