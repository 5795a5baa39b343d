"""A spare: a process that was forked in advance, and becomes the worker or agent of a request.

The warm parent (`_elastic_warm_parent`) forks spares. A request comes as one datagram with
descriptors: stderr and stdout of the new process, its stdin (of an agent always, of a worker only
if it reads anything), for an agent maybe that of its workers, and a channel for the conversation
that follows: the requester sends the environment (for an agent also the command
and the folder), the spare answers with its pid, and the requester says "go". If the requester has
closed the channel, the spare drops the request, so the requester knows of every process.

Messages are lines of JSON over a stream socket. The agent's side imports `send_line` and
`receive_line` from here. This module uses the standard library only.
"""

import contextlib
import ctypes
import gc
import io
import json
import os
import signal
import socket
import sys
from typing import Any, NoReturn, cast

BORN_WARM = "ELASTIC_BORN_WARM"  # an agent's variable: its warm parent and their sockets
_WORKER_STDIN = "ELASTIC_WORKER_STDIN"  # another one (`launcher.agent.processes`)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ACCELERATORS = ("cuda", "hip", "xpu")
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
_REQUEST_SECONDS = 5.0  # the requester sends everything at once; after this it has given up
_MARK = b"ELASTIC_WARM_FDS="  # first variable of the part of the environment that is ours

Ends = tuple[socket.socket, socket.socket]  # of a warm parent: its queue, its status


def send_line(line: socket.socket, message: dict[str, Any]) -> None:
    """Send one message."""
    line.sendall(json.dumps(message).encode("ascii") + b"\n")


def receive_line(line: socket.socket) -> dict[str, Any]:
    """Receive one message; EOFError if the other end closes before it is complete."""
    received = bytearray()
    while not received.endswith(b"\n"):
        piece = line.recv(65536)
        if not piece:
            raise EOFError("the process has ended")
        received += piece
    return cast("dict[str, Any]", json.loads(received))


def die_with(parent: int) -> None:
    """Have the kernel kill us when our parent's thread ends; end now if it is not `parent`.

    Ignore the signals that Slurm sends to all processes of a step: they are for the agent.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if "SLURM_STEP_ID" in os.environ:
        for number in _NOTICES:
            signal.signal(number, signal.SIG_IGN)
    if os.getppid() != parent:  # it died in between, or does not adopt orphans
        os._exit(0)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def first_step(torch: Any) -> None:
    """Take one optimizer step on the CPU, in one thread, which saves the job's first step 1 s.

    No accelerator is touched: a CUDA driver that was asked for its devices is unusable in forks,
    and optimizers ask before their first step. In a torch that was built for an accelerator the
    gradients are made by hand, because its autograd engine counts the devices first.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        loss = model(torch.zeros(2, 4)).sum()
        if any(getattr(torch.version, name, None) for name in _ACCELERATORS):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        else:
            loss.backward()
        optimizer.step()
        saved = io.BytesIO()
        torch.save({"step": 0}, saved)  # as a state is sent to another rank: imports take 5 ms
        saved.seek(0)
        torch.load(saved, weights_only=True)
    finally:
        torch.cuda.is_available = is_available
    torch.set_num_threads(threads)


# ---- waiting -----------------------------------------------------------------------------


def await_request(setup: dict[str, Any], queue: socket.socket, lifeline: int) -> Ends | None:
    """Wait for a request and become the requested process.

    Return None in a worker, which then runs the job's command. An agent executes its own program;
    in the warm parent that is forked for it, return the warm parent's ends of the conversation.

    Our end of the pipe `lifeline` tells the warm parent that we have become a child of its owner
    (`+`), that a request has taken us (`t`), or that we have died (the end of the pipe).
    """
    die_with(setup["parent"])
    os.write(lifeline, b"+")
    if setup["rehearse"] and "torch" in sys.modules:
        first_step(sys.modules["torch"])  # the pages it writes are now our own
    _own_randomness()
    while True:
        data, received, _, _ = socket.recv_fds(queue, 16, 5)
        if not data:  # the owner has closed its end
            os._exit(0)
        *stdio, channel_fd = received
        with socket.socket(fileno=channel_fd) as channel:
            channel.settimeout(_REQUEST_SECONDS)
            request = _agree(channel)
        if request is not None:
            break
        for fd in stdio:
            os.close(fd)
    queue.close()
    os.write(lifeline, b"t")
    os.close(lifeline)
    if "argv" in request:
        return _become_agent(setup, request, stdio)
    _become_worker(setup, request["env"], stdio)
    return None


