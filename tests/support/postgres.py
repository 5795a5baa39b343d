"""A real PostgreSQL: a server of its own, in its own folder, behind a Unix socket."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psutil

from tests.support.job import eventually
from tests.support.processes import signal_each

SERVERS = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
PASSWORD = "secret"
FAST = ("-c", "fsync=off", "-c", "listen_addresses=")


def why_not() -> str | None:
    """Why no PostgreSQL can be started here; None where it can."""
    if not SERVERS:
        return "PostgreSQL is not installed (postgresql)"
    return None


class Postgres:
    """One server; `stop` and `start` may be called again and again."""

    def __init__(self, folder: Path, *options: str, port: int = 5432) -> None:
        self.folder, self._bin = folder, SERVERS[-1].parent
        self._port, self._options = str(port), options
        self._process: subprocess.Popen[bytes] | None = None
        self._user: dict[str, int] = {}
        if os.geteuid() == 0:  # it refuses to run as root
            nobody = pwd.getpwnam("nobody")
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid}
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)

    def create(self) -> None:
        """Make the data folder; the user `elastic` has the password `PASSWORD`."""
        password = self.folder / "password"
        password.write_text(f"{PASSWORD}\n")
        password.chmod(0o644)
        words = ("-D", self.folder / "data", "-U", "elastic", "-A", "scram-sha-256")
        more = ("--pwfile", password, "--no-sync", "-E", "UTF8", "--locale", "C")
        self._run(self._bin / "initdb", *words, *more)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        command: list[str | Path] = [self._bin / "postgres", "-D", self.folder / "data", *FAST]
        command += ["-k", self.folder, "-p", self._port, *self._options]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, **self._user
            )
        ready = [self._bin / "pg_isready", "-q", "-h", str(self.folder), "-p", self._port]
        eventually(
            lambda: subprocess.run(ready, check=False, cwd=self.folder).returncode == 0,
            within=30,
            what="PostgreSQL answers",
            context=(self.folder / "log").read_text,
        )

    def stop(self) -> None:
        """End the server, and its connections, at once."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGQUIT)
            process.wait(30)

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """Halt all processes of the server for some time: it keeps its connections, and is mute."""
        assert self._process is not None
        server = psutil.Process(self._process.pid)
        server.suspend()  # first: it starts no more processes
        halted = [server, *server.children(recursive=True)]
        try:
            signal_each(halted[1:], signal.SIGSTOP)
            yield
        finally:
            signal_each(halted, signal.SIGCONT)

    def url(self, database: str = "postgres", password: str = PASSWORD) -> str:
        """The URL of a database, as `--stats-db` takes it."""
        host = quote(str(self.folder), safe="")
        return f"postgresql://elastic:{password}@/{database}?host={host}"

    def _run(self, *command: str | Path) -> None:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=self.folder, **self._user
        )
        assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """Return a running server; its folder has a short name, as sockets need, and is removed."""
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    server = Postgres(folder)
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
