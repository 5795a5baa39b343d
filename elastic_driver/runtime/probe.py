"""Runs of a user's program with a deadline, after which no process of it is left.

`discovery` runs its script this way. The program runs without a shell, in its own session, with an
empty stdin, below a process that guards it (`script_guard`). All its descendants are killed and
reaped when the deadline passes, the output is too large, `cancel()` is called, this process dies,
or the program has exited: then its answer is complete. Times are seconds.
"""

import contextlib
import ctypes
import errno
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_driver.runtime import script_guard
from elastic_driver.runtime.results import signal_name

_CHUNK_BYTES = 65536
_REAP_S = script_guard.REAP_S + 1.0  # for the guard to end everything
_STDERR_BYTES = 4096  # the end of it, to explain a failure
_GUARD = (sys.executable, "-I", "-S", script_guard.__file__)
_PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None).prctl  # loaded here: it is called between fork and exec


class _Running:
    """A program that runs, and its guard."""

    def __init__(self, process: "subprocess.Popen[bytes]", report: int) -> None:
        self.process, self._report = process, report

    def end(self) -> None:
        """Have the guard kill everything. May be called again."""
        assert self.process.stdin is not None  # noqa: S101 - it is a pipe
        self.process.stdin.close()

    def reap(self) -> int:
        """Wait for the guard; return the program's exit status. Raises ProbeError."""
        process = self.process
        try:
            process.wait(_REAP_S)
        except subprocess.TimeoutExpired:  # what is stuck in the kernel is left behind
            process.kill()
            process.wait()
        report = os.read(self._report, 100).decode().split()
        os.close(self._report)
        if report[:1] == ["error"]:
            number = int(report[1])
            problem = os.strerror(number)
            if number == errno.ENOEXEC:
                problem += "; its first line should name its interpreter, such as #!/bin/sh"
            raise ProbeError(f"cannot be run: {problem}")
        return int(report[1]) if report else process.returncode


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
        self._running: _Running | None = None

    def run(self) -> bytes:
        """Return what the program printed to stdout; raises ProbeError."""
        with self._lock:
            if self._cancelled:
                raise ProbeError("was cancelled")
            running = self._running = self._spawn()
        process = running.process
        streams: dict[Any, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
        code = 0
        try:
            self._collect(process.pid, streams)
        finally:
            with self._lock:
                running.end()
                self._running = None
            for stream in streams:
                stream.close()
            code = running.reap()
        if self._cancelled:
            raise ProbeError("was cancelled")
        if code != 0:
            raise ProbeError(_describe_exit(code, streams[process.stderr]))
        return bytes(streams[process.stdout])

    def cancel(self) -> None:
        """Kill the program if it runs, and refuse to run it again."""
        with self._lock:
            self._cancelled = True
            if self._running is not None:
                self._running.end()

    def _spawn(self) -> _Running:
        reading, report = os.pipe()
        try:
            process = subprocess.Popen(
                [*_GUARD, str(report), *self._argv],
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=(report,),
                preexec_fn=_become_subreaper,  # noqa: PLW1509 - a system call only
            )
        except OSError as error:
            os.close(reading)
            raise ProbeError(f"cannot be run: {error.strerror or error}") from error
        finally:
            os.close(report)
        return _Running(process, reading)

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


def _become_subreaper() -> None:
    """Adopt descendants whose parent dies; exec keeps that."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _describe_exit(code: int, errors: bytearray) -> str:
    """Describe the program's exit, with the last line of its stderr."""
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with status {code}"
    lines = errors.decode("utf-8", "backslashreplace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}: {last[:200]!r}" if last else how
