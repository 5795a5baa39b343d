"""The file in which the node checks of all runs in a state folder are kept.

`<state-dir>/_node-checks.json` (no run can be called so), readable by its owner alone. It is
written whole or not at all. Several runs may end a check at the same time: they take turns by a
lock on the folder if the file system has locks. A file that cannot be decoded is renamed and
reported; no check fails because of its history. Times are unix seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from elastic_driver.policies.nodecheck.history import CheckHistory, decode
from elastic_driver.policies.nodecheck.report import CheckReport

FILE = "_node-checks.json"
MAX_BYTES = 64 * 1024 * 1024  # far more than the bounds of `CheckHistory` allow
LOCK_S = 2.0  # then it is written all the same: at worst another run's check is missing
_LOOK_AGAIN_S = 0.02


class CheckHistoryFile:
    """Reads and adds to the history of one state folder.

    Args:
        state_dir: the folder; made when there is something to keep.
        say: shows the user a line about a file that cannot be read or written.
    """

    def __init__(self, state_dir: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = state_dir.expanduser().absolute(), say
        self.path = self._folder / FILE

    def read(self) -> CheckHistory:
        """Return the history; an empty one if there is no file, or no usable one."""
        try:
            if self.path.stat().st_size > MAX_BYTES:
                return self._set_aside(f"it is larger than {MAX_BYTES} bytes")
            return decode(self.path.read_bytes())
        except FileNotFoundError:
            return CheckHistory()
        except msgspec.DecodeError as error:
            return self._set_aside(str(error))
        except OSError as error:
            self._say(f"cannot read the checks before this one in {self.path}: {error.strerror}")
            return CheckHistory()

    def add(self, report: CheckReport) -> None:
        """Add a check's report."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                self._write(self.read().with_report(report, time.time()))
        except OSError as error:
            self._say(f"cannot keep what the check found in {self.path}: {error.strerror}")

    def _write(self, history: CheckHistory) -> None:
        draft = self.path.with_name(f"{FILE}.{os.getpid()}.new")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(history) + b"\n")
            draft.replace(self.path)
        finally:
            draft.unlink(missing_ok=True)

    def _set_aside(self, why: str) -> CheckHistory:
        aside = self.path.with_name(f"{FILE}.bad-{time.time():.0f}")
        with contextlib.suppress(OSError):
            self.path.replace(aside)
        self._say(f"{self.path} is no history of checks ({why}); it was set aside as {aside.name}")
        return CheckHistory()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        until = time.monotonic() + LOCK_S
        try:
            while not _lock(descriptor) and time.monotonic() < until:
                time.sleep(_LOOK_AGAIN_S)
            yield
        finally:
            os.close(descriptor)  # and with it the lock


def _lock(descriptor: int) -> bool:
    """Try to lock; True also where the file system knows no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
