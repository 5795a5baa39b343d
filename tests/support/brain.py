"""The Brain's side of its protocol, played by a test: a real server that grants what it says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from elastic_driver.brain.documents import Grant, JobOver, JobReport, grant_key
from rendezvous.auth import Caller, job_token, jobs_token, write_token_file
from rendezvous.server import RendezvousServer
from rendezvous.wire import EVENTS_PATH, Set
from tests.support.job import eventually

TOKEN = "the Brain's own"


class PlayedBrain:
    """A server that keeps the reports of all jobs, and grants what it is told to."""

    def __init__(self, port: int = 0, first_revision: int = 0) -> None:
        self.reports: list[tuple[str, JobReport]] = []
        self.over: list[tuple[str, JobOver]] = []
        self.silent: list[str] = []  # keys of leases that have ended
        self.server = RendezvousServer(
            port=port,
            token=TOKEN,
            first_revision=first_revision,
            posts={EVENTS_PATH: self._take},
            on_lease_expired=self.silent.append,
        ).start()
        self.url = self.server.url

    def _take(
        self, caller: Caller, _path: str, body: bytes, answer: Callable[[int, bytes], None]
    ) -> Callable[[], object]:
        said = msgspec.json.decode(body, type=JobReport | JobOver)
        if isinstance(said, JobReport):
            self.reports.append((caller.subject, said))
        else:
            self.over.append((caller.subject, said))
        answer(202, b"{}")
        return lambda: None

    def grant(self, job: str, number: int, reason: str = "a test says so", **hosts: int) -> None:
        """Grant slots; `__` in a host's name stands for a dot."""
        named = {host.replace("__", "."): slots for host, slots in hosts.items()}
        value = msgspec.json.encode(Grant(number=number, hosts=named, reason=reason))
        self.server.apply([Set(grant_key(job), value)])

    def until(
        self, look: Callable[[JobReport], object], what: str, within: float = 30
    ) -> JobReport:
        """Wait for a newest report like this; return it."""

        def newest() -> JobReport | None:
            found = self.reports[-1][1] if self.reports else None
            return found if found is not None and look(found) else None

        return eventually(newest, within=within, what=what, context=lambda: str(self.reports[-3:]))


@contextlib.contextmanager
def played_brain(port: int = 0, first_revision: int = 0) -> Iterator[PlayedBrain]:
    brain = PlayedBrain(port, first_revision)
    try:
        yield brain
    finally:
        brain.server.stop()


def jobs_token_file(folder: Path) -> Path:
    """The file with the token of all jobs of a played Brain."""
    return write_token_file(folder / "job.token", jobs_token(TOKEN))


def token_of(job: str) -> str:
    return job_token(TOKEN, job)
