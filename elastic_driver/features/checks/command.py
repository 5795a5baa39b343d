"""What `elasticrun` and `elasticctl check` ask of node checks (`runtime.host_checks.CheckCommand`).

The results of all runs are kept in a file of the state folder.
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from elastic_driver.features.checks.driver import CheckSettings, NodeChecks
from elastic_driver.features.checks.messages import TaskSettings
from elastic_driver.features.checks.report import CheckHistory, CheckReport
from elastic_driver.runtime.backend import MakeBackend
from elastic_driver.runtime.host_checks import CheckOrder, Say
from elastic_driver.runtime.run_dir import RunDir
from rendezvous.own_files import open_own, write_own
from rendezvous.wire import UNREADABLE

REPORT_FILE = "node_check.json"
FOLDER = "node-check"  # in the run's folder; for the token and address of the check
FILE = "_node-checks.json"
MAX_BYTES = 64 * 1024 * 1024  # far more than the bounds of `CheckHistory` allow
LOCK_S = 2.0  # then it is written all the same: at worst another run's check is missing
_LOOK_AGAIN_S = 0.02


def check_settings(order: CheckOrder) -> CheckSettings:
    """Return the settings of the checks that the user wants."""
    task = TaskSettings(
        timeout=order.timeout, performance=order.measures_network, model=order.trains
    )
    return CheckSettings(
        exclude_stragglers=order.exclude_slow,
        every_slot=order.every_slot,
        start_timeout=order.start_timeout,
        task_timeout=order.timeout,
        heartbeat_timeout=order.heartbeat_timeout,
        task=task,
        ports=order.ports,
        env=dict(order.env),
    )


def make_checks(
    order: CheckOrder,
    *,
    starter: MakeBackend,
    run_dir: RunDir,
    state_dir: Path,
    say: Say,
    quiet: bool,
) -> NodeChecks:
    """See `CheckCommand.make_checks`."""
    kept = CheckHistoryFile(state_dir, say)
    return NodeChecks(
        check_settings(order),
        make_backend=starter,
        folder=RunDir(run_dir.path, FOLDER),
        file=run_dir.path / REPORT_FILE,
        keep=kept.add,
        remember=kept.add_new,
        say=(lambda _line: None) if quiet else say,
    )


def history(state_dir: Path, names: Sequence[str], say: Say, *, as_json: bool) -> str:
    """See `CheckCommand.history`."""
    file = CheckHistoryFile(state_dir, say)
    found = file.read()
    if as_json:
        chosen = {n: past for n, past in found.nodes.items() if not names or n in names}
        return msgspec.json.encode(CheckHistory(chosen)).decode()
    if found.nodes:
        return found.render(names)
    return f"no check was ever kept in {file.path.parent}; is it in another --state-dir?"


class CheckHistoryFile:
    """The history of all node checks of a state folder, `<state-dir>/_node-checks.json`.

    No run can have this name. The file is readable by its owner only and written atomically.
    Several runs may end a check at the same time: they take turns by a lock on the folder, if the
    file system has locks. A file that cannot be decoded is renamed and reported; no check fails
    because of its history. Times are unix seconds.

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
            with open(open_own(self.path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                if (owner := os.fstat(file.fileno()).st_uid) != os.geteuid():
                    raise PermissionError(errno.EPERM, f"it belongs to user {owner}")
                content = file.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise msgspec.DecodeError(f"it is larger than {MAX_BYTES} bytes")
            return msgspec.json.decode(content, type=CheckHistory)
        except FileNotFoundError:
            pass
        except UNREADABLE as error:
            aside = self.path.with_name(f"{FILE}.bad-{time.time():.0f}")
            with contextlib.suppress(OSError):
                self.path.replace(aside)
            self._say(f"{self.path} is no history of checks ({error}), and is now {aside.name}")
        except OSError as error:
            self._say(f"cannot read the checks before this one in {self.path}: {error.strerror}")
        return CheckHistory()

    def add(self, report: CheckReport) -> None:
        """Add a check's report."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                history = self.read().with_report(report, time.time())
                write_own(self.path, msgspec.json.encode(history) + b"\n")
        except OSError as error:
            self._say(f"cannot keep what the check found in {self.path}: {error.strerror}")

    def add_new(self, report: CheckReport) -> CheckReport:
        """Add a check's report; return it with remarks on the checks before it."""
        before = self.read().remarks(report)
        self.add(report)
        return msgspec.structs.replace(report, before=before)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        until, locked = time.monotonic() + LOCK_S, False
        try:
            while not locked and time.monotonic() < until:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    locked = True
                except BlockingIOError:
                    time.sleep(_LOOK_AGAIN_S)
                except OSError:  # this file system has no locks
                    break
            yield
        finally:
            os.close(descriptor)  # and with it the lock