def _agree(channel: socket.socket) -> dict[str, Any] | None:
    """Return the request; None if the requester has given up already."""
    try:
        request = receive_line(channel)
    except (OSError, EOFError):
        return None
    os.setsid()  # from here on we are no spare any more: answer and go, or end
    try:
        send_line(channel, {"pid": os.getpid()})
        if channel.recv(2) != b"go":
            os._exit(0)
    except OSError:
        os._exit(0)
    return request


def _set_streams(stdio: list[int]) -> None:
    """Make the descriptors of a request our stderr and stdout, and stdin if there is a third."""
    for target, source in zip((2, 1, 0), stdio[:3], strict=False):
        os.dup2(source, target)
        os.close(source)


# ---- becoming a worker -------------------------------------------------------------------


def _become_worker(setup: dict[str, Any], env: dict[str, str], stdio: list[int]) -> None:
    """Change everything in which a worker differs from the warm parent, except random seeds."""
    os.chdir(setup["cwd"])
    _set_streams(stdio)
    os.environ.clear()
    os.environ.update(env)
    _show_environment(setup["env"], env)
    if len(stdio) > 2:
        _renew_stream(sys.stdin, 0)
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

    The object stays, because handlers of loggers may hold it. Its facts about the descriptor
    (terminal or not, seekable or not, block size) are read again.
    """
    unbuffered, mode = bool(stream.write_through), "w" if fd else "r"
    buffering = 0 if unbuffered and fd else -1
    binary: Any = open(fd, f"{mode}b", buffering=buffering, closefd=False)  # noqa: SIM115
    raw = binary.raw if buffering else binary
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
    stream.mode = mode


def _own_randomness() -> None:
    """Seed what a new process would seed, so that workers differ (`random` does it by itself)."""
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

    The kernel shows the memory that held the variables when the process began. The variables that
    all workers share stand there already; the others are written over the part from `_MARK` on,
    which the agent has made large enough. Tools know a job's processes by these variables.
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


# ---- becoming an agent -------------------------------------------------------------------


def _become_agent(setup: dict[str, Any], request: dict[str, Any], stdio: list[int]) -> Ends:
    """Fork the agent's warm parent, then execute the agent; return in the warm parent.

    The warm parent has all imports already. It stays in the agent's session, by which the agent
    and its backend know it and its spares.
    """
    queue, its_queue = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    status, its_status = socket.socketpair()
    log = os.memfd_create("warm-parent")
    agent = os.getpid()
    _prctl(_PR_SET_PDEATHSIG, 0)  # an agent that loses its backend stops its workers first
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if warm := os.fork():
        held = queue.fileno(), status.fileno(), log
        request["env"][BORN_WARM] = ",".join(map(str, (warm, *held, setup["digest"])))
        _set_streams(stdio)
        if len(stdio) > 3:
            request["env"][_WORKER_STDIN] = str(stdio[3])
        _execute(request, (*held, *stdio[3:]))
    die_with(agent)
    for ours in (queue, status):
        ours.close()
    for fd in stdio:
        os.close(fd)
    _set_streams([log, os.dup(log)])
    setup["parent"] = agent
    return its_queue, its_status


def _execute(request: dict[str, Any], held: tuple[int, ...]) -> NoReturn:
    """Become the agent's program, as a new process would."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed the directory is closed again
            os.set_inheritable(int(name), int(name) <= 2 or int(name) in held)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    os.chdir(request["cwd"])
    argv = request["argv"]
    os.execvpe(argv[0], argv, request["env"])  # noqa: S606 - the agent's own, from our backend
