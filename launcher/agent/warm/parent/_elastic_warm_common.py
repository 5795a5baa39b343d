"""Shared by all processes of a warm parent, and by both ends of the conversation with it.

Messages are lines of JSON over a stream socket. Like everything in this folder it uses the
standard library only; unlike the rest, the agent's side imports it too.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_ACCELERATORS = ("cuda", "hip", "xpu")
_BLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)
_LAST_WORK_S = 0.05


def send_line(line: socket.socket, message: dict[str, Any]) -> None:
    """Send one message."""
    line.sendall(json.dumps(message).encode("ascii") + b"\n")


def receive_line(line: socket.socket) -> dict[str, Any]:
    """Receive one message; EOFError if the other end closes before it is complete."""
    received = bytearray()
    while not received.endswith(b"\n"):
        piece = line.recv(65536)
        if not piece:
            raise EOFError("it ended while it was asked")
        received += piece
    return cast("dict[str, Any]", json.loads(received))


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process, see prctl(2)."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with(parent: int) -> None:
    """Have the kernel kill us when our parent's thread ends; end now if it is not `parent`."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between, or does not adopt orphans
        os._exit(0)


def fork_apart() -> int | None:
    """Fork twice, so that the second child becomes our own parent's, which adopts orphans.

    Returns None in that child, once its first parent has been collected: then the new parent has
    adopted it, and its parent-death signal concerns the new one. Returns for us the status with
    which the process between has ended: not 0 where it could not fork.
    """
    gate, opener = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork():
            os._exit(0)
        os.close(opener)
        os.read(gate, 1)
        os.close(gate)
        return None
    _, ended = os.waitpid(between, 0)
    os.close(opener)
    os.close(gate)
    return ended


# ---- torch -------------------------------------------------------------------------------
# No accelerator is touched and no thread is started. A CUDA driver that was asked for its devices
# is unusable in forks, and a thread pool exists only where it was started.


def first_step(torch: Any) -> None:
    """Take one optimizer step on the CPU, in one thread: 1 s of imports, and memory to write.

    In a torch built for an accelerator the gradients are made by hand: its autograd engine counts
    the devices before it does anything else.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with _without_accelerator(torch):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        loss = model(torch.zeros(2, 4)).sum()
        if any(getattr(torch.version, name, None) for name in _ACCELERATORS):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        else:
            loss.backward()
        optimizer.step()
    torch.set_num_threads(threads)


def let_last_work_end(torch: Any) -> None:
    """Keep torch from locking up where a DistributedDataParallel object outlives its group.

    Its reducer is the group's last owner then, and waits for the group's threads while it holds
    the interpreter's lock, which a thread that drops its last work may still want (seen with
    torch 2.13; destructors that block are pytorch's issue 56297). A new process is mostly
    saved by the imports that it has yet to make; one that has made them is too quick.
    """
    wrapper = torch.nn.parallel.DistributedDataParallel

    def wait_without_lock(_ddp: Any, pause: Callable[[float], None] = time.sleep) -> None:
        if not torch.distributed.is_initialized():
            pause(_LAST_WORK_S)

    if not hasattr(wrapper, "__del__"):
        wrapper.__del__ = wait_without_lock


@contextlib.contextmanager
def _without_accelerator(torch: Any) -> Iterator[None]:
    """Let nobody ask the driver for devices: optimizers do, before their first step."""
    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = is_available


def thread_setters(torch: Any) -> list[Callable[[int], Any]]:
    """Return the setters for another OMP_NUM_THREADS: of torch, and of numpy's OpenBLAS.

    Found in advance, because a worker that starts has no time to search.
    """
    setters = [torch.set_num_threads]
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        mapped = {line.split(maxsplit=5)[5].strip() for line in file if "openblas" in line}
    for path in mapped:
        library = ctypes.CDLL(path)
        for name in _BLAS_SETTERS:
            with contextlib.suppress(AttributeError):
                setters.append(getattr(library, name))
    return setters
