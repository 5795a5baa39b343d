"""The folder of one Brain, readable by its owner alone.

    admin.token   the token that may do everything (0600)
    job.token     the token from which those of all jobs are derived (0600); for users' machines
    node.token    the token of what measures the hosts (0600)
    state         the Brain's machine as it was last written down (0600)
    events.jsonl  what has happened, a line of JSON each
    tls-cert.pem  the certificate and
    tls-key.pem   the key, made when the folder is first used
    endpoint      its address, for `elasticbrain status`
    lock          held while a Brain uses the folder

Everything is kept: a Brain that is started again goes on with it, and its jobs still know it.
"""

import fcntl
import os
from pathlib import Path

import msgspec

from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.token_roles import jobs_token, node_token
from rendezvous.auth import Credentials, make_token, read_credentials, write_token_file
from rendezvous.own_files import own_folder
from rendezvous.tls import ServerCertificate, certificate_in
from rendezvous.wire import UNREADABLE

MONITOR = "monitor"  # the name in the token of what measures the hosts


class State(msgspec.Struct, frozen=True):
    """The Brain on disk: how often it was started, and the snapshot of its machine.

    `book` names this state; it stays until the state is lost.
    """

    starts: int = 0
    machine: bytes = b""
    book: str = ""


class BrainFolder:
    """The files of one Brain."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state_file, self.endpoint_file = path / "state", path / "endpoint"
        self.events_file, self.job_token_file = path / "events.jsonl", path / "job.token"
        self.admin_token_file = path / "admin.token"
        self._lock: int | None = None

    @property
    def certificate(self) -> ServerCertificate:
        """The place of the certificate that is made here."""
        return certificate_in(self.path)

    def open(self) -> None:
        """Create the folder and take its lock; raises UsageError or ClusterError."""
        try:
            own_folder(self.path)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f"the Brain cannot write to {self.path}: {error.strerror}; choose another "
                "--state-dir"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ClusterError(
                f"another Brain uses the folder {self.path}; stop it, or choose another --state-dir"
            ) from None
        self._lock = lock

    def close(self) -> None:
        """Give the folder back. May be called again."""
        if self._lock is not None:
            self.endpoint_file.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def write_endpoint(self, url: str) -> None:
        """Write the address down, with the process that serves there."""
        partial = self.endpoint_file.with_suffix(".new")
        partial.write_text(f"{os.getpid()} {url}\n", encoding="ascii")
        partial.replace(self.endpoint_file)

    def read_endpoint(self) -> str | None:
        """Return the address of the Brain of this folder; None: there is none."""
        try:
            return self.endpoint_file.read_text(encoding="ascii").split()[1]
        except (OSError, IndexError):
            return None

    # ---- tokens --------------------------------------------------------------------------

    def credentials(self) -> Credentials | None:
        """Return the token of an earlier Brain here; None: there was none. Raises TokenError."""
        return read_credentials(self.admin_token_file) if self.admin_token_file.exists() else None

    def write_tokens(self, token: str, known_by: str) -> None:
        """Write a file for each role; raises TokenError. `known_by`: see `rendezvous.tls`."""
        write_token_file(self.admin_token_file, token, known_by)
        write_token_file(self.job_token_file, jobs_token(token), known_by)
        write_token_file(self.path / "node.token", node_token(token, MONITOR), known_by)

    @staticmethod
    def new_token() -> str:
        """Return a token for a new Brain."""
        return make_token()

    # ---- the state -----------------------------------------------------------------------

    def load(self) -> State:
        """Return the state of an earlier Brain; raises UsageError if it cannot be read."""
        try:
            return msgspec.msgpack.decode(self.state_file.read_bytes(), type=State)
        except FileNotFoundError:
            return State()
        except OSError as error:
            raise UsageError(f"cannot read {self.state_file}: {error.strerror}") from error
        except UNREADABLE as error:
            raise UsageError(
                f"{self.state_file} is damaged: {error}; move it away, and the Brain learns from "
                "its jobs which slots they have"
            ) from error

    def save(self, state: State) -> None:
        """Write the state as a whole, and wait until the disk has it; raises OSError."""
        partial = self.state_file.with_suffix(".new")
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with open(file, "wb", closefd=False) as stream:
                stream.write(msgspec.msgpack.encode(state))
            os.fsync(file)
        finally:
            os.close(file)
        partial.replace(self.state_file)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
