"""The folder of one run: `<state-dir>/<run-id>/`, readable by its owner alone.

    events.jsonl    the event log, kept
    token           the job's secret (0600), gone when the job is over
    endpoint.json   the driver's URL, gone when the job is over

The driver makes it before it starts anything: if the folder cannot be written, the command fails
at once and no training is lost. The files are only read to find a live run of the same name.
"""

import contextlib
import datetime
import errno
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from elastic_driver.errors import ClusterError, UsageError

MAX_RUN_ID_CHARS = 64  # it is part of file names and of workers' environments
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


class Endpoint(msgspec.Struct, frozen=True):
    """The content of `endpoint.json`: the URL of a run's driver."""

    run_id: str
    url: str
    pid: int
    started: float  # unix seconds


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
            raise UsageError(
                f"run id {run_id[:80]!r} is not usable as a folder's name; take letters, digits, "
                f"'.', '_' and '-', a letter or digit first, at most {MAX_RUN_ID_CHARS}"
            )
        self.run_id = run_id
        self.path = state_dir.expanduser().absolute() / run_id

    @property
    def events_file(self) -> Path:
        """The event log."""
        return self.path / "events.jsonl"

    @property
    def token_file(self) -> Path:
        """The 0600 file with the job's token."""
        return self.path / "token"

    @property
    def endpoint_file(self) -> Path:
        """The file with the driver's URL."""
        return self.path / "endpoint.json"

    def create(self) -> None:
        """Make the folder (0700) and see that it can be written.

        Raises UsageError (64) if the folder cannot be used or belongs to a running driver, and
        ClusterError (75) if the disk is full: the same command may succeed later.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # An existing folder may be readable by others.
            self.path.chmod(0o700)
            self._refuse_a_second_driver()
            self.token_file.unlink(missing_ok=True)
            self._probe()
        except OSError as error:
            self._explain(error)

    def write_endpoint(self, url: str, now: float) -> None:
        """Write the driver's URL, atomically. Raises as `create` does."""
        endpoint = Endpoint(run_id=self.run_id, url=url, pid=os.getpid(), started=now)
        draft = self.endpoint_file.with_suffix(".new")
        try:
            draft.write_bytes(msgspec.json.encode(endpoint) + b"\n")
            draft.replace(self.endpoint_file)
        except OSError as error:
            self._explain(error)

    def close(self) -> None:
        """Remove token and endpoint; never raises, the job is over."""
        for path in (self.token_file, self.endpoint_file, self.endpoint_file.with_suffix(".new")):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _refuse_a_second_driver(self) -> None:
        """Raise UsageError if a live driver uses the folder: it needs its own token file."""
        try:
            endpoint = msgspec.json.decode(self.endpoint_file.read_bytes(), type=Endpoint)
        except (FileNotFoundError, msgspec.DecodeError):
            return
        if endpoint.pid != os.getpid() and _is_alive(endpoint.pid):
            raise UsageError(
                f"run id {self.run_id} is in use by process {endpoint.pid} ({endpoint.url}); "
                "give another --run-id, or stop that job first"
            )
        self.endpoint_file.unlink(missing_ok=True)

    def _probe(self) -> None:
        """Write a block: on a full disk an empty file can often still be made, but no block."""
        probe = self.path / ".probe"
        try:
            probe.write_bytes(b"\0" * 4096)
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)

    def _explain(self, error: OSError) -> NoReturn:
        what = f"cannot keep the run's files in {self.path}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ClusterError(f"{what}; make room, or choose another --state-dir") from error
        raise UsageError(f"{what}; choose another folder with --state-dir") from error


def _is_alive(pid: int) -> bool:
    """Return True if a process with this number exists."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
