"""The folder of one run: `<state-dir>/<run-id>/`, readable by its owner alone.

    events.jsonl    the event log, kept
    journal.db      every event of the newest job of this name (0600), kept (docs/journal.md)
    statistics.db   how fast the jobs of this name trained (0600), kept (docs/statistics.md)
    output/         the newest output of its workers (0600), kept (docs/operations.md)
    token           the driver's token (0600), removed when the job is over
    token-operator  the operator's and
    token-reader    the reader's token (0600), derived from it, removed with it
    tls-cert.pem    the server's certificate and
    tls-key.pem     its key (0600), made if it speaks TLS, removed when the job is over
    endpoint.json   the driver's URL, removed when the job is over
    lock            the driver that may use the folder, removed when the job is over

The driver creates it before it starts anything: if the folder cannot be written, the command fails
at once and no training is lost. Only the driver removes the lock: a folder with a lock that no
process holds, and a journal, is that of a job whose driver has died. Another one may go on with it.
"""

import contextlib
import datetime
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from elastic_driver.errors import ClusterError, ElasticError, UsageError
from elastic_driver.runtime.run_lock import RunLock
from rendezvous.auth import operator_token, reader_token, write_token_file
from rendezvous.own_files import own_folder, read_own
from rendezvous.tls import certificate_in
from rendezvous.wire import UNREADABLE

EVENTS_FILE = "events.jsonl"  # in the run's folder
JOURNAL_FILE = "journal.db"
STATISTICS_FILE = "statistics.db"
OUTPUT_FOLDER = "output"
MAX_RUN_ID_CHARS = 64  # it is part of file names and of workers' environments
_MOST_ENDPOINT = 64 * 1024  # bytes of `endpoint.json`
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def is_run_id(text: str) -> bool:
    """Return whether a job may have this name."""
    return len(text) <= MAX_RUN_ID_CHARS and _RUN_ID.match(text) is not None


class Endpoint(msgspec.Struct, frozen=True):
    """The content of `endpoint.json`: the URL of a run's driver."""

    run_id: str
    url: str
    pid: int
    started: float  # unix seconds


def read_endpoint(folder: Path) -> Endpoint | None:
    """Return the address of the run in this folder; None if it has no usable one."""
    try:
        content = read_own(folder / "endpoint.json", _MOST_ENDPOINT)
        endpoint = msgspec.json.decode(content, type=Endpoint)
        parts = urlsplit(endpoint.url)
        ours = parts.scheme in ("http", "https") and parts.hostname and parts.port
        return endpoint if ours else None
    except (OSError, *UNREADABLE):
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
    """The files of a run; `create()` makes the folder, `close()` removes what is the driver's."""

    def __init__(self, state_dir: Path, run_id: str) -> None:
        """Only check the name; raises UsageError if it is not usable for a folder."""
        if not is_run_id(run_id):
            problem = f"run id {run_id[:80]!r} is not usable as a folder's name"
            hint = "take letters, digits, '.', '_' and '-', a letter or digit first"
            raise UsageError(f"{problem}; {hint}, at most {MAX_RUN_ID_CHARS}")
        self.run_id = run_id
        self.path = state_dir.expanduser().absolute() / run_id
        self.events_file = self.path / EVENTS_FILE
        self.journal_file = self.path / JOURNAL_FILE
        self.statistics_file = self.path / STATISTICS_FILE
        self.output_folder = self.path / OUTPUT_FOLDER
        self.token_file = self.path / "token"
        self.certificate = certificate_in(self.path)
        self.endpoint_file = self.path / "endpoint.json"
        self._draft = self.path / "endpoint.new"
        self.lock = RunLock(self.path / "lock", run_id)

    @property
    def unfinished(self) -> bool:
        """Return whether the folder is that of a job that has begun and has not ended."""
        return self.lock.path.exists() and self.journal_file.exists()

    def refuse_strangers(self) -> None:
        """Raise UsageError for a folder that is there and is not only ours, before it is read."""
        if os.path.lexists(self.path):
            with self._explained():
                own_folder(self.path)

    def take(self) -> None:
        """Make the folder (0700) and take its lock; `close` or `leave` gives it back. Idempotent.

        Raises UsageError (64) if the folder cannot be used (others may write to it, too; see
        `rendezvous.own_files`) or a driver uses it, and ClusterError
        (75) if the same command may succeed later: the disk is full, or a driver on another machine
        may have died a moment ago.
        """
        with self._explained():
            own_folder(self.path)
            endpoint = read_endpoint(self.path)
            self.lock.acquire("" if endpoint is None else endpoint.url)

    def create(self, *, anew: bool = True) -> None:
        """Take the folder and check that it can be written; raises as `take` does.

        `anew`: remove what an unfinished job has left there, except for its event log.
        """
        self.take()
        with self._explained():
            old = (self.journal_file, self.endpoint_file, *self._secret_files())
            for path in old if anew else ():
                path.unlink(missing_ok=True)
            if anew:
                self.lock.note_begun(began=False)
                shutil.rmtree(self.output_folder, ignore_errors=True)
            probe = self.path / ".probe"
            try:
                # On a full disk an empty file can often still be made, but no block.
                probe.write_bytes(b"\0" * 4096)
            finally:
                with contextlib.suppress(OSError):
                    probe.unlink(missing_ok=True)

    def job_begins(self) -> None:
        """Note that agents of the job may live from now on. Raises as `create` does."""
        with self._explained():
            self.lock.note_begun(began=True)

    def write_endpoint(self, url: str, now: float) -> None:
        """Write the driver's URL, atomically. Raises as `create` does."""
        endpoint = Endpoint(run_id=self.run_id, url=url, pid=os.getpid(), started=now)
        with self._explained():
            self._draft.write_bytes(msgspec.json.encode(endpoint) + b"\n")
            self._draft.replace(self.endpoint_file)

    def close(self) -> None:
        """Remove tokens, certificate, endpoint and lock; never raises, the job is over."""
        ours = (self.endpoint_file, self._draft, *self._secret_files())
        for path in () if self.lock.lost else ours:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self.lock.release(remove=True)

    def write_tokens(self, token: str, known_by: str = "") -> None:
        """Write the driver's token, and those of operators and readers beside it.

        `known_by`: see `auth.Credentials`. Raises TokenError.
        """
        write_token_file(self.token_file, token, known_by)
        write_token_file(self.path / "token-operator", operator_token(token), known_by)
        write_token_file(self.path / "token-reader", reader_token(token), known_by)

    def _secret_files(self) -> tuple[Path, ...]:
        tokens = self.path.glob(f"{self.token_file.name}-*")
        return (self.token_file, *tokens, *self.certificate)

    def leave(self) -> None:
        """Give the lock back and leave all files to the next driver; never raises."""
        self.lock.release(remove=False)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an OSError into a message that says what to try, and give the folder back."""
        try:
            yield
        except ElasticError:
            self.leave()
            raise
        except OSError as error:
            self.leave()
            what = f"cannot keep the run's files in {self.path}: {error.strerror or error}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                again = "and resume again" if self.unfinished else "or choose another --state-dir"
                raise ClusterError(f"{what}; make room, {again}") from error
            if error.errno == errno.EROFS and self.unfinished:
                hint = "mount it for writing, and resume again; the workers wait meanwhile"
                raise ClusterError(f"{what}; {hint}") from error
            raise UsageError(f"{what}; choose another folder with --state-dir") from error
