"""Runs of a user's program with a deadline, after which no process of it is left.

`discovery` runs its script this way. The program runs without a shell, in its own session, with an
empty stdin. Its whole process group is killed when the deadline passes, the output is too large,
`cancel()` is called, or the program has exited: then its answer is complete. Times are seconds.
"""

import contextlib
import errno
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_driver.runtime.failures import signal_name

_CHUNK_BYTES = 65536
_REAP_S = 1.0  # a killed process is gone in milliseconds, unless the kernel holds it
_STDERR_BYTES = 4096  # the end of it, to explain a failure


class ProbeError(Exception):
    """The program gave no answer; the message continues its name: "exited with status 3"."""


class ScriptProbe:
    """A program that is run repeatedly, one run at a time."""

    def __init__(
        self,
        path: Path,
        *arguments: str,
        timeout: float,
        max_output: int,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start nothing. `max_output` is the most bytes of stdout; `env` None: the driver's."""
        self._argv, self._env = [str(path), *arguments], env
        self._timeout, self._max_output = timeout, max_output
        self._lock = threading.Lock()
        self._cancelled = False
        self._running: subprocess.Popen[bytes] | None = None

    def run(self) -> bytes:
        """Return what the program printed to stdout; raises ProbeError."""
        with self._lock:
            if self._cancelled:
                raise ProbeError("was cancelled")
            process = self._running = self._spawn()
        streams: dict[Any, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
        try:
            self._collect(process.pid, streams)
        finally:
            with self._lock:  # until it is reaped, no other process gets its number
                _kill_group(process)
                self._running = None
            for stream in streams:
                stream.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_S)  # a process stuck in the kernel is left behind
        if self._cancelled:
            raise ProbeError("was cancelled")
        if process.returncode != 0:
            raise ProbeError(_describe_exit(process.returncode, streams[process.stderr]))
        return bytes(streams[process.stdout])

    def cancel(self) -> None:
        """Kill the program if it runs, and refuse to run it again."""
        with self._lock:
            self._cancelled = True
            if self._running is not None:
                _kill_group(self._running)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        try:
            return subprocess.Popen(
                self._argv,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            problem = error.strerror or str(error)
            if error.errno == errno.ENOEXEC:
                problem += "; its first line should name its interpreter, such as #!/bin/sh"
            raise ProbeError(f"cannot be run: {problem}") from error

    def _collect(self, pid: int, streams: dict[Any, bytearray]) -> None:
        """Read both streams until the program has exited; its children may hold them longer."""
        deadline = time.monotonic() + self._timeout
        output, errors = streams.values()
        exited = os.pidfd_open(pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(exited, selectors.EVENT_READ)
                for stream, buffer in streams.items():
                    os.set_blocking(stream.fileno(), False)
                    selector.register(stream, selectors.EVENT_READ, buffer)
                over = False
                while not over:
                    ready = [key for key, _ in selector.select(deadline - time.monotonic())]
                    over = any(key.fd == exited for key in ready)
                    if not over and time.monotonic() >= deadline:
                        problem = f"gave no answer within {self._timeout:g} s and was killed"
                        hint = "make it faster, or raise --discovery-timeout"
                        raise ProbeError(f"{problem}; {hint}")
                    # Everything that it wrote before it exited is in the pipes.
                    for key in list(selector.get_map().values()) if over else ready:
                        if key.fd != exited and not self._read(key.fd, key.data):
                            selector.unregister(key.fileobj)
                    if len(output) > self._max_output:
                        raise ProbeError(
                            f"printed more than {self._max_output} bytes and was killed"
                        )
                    del errors[:-_STDERR_BYTES]
        finally:
            os.close(exited)

    def _read(self, descriptor: int, buffer: bytearray) -> bool:
        """Read all that is there, up to the limit; return False at the end of the stream."""
        with contextlib.suppress(BlockingIOError):
            while len(buffer) <= self._max_output:
                chunk = os.read(descriptor, _CHUNK_BYTES)
                if not chunk:
                    return False
                buffer += chunk
        return True


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to the program's process group.

    The group may outlive its leader. Its number is not used again while the leader is not reaped
    or the group has members.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _describe_exit(code: int, errors: bytearray) -> str:
    """Describe the program's exit, with the last line of its stderr."""
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with status {code}"
    lines = errors.decode("utf-8", "backslashreplace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}: {last[:200]!r}" if last else how
