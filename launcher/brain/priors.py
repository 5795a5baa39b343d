"""What similar jobs say about the jobs of a Brain, looked up in the statistics database.

A thread asks the database, so no plan waits for it: what it has not found yet is left out, and the
next plan has it.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from elastic_driver.brain.algorithm import View
from elastic_driver.brain.documents import Kind
from elastic_driver.brain.priors import JOBS, Prior, prior_of, with_prior

AGAIN_S = 5.0  # after a look that failed


class Priors:
    """Looks up similar jobs; what fails is told once, and tried again."""

    def __init__(self, database: Any, say: Callable[[str], None]) -> None:
        """Start nothing. `say` is called in this object's thread."""
        self._database, self._say = database, say
        self._asked: dict[str, Kind] = {}  # of the caller's thread
        self._found: dict[str, Prior | None] = {}  # each entry is replaced as a whole
        self._wanted: queue.SimpleQueue[tuple[str, Kind] | None] = queue.SimpleQueue()
        self._stopping, self._failing = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="priors", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread, and wait for it up to `timeout` seconds."""
        self._stopping.set()
        self._wanted.put(None)
        self._thread.join(timeout)

    def ask(self, job: str, kind: Kind) -> None:
        """Have similar jobs looked for, unless this job was of this kind the last time."""
        if self._asked.get(job) != kind:
            self._asked[job] = kind
            self._wanted.put((job, kind))

    def forget(self, job: str) -> None:
        """Forget a job that is over."""
        self._asked.pop(job, None)
        self._found.pop(job, None)

    def into(self, view: View) -> View:
        """Return a view in which each job has what similar jobs say, where it knows less."""
        jobs = tuple(with_prior(job, self._found.get(job.name)) for job in view.jobs)
        return replace(view, jobs=jobs)

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            while not self._look(*wanted) and not self._stopping.wait(AGAIN_S):
                pass
        self._database.close()

    def _look(self, job: str, kind: Kind) -> bool:
        """Look for similar jobs; return whether that is done."""
        from elastic_driver.brain.store.failures import described  # noqa: PLC0415 - the extra

        try:
            found = self._found[job] = prior_of(self._database.similar(kind, JOBS))
        except Exception as error:  # of any kind of database: it may come back
            if not self._failing:
                self._failing = True
                why = described(error)
                self._say(f"--stats-db cannot be read ({why}); no job is compared with others")
            return False
        self._failing = False
        if found is not None:
            self._say(f"{job}: finished jobs like this one: {found.jobs}")
        return True
