"""The folder of a Brain, and what `elasticbrain serve` makes of its command line.

The folder is readable by its owner alone:

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

import argparse
import fcntl
import ipaddress
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.options import ENDPOINT, whole
from elastic_driver.runtime.discovery import (
    FixedDiscovery,
    HostDiscovery,
    HostfileDiscovery,
    ScriptDiscovery,
    parse_hosts,
)
from elastic_driver.runtime.endpoint import Identity, choose_identity
from elastic_driver.settings import DriverOptions
from elastic_driver.token_roles import jobs_token, node_token
from launcher.brain.statistics_reader import address_of
from launcher.launch.brain_job import default_brain_dir
from launcher.launch.checks import numeric_address
from rendezvous.auth import Credentials, make_token, read_credentials, write_token_file
from rendezvous.own_files import own_folder
from rendezvous.tls import ServerCertificate, certificate_in
from rendezvous.wire import UNREADABLE

FORGET_PATH = "/v1/jobs/{job}:forget"
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


LOOK_S = 1.0  # between two looks for hosts
SCRIPT_S = 30.0  # for a discovery script


@dataclass(kw_only=True)
class BrainSetup:
    """The settings and parts of a Brain; nothing is opened yet."""

    folder: BrainFolder
    host: str  # a numeric address
    port: int
    discovery: HostDiscovery
    interval: float  # seconds between two looks for hosts
    algorithm: str
    token: str
    identity: Identity
    say: Callable[[str], None]
    database: Any = None  # with the figures of hosts; None: they are not known
    records: Any = None  # the same database, with what finished jobs have measured


def folder_of(given: argparse.Namespace) -> BrainFolder:
    """Return the folder of the Brain."""
    path = default_brain_dir(os.environ) if given.state_dir is None else Path(given.state_dir)
    return BrainFolder(path.absolute())


def setup_of(given: argparse.Namespace, say: Callable[[str], None]) -> BrainSetup:
    """Return what the Brain is made of, with its folder locked.

    Raises UsageError for options that cannot work, ClusterError if another Brain has the folder.
    """
    host, port = _bind(given.bind)
    discovery, databases = _discovery(given), _databases(given.stats_db)
    folder = folder_of(given)
    folder.open()
    try:
        former = folder.credentials()
        known = former if former is not None and former.fingerprint else None
        options = DriverOptions(
            bind_host=host,
            given_host="" if ipaddress.ip_address(host).is_unspecified else host,
            tls_cert=given.tls_cert,
            tls_key=given.tls_key,
            tls_ca=given.tls_ca,
        )
        identity = choose_identity(options, folder.certificate, known)
    except BaseException:
        folder.close()
        raise
    return BrainSetup(
        folder=folder,
        host=host,
        port=port,
        discovery=discovery,
        interval=LOOK_S,
        algorithm=given.algorithm,
        token=folder.new_token() if former is None else former.token,
        identity=identity,
        say=say,
        database=databases[0],
        records=databases[1],
    )


def _databases(text: str | None) -> tuple[Any, Any]:
    """Return the database that `--stats-db` names, once for each of two threads; or None twice."""
    if text is None:
        return None, None
    address = address_of(text, new=True)
    from elastic_driver.brain.store.database import Database  # noqa: PLC0415 - the extra

    return Database(address), Database(address)


def _bind(text: str) -> tuple[str, int]:
    try:
        host, port = ENDPOINT.read(text)
    except ValueError as error:
        raise UsageError(f"--bind {error}") from None
    return numeric_address(host), port


def _discovery(given: argparse.Namespace) -> HostDiscovery:
    try:
        slots = whole(least=1).read(given.slots_per_host)
    except ValueError as error:
        raise UsageError(f"--slots-per-host {error}") from None
    if given.hosts is not None:
        return FixedDiscovery(parse_hosts(given.hosts, default_slots=slots))
    if given.hostfile is not None:
        found = HostfileDiscovery(given.hostfile, default_slots=slots)
        found.find()  # raises now if it cannot be read
        return found
    script = given.host_discovery_script
    return ScriptDiscovery(script, timeout=SCRIPT_S, default_slots=slots)
