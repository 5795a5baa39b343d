"""The folder of one run: `<state-dir>/<run-id>/`, readable by its owner alone.

    events.jsonl    the event log, kept
    journal.db      every event of the newest job of this name (0600), kept (docs/journal.md)
    token           the job's secret (0600), removed when the job is over
    endpoint.json   the driver's URL, removed when the job is over

The driver creates it before it starts anything: if the folder cannot be written, the command fails
at once and no training is lost. The files are only read to find a live run of the same name.
"""

import contextlib
import datetime
import errno
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil

from elastic_driver.errors import ClusterError, UsageError

EVENTS_FILE = "events.jsonl"  # in the run's folder
JOURNAL_FILE = "journal.db"
MAX_RUN_ID_CHARS = 64  # it is part of file names and of workers' environments
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


class Endpoint(msgspec.Struct, frozen=True):
    """The content of `endpoint.json`: the URL of a run's driver."""

    run_id: str
    url: str
    pid: int
    started: float  # unix seconds


def read_endpoint(folder: Path) -> Endpoint | None:
    """Return the address of the run in this folder; None if it has no usable one."""
    try:
        content = (folder / "endpoint.json").read_bytes()
        endpoint = msgspec.json.decode(content, type=Endpoint)
        parts = urlsplit(endpoint.url)
        return endpoint if parts.scheme == "http" and parts.hostname and parts.port else None
    except (OSError, ValueError):  # msgspec's DecodeError is a ValueError
        return None


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """Return `$XDG_STATE_HOME/elastic-driver`, or `~/.local/state/elastic-driver` (XDG)."""
    state_home = environ.get("XDG_STATE_HOME", "")
    # The specification: a relative path in this variable is invalid and to be ignored.
    if state_home.startswith("/"):
        return Path(state_home) / "elastic-driver"
    return Path("~/.local/state").expanduser() / "elastic-driver"


def new_run_id(now: float) -> str:
    """Return a unique name that sorts by start (`now`: unix seconds; shown in local time)."""
    started = datetime.datetime.fromtimestamp(now).strftime("%Y%m%d-%H%M%S")
    return f"{started}-{secrets.token_hex(2)}"


class RunDir:
    """The files of a run; `create()` makes the folder, `close()` removes token and endpoint."""

    def __init__(self, state_dir: Path, run_id: str) -> None:
        """Only check the name; raises UsageError if it is not usable for a folder."""
        if len(run_id) > MAX_RUN_ID_CHARS or not _RUN_ID.match(run_id):
            problem = f"run id {run_id[:80]!r} is not usable as a folder's name"
            hint = "take letters, digits, '.', '_' and '-', a letter or digit first"
            raise UsageError(f"{problem}; {hint}, at most {MAX_RUN_ID_CHARS}")
        self.run_id = run_id
        self.path = state_dir.expanduser().absolute() / run_id
        self.events_file = self.path / EVENTS_FILE
        self.journal_file = self.path / JOURNAL_FILE
        self.token_file = self.path / "token"
        self.endpoint_file = self.path / "endpoint.json"
        self._draft = self.path / "endpoint.new"

    def create(self) -> None:
        """Make the folder (0700) and check that it can be written.

        Raises UsageError (64) if the folder cannot be used or belongs to a running driver, and
        ClusterError (75) if the disk is full: the same command may succeed later.
        """
        with self._explained():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)  # an existing folder may be readable by others
            self._refuse_a_second_driver()
            self.token_file.unlink(missing_ok=True)
            probe = self.path / ".probe"
            try:
                # On a full disk an empty file can often still be made, but no block.
                probe.write_bytes(b"\0" * 4096)
            finally:
                with contextlib.suppress(OSError):
                    probe.unlink(missing_ok=True)

    def write_endpoint(self, url: str, now: float) -> None:
        """Write the driver's URL, atomically. Raises as `create` does."""
        endpoint = Endpoint(run_id=self.run_id, url=url, pid=os.getpid(), started=now)
        with self._explained():
            self._draft.write_bytes(msgspec.json.encode(endpoint) + b"\n")
            self._draft.replace(self.endpoint_file)

    def close(self) -> None:
        """Remove token and endpoint; never raises, the job is over."""
        for path in (self.token_file, self.endpoint_file, self._draft):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _refuse_a_second_driver(self) -> None:
        """Raise UsageError if a live driver uses the folder: it needs its own token file."""
        try:
            endpoint = msgspec.json.decode(self.endpoint_file.read_bytes(), type=Endpoint)
        except (FileNotFoundError, msgspec.DecodeError):
            return
        if endpoint.pid != os.getpid() and psutil.pid_exists(endpoint.pid):
            used = f"run id {self.run_id} is in use by process {endpoint.pid} ({endpoint.url})"
            raise UsageError(f"{used}; give another --run-id, or stop that job first")
        self.endpoint_file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an OSError into a message that says what to try."""
        try:
            yield
        except OSError as error:
            what = f"cannot keep the run's files in {self.path}: {error.strerror or error}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ClusterError(f"{what}; make room, or choose another --state-dir") from error
            raise UsageError(f"{what}; choose another folder with --state-dir") from error
