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
from typing import IO

_CHUNK_BYTES = 65536
_REAP_S = 1.0  # a killed process is gone in milliseconds, unless the kernel holds it
_STDERR_BYTES = 4096  # the end of it, to explain a failure


class ProbeError(Exception):
    """The program gave no answer; the message continues its name: "exited with status 3"."""


class ProbeCancelledError(Exception):
    """`cancel()` was called."""


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
        """Return what the program printed to stdout; raises ProbeError or ProbeCancelledError."""
        deadline = time.monotonic() + self._timeout
        process, streams = self._spawn()
        try:
            output, errors = self._collect(process.pid, streams, deadline)
        finally:
            with self._lock:  # until it is reaped, no other process gets its number
                _kill_group(process)
                self._running = None
            for stream in streams:
                stream.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_S)  # a process stuck in the kernel is left behind
        if self._cancelled:
            raise ProbeCancelledError("was cancelled")
        if process.returncode != 0:
            raise ProbeError(_describe_exit(process.returncode, errors))
        return output

    def cancel(self) -> None:
        """Kill the program if it runs, and refuse to run it again."""
        with self._lock:
            self._cancelled = True
            if self._running is not None:
                _kill_group(self._running)

    def _spawn(self) -> tuple[subprocess.Popen[bytes], tuple[IO[bytes], IO[bytes]]]:
        """Start the program; return the process, its stdout and its stderr."""
        with self._lock:
            if self._cancelled:
                raise ProbeCancelledError("was cancelled")
            try:
                process = subprocess.Popen(
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
            self._running = process
        if process.stdout is None or process.stderr is None:
            raise AssertionError("both streams are pipes")
        return process, (process.stdout, process.stderr)

    def _collect(
        self, pid: int, streams: tuple[IO[bytes], IO[bytes]], deadline: float
    ) -> tuple[bytes, bytes]:
        """Read both streams until the program has exited; its children may hold them longer."""
        exited = os.pidfd_open(pid)
        buffers = {stream.fileno(): bytearray() for stream in streams}
        output, errors = buffers.values()
        try:
            with selectors.DefaultSelector() as selector:
                for descriptor in (exited, *buffers):
                    os.set_blocking(descriptor, False)
                    selector.register(descriptor, selectors.EVENT_READ)
                ready: set[int] = set()
                while exited not in ready:
                    ready = {key.fd for key, _ in selector.select(deadline - time.monotonic())}
                    if not ready and time.monotonic() >= deadline:
                        raise ProbeError(
                            f"gave no answer within {self._timeout:g} s and was killed; "
                            "make it faster, or raise --discovery-timeout"
                        )
                    for descriptor in ready & buffers.keys():
                        if _read(descriptor, buffers[descriptor]) is False:
                            selector.unregister(descriptor)
                    self._check_size(output)
                    del errors[:-_STDERR_BYTES]
        finally:
            os.close(exited)
        # What it wrote before it exited is in the pipes by now.
        for descriptor, buffer in buffers.items():
            while _read(descriptor, buffer) and len(buffer) <= self._max_output:
                pass
        self._check_size(output)
        return bytes(output), bytes(errors[-_STDERR_BYTES:])

    def _check_size(self, output: bytearray) -> None:
        if len(output) > self._max_output:
            raise ProbeError(f"printed more than {self._max_output} bytes and was killed")


def _read(descriptor: int, buffer: bytearray) -> bool | None:
    """Read into `buffer`; return False at the end of the stream, None if there is nothing yet."""
    try:
        chunk = os.read(descriptor, _CHUNK_BYTES)
    except BlockingIOError:
        return None
    buffer += chunk
    return bool(chunk)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to the program's process group.

    The group may outlive its leader. Its number is not used again while the leader is not reaped
    or the group has members.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _describe_exit(code: int, errors: bytes) -> str:
    """Describe the program's exit, with the last line of its stderr."""
    if code < 0:
        try:
            how = f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            how = f"was killed by signal {-code}"
    else:
        how = f"exited with status {code}"
    lines = errors.decode("utf-8", "backslashreplace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}: {last[:200]!r}" if last else how
