"""A Brain for tests: a real process, or its side of the protocol played by the test itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from elastic_driver.brain.grants import Grant, JobOver, JobReport, grant_key
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.runtime.api import job_access
from elastic_driver.token_roles import job_token, jobs_token
from rendezvous.auth import Caller, write_token_file
from rendezvous.server import Callbacks, RendezvousServer, Succession
from rendezvous.wire import Set
from tests.support.cluster import Cluster
from tests.support.job import ROOT, eventually

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
            access=job_access(),
            succession=Succession(first_revision=first_revision),
            posts={EVENTS_PATH: self._take},
            callbacks=Callbacks(on_lease_expired=self.silent.append),
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


class RunningBrain:
    """A process of `elasticbrain serve`, which a test may kill, stop and start again."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.folder, self._args, self._port = folder / "brain", args, 0
        self._out = folder / "brain.out"
        self.process = self._begin()

    def _begin(self) -> subprocess.Popen[bytes]:
        where = "--state-dir", str(self.folder), "--bind", f"127.0.0.1:{self._port}"
        with self._out.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "launcher.brain.command", "serve", *where, *self._args],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
        self.process = process
        self.url = eventually(self._find_url, within=30, what="the Brain serves", context=self.said)
        self._port = int(self.url.rpartition(":")[2])
        return process

    def _find_url(self) -> str | None:
        assert self.process.poll() is None, self.said()
        with contextlib.suppress(OSError):
            pid, url = (self.folder / "endpoint").read_text().split()
            return url if int(pid) == self.process.pid else None
        return None

    def said(self) -> str:
        """What it has written."""
        return self._out.read_text(errors="replace")

    @property
    def for_jobs(self) -> tuple[str, ...]:
        """The options of a job of this Brain."""
        return "--brain", self.url, "--brain-token-file", str(self.folder / "job.token")

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(10)

    def start_again(self) -> None:
        """Start another one with the same folder and address."""
        self._begin()

    def status(self) -> dict[str, Any]:
        """The status, as the command shows it."""
        words = "status", "--json", "--state-dir", str(self.folder)
        found = subprocess.run(
            [sys.executable, "-m", "launcher.brain.command", *words],
            capture_output=True,
            cwd=ROOT,
            timeout=30,
            check=True,
        )
        document: dict[str, Any] = json.loads(found.stdout)
        return document

    def stop(self) -> int:
        """End it as Ctrl-C does; return its exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(20)


@contextlib.contextmanager
def elasticbrain(folder: Path, *args: str) -> Iterator[RunningBrain]:
    """Run `elasticbrain serve` with these options, in a folder of its own."""
    brain = RunningBrain(folder, *args)
    try:
        yield brain
    finally:
        with contextlib.suppress(ProcessLookupError):
            brain.process.send_signal(signal.SIGCONT)
        brain.kill()


@contextlib.contextmanager
def elasticbrain_on(cluster: Cluster, *args: str) -> Iterator[tuple[str, ...]]:
    """Run `elasticbrain serve` on the head of a cluster; yield the options of its jobs there."""
    folder, out = cluster.folder / "brain", cluster.folder / "brain.out"
    argv = [sys.executable, "-m", "launcher.brain.command", "serve", *args]
    argv += ["--state-dir", str(folder), "--bind", "127.0.0.1:0"]
    environ = {"PYTHONPATH": str(ROOT), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    process = cluster.start("head", argv, out=out, err=out, env=environ)

    def url() -> str | None:
        assert process.poll() is None, out.read_text()
        with contextlib.suppress(OSError, ValueError):
            return (folder / "endpoint").read_text().split()[1]
        return None

    try:
        found = eventually(url, within=60, what="the Brain serves", context=out.read_text)
        yield "--brain", found, "--brain-token-file", str(folder / "job.token")
    finally:
        process.kill()
        process.wait(10)
