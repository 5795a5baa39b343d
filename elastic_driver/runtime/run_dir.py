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

The lock of a run's folder: one driver at a time, also on a folder that several machines share.

The kernel holds the lock (flock) as long as the driver's process lives. NFS passes it on to other
machines only if it is set up so, therefore the file also says who holds it, and a thread renews its
time. A driver on another machine takes the lock when it was not renewed for `EXPIRES_S`. The former
holder sees that within `RENEW_S`, if it lives; the terms in the journal keep it from deciding
anything until then (docs/driver-loss.md).
"""

import contextlib
import datetime
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from elastic_driver.errors import ClusterError, ElasticError, UsageError
from rendezvous.auth import operator_token, reader_token, write_token_file
from rendezvous.own_files import own_folder, read_own
from rendezvous.tls import certificate_in
from rendezvous.wire import UNREADABLE

log = logging.getLogger(__name__)

RENEW_S = 2.0
EXPIRES_S = 30.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of a file system without locks
_ATTEMPTS = 10  # a driver that ends removes the file, perhaps just after it was opened here


class Holder(msgspec.Struct, frozen=True):
    """The content of the lock: a process, and the boot of its machine."""

    host: str
    boot_id: str
    pid: int
    started: int  # ticks since the boot: a later process may get the same pid
    began: bool = False  # the job: its agents may live when this process does not

    @classmethod
    def this_process(cls) -> "Holder":
        """Return the calling process as a holder."""
        return cls(os.uname().nodename, _boot_id(), os.getpid(), _start_of("self"))

    def is_same(self, other: "Holder | None") -> bool:
        """Return whether this is the same process."""
        return other is not None and msgspec.structs.replace(other, began=self.began) == self

    @property
    def is_of_an_earlier_boot(self) -> bool:
        """Return whether this machine has been started again since: nothing of then lives here."""
        return self.host == os.uname().nodename and self.boot_id != _boot_id()

    @property
    def lives(self) -> bool:
        """Return whether this process of this machine lives; it may be stopped."""
        return self.boot_id == _boot_id() and _start_of(self.pid) == self.started


class RunLock:
    """The lock of one folder; `release` must follow `acquire`."""

    def __init__(self, path: Path, name: str) -> None:
        """Take nothing yet. `name`: what error messages call the run."""
        self.path, self._name = path, name
        self.on_lost: Callable[[str], None] = lambda _reason: None  # by the thread that renews
        self.lost = False  # another driver holds the lock
        self.former: Holder | None = None  # a holder that did not release it
        self._holder: Holder | None = None
        self._file: int | None = None
        self._end = threading.Event()
        self._renewing: threading.Thread | None = None

    @property
    def holder(self) -> Holder | None:
        """The process that holds the lock, or did not release it; None: the file names none."""
        return _read(self.path)

    def acquire(self, url: str) -> None:
        """Take the lock. `url`: the address of the present holder, for people; may be empty.

        Raises UsageError if a driver holds it, ClusterError if one may hold it on another machine,
        OSError if the file cannot be written.
        """
        if self._file is not None:
            return
        file, locks = self._open()
        try:
            self._refuse_a_live_one(file, locks, url)
            began = self.former is not None and self.former.began
            self._holder = msgspec.structs.replace(Holder.this_process(), began=began)
            _write(file, self._holder)
            os.utime(file)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        self._renewing = threading.Thread(target=self._renew, name="run-lock", daemon=True)
        self._renewing.start()

    def note_begun(self, *, began: bool) -> None:
        """Note whether agents of this run may have been started; raises OSError as a write does.

        The file says so whatever becomes of the other files of the run.
        """
        if self._file is not None and self._holder is not None:
            self._holder = msgspec.structs.replace(self._holder, began=began)
            _write(self._file, self._holder)

    def release(self, *, remove: bool) -> None:
        """Give the lock back, if it is held; never raises.

        `remove`: the file, too. Otherwise it names the former holder again, if there was one.
        """
        if self._file is None:
            return
        self._end.set()
        if self._renewing is not None and self._renewing is not threading.current_thread():
            self._renewing.join(RENEW_S)  # longer only if the disk hangs
        with contextlib.suppress(OSError):
            if self._holder is not None and _read(self.path) == self._holder:
                began = self._holder.began
                if remove:
                    self.path.unlink()
                elif self.former is not None:
                    _write(self._file, msgspec.structs.replace(self.former, began=began))
        os.close(self._file)
        self._file, self._renewing, self._end = None, None, threading.Event()

    # ---- inside --------------------------------------------------------------------------

    def _open(self) -> tuple[int, bool | None]:
        """Return the file, and whether it is locked now; None: files cannot be locked here."""
        for _attempt in range(_ATTEMPTS):
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            locks: bool | None = True
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return file, False
            except OSError as error:
                if error.errno not in _NO_FLOCK:
                    os.close(file)
                    raise
                locks = None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), self.path.stat()):
                    return file, locks
            os.close(file)  # the last holder has just removed this file
        raise ClusterError(f"drivers of run {self._name} come and go too fast; try again")

    def _refuse_a_live_one(self, file: int, locks: bool | None, url: str) -> None:
        with contextlib.suppress(OSError):
            self.former = _read(self.path)
        holder = self.former
        if holder is None and locks is not False:
            return
        where = "" if holder is None or holder.host == os.uname().nodename else holder.host
        who = "another process" if holder is None else f"process {holder.pid}"
        used = f"run id {self._name} is in use by {who}{f' of host {where}' * bool(where)}"
        used += f" ({url})" * bool(url)
        if locks is False or (locks is None and holder is not None and holder.lives):
            raise UsageError(f"{used}; {_advice(holder)}")
        if holder is None or holder.boot_id == _boot_id() or not where:
            return  # this machine's, and dead: the process has ended, or the machine has restarted
        if (age := self._age(file)) < 0:  # a clock was set back: count from now
            os.utime(file)
        if (left := EXPIRES_S - max(age, 0.0)) > 0:
            raise ClusterError(
                f"{used}, which has renewed its lock {self.path} a moment ago; if {where} is gone "
                f"for good, try again in {left:.0f} s"
            )

    def _age(self, file: int) -> float:
        """Return the seconds since the lock was renewed, by the clock of the file system."""
        now = self.path.with_name(f"{self.path.name}.now")
        try:
            now.write_bytes(b"\n")
            return now.stat().st_mtime - os.fstat(file).st_mtime
        finally:
            with contextlib.suppress(OSError):
                now.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._end.wait(RENEW_S):
            try:
                found = _read(self.path)
                if found is not None and not found.is_same(self._holder):
                    self.lost = True
                    who = f"process {found.pid} of host {found.host}"
                    self.on_lost(f"{who} is the driver of run {self._name} now; this one ends")
                    return
                os.utime(self.path)
            except OSError:
                pass  # the folder is gone, or the disk is full: it is tried again
            except Exception:
                log.exception(
                    "the lock of run %s could not be renewed; it is tried again", self._name
                )


def _advice(holder: Holder | None) -> str:
    stopped = False
    if holder is not None and holder.boot_id == _boot_id():
        with contextlib.suppress(OSError):
            stopped = "\nState:\tT" in Path(f"/proc/{holder.pid}/status").read_text()
    if holder is not None and stopped:
        return f"it is stopped: let it go on (kill -CONT {holder.pid}), or end it first (kill -9)"
    return "give another --run-id, or stop that job first"


def _read(path: Path) -> Holder | None:
    """Return the holder; None if the file names none. Opened anew, so that NFS asks its server."""
    try:
        return msgspec.json.decode(path.read_bytes().partition(b"\n")[0], type=Holder)
    except (FileNotFoundError, *UNREADABLE):
        return None


def _write(file: int, holder: Holder) -> None:
    os.ftruncate(file, os.pwrite(file, msgspec.json.encode(holder) + b"\n", 0))


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()


def _start_of(pid: int | str) -> int:
    """Return when a process began, in ticks since the boot; 0 if it has ended (proc(5)).

    A process that has ended stays in the list until its parent takes note: state Z.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state in "ZX" else int(fields[18])


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
