"""Discovery of hosts from a script, a hostfile or the command line.

A `HostDiscovery` has one question to answer, `find()`. `DiscoveryThread` asks it every interval and
posts an event when the hosts have changed. When a source fails (hangs, exits non-zero, prints
garbage), the last known hosts stay and the reason is posted once. A script or file that named hosts
and names none is asked again before that counts: `kubectl … | awk …` prints nothing and ends with 0
when its server does not answer. Times are seconds.
"""

import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from elastic_driver.errors import ClusterError, ElasticError, UsageError
from elastic_driver.job.events import DiscoveryFailed, HostsDiscovered
from elastic_driver.runtime.host_lists import Hosts, parse_host_lines
from elastic_driver.runtime.probe import ProbeError, ScriptProbe

MAX_TEXT_BYTES = 1 << 20  # of a script's output or a hostfile
FAILURES_AT_ONCE = 10  # are told; then one each `FAILURE_EVERY_S`, as each may have a new reason
FAILURE_EVERY_S = 60.0
_SETTLED_AFTER = 0.02  # a file being rewritten looks the same twice only when it is finished


class DiscoveryError(ClusterError):
    """A source gave no usable answer this time; the last known hosts stay."""


class HostDiscovery(Protocol):
    """A source of hosts."""

    def find(self) -> Hosts:
        """Return the present hosts as (host, slots), in a stable order and without repeats.

        Returns within a bounded time. Raises ElasticError if there is no usable answer; no hosts
        at all is a usable answer.
        """

    def cancel(self) -> None:
        """Make a `find()` under way in another thread, and every later one, raise soon."""


class _SecondLook:
    """Takes an answer without hosts for one only if the one before it had none either."""

    def __init__(self) -> None:
        self._named = False  # hosts, in the last answer

    def taken(self, hosts: Hosts, source: str) -> Hosts:
        """Return these hosts; raises DiscoveryError for none after an answer with hosts."""
        named, self._named = self._named, bool(hosts)
        if named and not hosts:
            raise DiscoveryError(f"{source} names no host; it is asked again before that counts")
        return hosts


class FixedDiscovery:
    """The hosts of `-H`, or this machine: they never change."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts

    def find(self) -> Hosts:
        """Return the same hosts every time."""
        return self.hosts

    def cancel(self) -> None:
        """Do nothing: `find()` does not wait."""


class HostfileDiscovery:
    """A hostfile, read again each time: editing it grows or shrinks the job."""

    def __init__(
        self, path: Path | str, *, default_slots: int = 1, timeout: float | None = None
    ) -> None:
        """Raises UsageError if the file cannot be read or parsed now; no `timeout` is needed."""
        self._path, self._default_slots, self._timeout = Path(path), default_slots, timeout
        self._cancelled = threading.Event()
        self._text, self._second_look = "", _SecondLook()
        try:
            self._text = self._read()
            self.find()
        except DiscoveryError as error:
            raise UsageError(str(error)) from error

    def find(self) -> Hosts:
        """Return the hosts in the file; if it has just changed, wait until it stays the same."""
        text = self._read()
        while text != self._text:
            self._text = text
            if self._cancelled.wait(_SETTLED_AFTER):
                raise DiscoveryError(f"hostfile {self._path}: reading was cancelled")
            text = self._read()
        source = f"hostfile {self._path}"
        hosts = parse_host_lines(text, default_slots=self._default_slots, source=source)
        return self._second_look.taken(hosts, source)

    def cancel(self) -> None:
        """End a `find()` that waits for the file to settle."""
        self._cancelled.set()

    def _read(self) -> str:
        name = f"hostfile {self._path}"
        try:
            status = self._path.stat()
            # A pipe without a writer would block; reading a folder raises.
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                raise DiscoveryError(f"{name} is not a regular file")
            if status.st_size > MAX_TEXT_BYTES:
                raise DiscoveryError(f"{name} is larger than {MAX_TEXT_BYTES} bytes")
            return self._path.read_bytes().decode("utf-8", "backslashreplace")
        except OSError as error:
            raise DiscoveryError(f"{name}: {error.strerror or error}") from error


class ScriptDiscovery:
    """A user's program that prints one host per line (the same contract as in horovodrun)."""

    def __init__(self, path: Path | str, *, timeout: float, default_slots: int = 1) -> None:
        """Raises UsageError if the file is no program that can be run."""
        self._path = Path(path).absolute()  # a later change of the working folder changes nothing
        self._default_slots, self._second_look = default_slots, _SecondLook()
        problem = None
        if not self._path.exists():
            problem = "does not exist"
        elif self._path.is_dir():
            problem = "is a folder, not a file"
        elif not os.access(self._path, os.R_OK | os.X_OK):
            first_line = "check that its first line names its interpreter (#!/bin/sh)"
            problem = f"is not executable; try chmod +x, and {first_line}"
        if problem is not None:
            raise UsageError(f"the discovery script {path} {problem}")
        self._probe = ScriptProbe(self._path, timeout=timeout, max_output=MAX_TEXT_BYTES)

    def find(self) -> Hosts:
        """Run the script once and return the hosts that it printed."""
        source = f"discovery script {self._path}"
        try:
            text = self._probe.run().decode("utf-8", "backslashreplace")
        except ProbeError as error:
            raise DiscoveryError(f"{source} {error}") from error
        hosts = parse_host_lines(text, default_slots=self._default_slots, source=source)
        return self._second_look.taken(hosts, source)

    def cancel(self) -> None:
        """Kill a running script, and never start one again."""
        self._probe.cancel()


class DiscoveryThread:
    """The thread that asks a source every interval and posts changes."""

    def __init__(
        self,
        source: HostDiscovery,
        *,
        interval: float,
        post: Callable[[HostsDiscovered | DiscoveryFailed], None],
    ) -> None:
        """Start nothing. `post` is called in this object's thread and must not block."""
        self._source, self._interval, self._post = source, interval, post
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)
        self._posted: Hosts | None = None
        self._last_reason: str | None = None
        self._may_tell, self._since = float(FAILURES_AT_ONCE), time.monotonic()

    def start(self) -> None:
        """Start the thread; the first answer is always posted, even an empty one."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Cancel a running `find()` and wait up to `timeout` for the thread. Idempotent."""
        self._stopping.set()
        self._source.cancel()
        if self._thread.ident is not None:  # it was started
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            event = self._ask()
            if event is not None and not self._stopping.is_set():
                self._post(event)
            # From start to start: a script that takes half the interval does not stretch it.
            self._stopping.wait(max(0.0, self._interval - (time.monotonic() - began)))

    def _ask(self) -> HostsDiscovered | DiscoveryFailed | None:
        """Ask once; return None if the answer is the same as before."""
        try:
            hosts = self._source.find()
        except Exception as error:  # a HostDiscovery of the user's own may raise anything
            reason = str(error)
            if not isinstance(error, ElasticError):
                reason = f"{type(self._source).__name__}: {type(error).__name__}: {reason}"
            if reason == self._last_reason or not self._is_to_tell():
                return None
            self._last_reason = reason
            return DiscoveryFailed(reason)
        self._last_reason = None
        before_hosts, self._posted = self._posted, hosts
        return None if hosts == before_hosts else HostsDiscovered(hosts)

    def _is_to_tell(self) -> bool:
        """Return whether one more failure is told: few at once, later ones now and then."""
        now = time.monotonic()
        earned = (now - self._since) / FAILURE_EVERY_S
        self._may_tell = min(float(FAILURES_AT_ONCE), self._may_tell + earned)
        self._since = now
        if self._may_tell < 1.0:
            return False
        self._may_tell -= 1.0
        return True
