"""A spare: waits for a request, then turns into exactly the process that was asked for.

Runs in processes forked from the warm parent (`_elastic_warm_parent`). A request comes as one
datagram with three descriptors: the worker's stdout, its stderr, and a channel for the rest: the
environment (from the agent), the pid (from the spare), "go" (from the agent). A process that finds
the channel ended forgets the request, so that no worker runs that the agent does not know of.
"""

import ctypes
import gc
import io
import os
import socket
import sys
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from launcher.agent.warm.parent import _elastic_warm_common as common
else:
    import _elastic_warm_common as common

_REQUEST_SECONDS = 5.0  # the agent says it all at once; longer means that it has given up
_MARK = b"ELASTIC_WARM_FDS="  # first variable of the part of the environment that is ours


# ---- waiting -----------------------------------------------------------------------------


def await_request(setup: dict[str, Any], queue: socket.socket, lifeline: int) -> None:
    """Wait as the agent's child until a request comes; then become what it asks for.

    Our end of the pipe `lifeline` shows the warm parent that we have become the agent's child
    (`+`), that we still wait (it is open), and that we were taken (`t`) or have died (its end).
    """
    common.die_with(setup["parent"])
    os.write(lifeline, b"+")
    if setup["rehearse"] and "torch" in sys.modules:
        common.first_step(sys.modules["torch"])  # the pages it writes are now our own
    _own_randomness()
    while True:
        data, received, _, _ = socket.recv_fds(queue, 16, 3)
        if not data:  # the agent has closed its end
            os._exit(0)
        stdout, stderr, channel_fd = received
        with socket.socket(fileno=channel_fd) as channel:
            channel.settimeout(_REQUEST_SECONDS)
            env = _agree(channel)
        if env is not None:
            queue.close()
            os.write(lifeline, b"t")
            os.close(lifeline)
            _become(setup, env, stdout, stderr)
            return
        os.close(stdout)
        os.close(stderr)


def _agree(channel: socket.socket) -> dict[str, str] | None:
    """Return the environment of the worker to become; None if the agent has given up already."""
    try:
        request = common.receive_line(channel)
    except (OSError, EOFError):
        return None
    os.setsid()  # from here on we are no spare any more: answer and go, or end
    try:
        common.send_line(channel, {"pid": os.getpid()})
        if channel.recv(2) != b"go":
            os._exit(0)
    except OSError:
        os._exit(0)
    return cast("dict[str, str]", request["env"])


# ---- becoming ----------------------------------------------------------------------------


def _become(setup: dict[str, Any], env: dict[str, str], stdout: int, stderr: int) -> None:
    """Change everything in which a worker differs from the warm parent, but for the randomness."""
    os.chdir(setup["cwd"])
    for source, target in ((stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(env)
    _show_environment(setup["env"], env)
    _renew_stream(sys.stdout, 1)
    _renew_stream(sys.stderr, 2)
    threads = env.get("OMP_NUM_THREADS")
    if threads is not None and threads != setup["env"].get("OMP_NUM_THREADS"):
        for set_threads in setup["thread_setters"]:
            set_threads(int(threads))
    if "multiprocessing.process" in sys.modules:  # its sockets go where the agent removes them
        config = sys.modules["multiprocessing.process"].current_process()._config
        config["tempdir"] = env.get("ELASTIC_SCRATCH")
    gc.enable()


def _renew_stream(stream: Any, fd: int) -> None:
    """Make a standard stream anew over its descriptor, as CPython's `create_stdio` does.

    The object stays, since handlers of loggers may hold it; what it knows of the
    descriptor (terminal or not, seekable or not, block size) is learned again.
    """
    unbuffered = bool(stream.write_through)
    binary: Any = open(fd, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    raw = binary if unbuffered else binary.raw
    raw.name = stream.name
    io.TextIOWrapper.__init__(
        stream,
        binary,
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=not unbuffered and (fd == 2 or raw.isatty()),
        write_through=unbuffered,
    )
    stream.mode = "w"


def _own_randomness() -> None:
    """Seed what a new process seeds, so that siblings differ (`random` does it by itself)."""
    loaded: dict[str, Any] = dict(sys.modules)
    if "numpy.random" in loaded:
        loaded["numpy.random"].seed()
    if "torch" in loaded:
        loaded["torch"].default_generator.seed()
    if "multiprocessing.process" in loaded:
        loaded["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "tempfile" in loaded:
        loaded["tempfile"].tempdir = None


def _show_environment(base: dict[str, str], env: dict[str, str]) -> None:
    """Write the worker's own variables where `/proc/<pid>/environ` shows them.

    The kernel shows the memory in which the process found its variables at its start. Those it
    shares with its siblings stand there already; the rest goes over what follows `_MARK`, which
    the agent has made large enough. Tools tell a job's processes by these variables.
    """
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start, env_end: fields 50 and 51
    if not 0 < start < end:
        return
    offset = ctypes.string_at(start, end - start).find(_MARK)
    if offset < 0:
        return
    room = end - start - offset
    shown = b""
    for name, value in env.items():
        entry = os.fsencode(f"{name}={value}") + b"\0"
        if (name not in base or name == "PYTHONPATH") and len(shown) + len(entry) <= room:
            shown += entry
    ctypes.memmove(start + offset, shown.ljust(room, b"\0"), room)
