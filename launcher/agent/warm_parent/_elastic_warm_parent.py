"""The warm parent: imports what workers need, then forks them on request.

It is the job's own command (`python train.py --epochs 3`), held by `sitecustomize` just before the
interpreter would run it. So everything a worker takes from its interpreter (flags, `sys.argv`,
`sys.path`, `__main__`, tracebacks, the exit status) is made by CPython itself, not imitated.

Three kinds of processes run this module: the *parent* (one), *spares* (forked, waiting for a
request, children of the agent already) and, for a moment, what is to become a worker. It uses the
standard library only, reads nothing but its inherited sockets, and starts no thread. It never
touches an accelerator: whoever forks after that has a broken device (CUDA says "cannot
re-initialize in forked subprocess").
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from launcher.agent.warm_parent import _elastic_warm_worker as worker
else:  # as `sys.path` has it here, where the project may not be importable at all
    import _elastic_warm_worker as worker

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")
_SHARED = ("socket:", "pipe:", "anon_inode:")


def serve(conversation: str) -> None:
    """Be the warm parent for ever; returns only in a process that is to run the command.

    `conversation` names two inherited descriptors: the queue of requests, which all spares read,
    and the line to the agent, whose end is our end.
    """
    queue_fd, status_fd = (int(number) for number in conversation.split(","))
    status = socket.socket(fileno=status_fd)
    queue = socket.socket(fileno=queue_fd)
    for held in (status, queue):
        held.set_inheritable(False)
    born = worker.receive_line(status)
    os.environ.clear()
    os.environ.update(born["env"])
    began = time.monotonic()
    missing = _warm_up(born["preload"], born["path0"])
    _rehearse_fork()
    sys.stdout.flush()  # what an import printed is no worker's output
    reason = _unsafe(born, {0, 1, 2, queue_fd, status_fd})
    if reason:
        _refuse(status, reason)
    gc.collect()
    gc.freeze()  # the collector no longer writes to these objects: their pages stay shared
    _keep_spares(born, queue, status, missing, time.monotonic() - began)


def _refuse(status: socket.socket, reason: str) -> NoReturn:
    worker.send_line(status, {"refused": reason})
    os._exit(0)


# ---- warming -----------------------------------------------------------------------------


def _warm_up(preload: list[str], path0: str | None) -> list[str]:
    """Import the modules as the script would; returns a line for each that cannot be had."""
    missing = []
    gc.disable()  # until the fork: most of what an import makes lives as long as the process
    if path0 is not None:
        sys.path.insert(0, path0)
    for name in preload:
        try:
            importlib.import_module(name)
        except Exception as error:
            missing.append(f"{name}: {type(error).__name__}: {error}")
    if "torch" in sys.modules and not any(line.startswith("torch:") for line in missing):
        _first_step()
    if path0 is not None:
        sys.path.remove(path0)
        sys.path_importer_cache.pop(path0, None)  # the worker looks at the directory anew
    return missing


def _first_step() -> None:
    """One optimizer step on the CPU, for the modules that torch imports only then.

    Gradients are made by hand: the autograd engine would count devices, and so touch them.
    One thread: a pool of threads that was started here would be missing in every worker.
    """
    import torch  # noqa: PLC0415 - only where the job wants it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with _without_accelerator(torch):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.zeros(2, 4)).sum()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)


@contextlib.contextmanager
def _without_accelerator(torch: Any) -> Iterator[None]:
    """Let nobody ask the driver for devices: optimizers do, before their first step."""
    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = is_available


def _rehearse_fork() -> None:
    """Fork once for nothing: thread pools that know about forks (OpenBLAS) stop for it.

    What runs afterwards does not know, and would be missing in a worker.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python >= 3.12 warns of exactly what is checked next
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _unsafe(born: dict[str, Any], known: set[int]) -> str | None:
    """Why a fork of this process would not be as good as a new one; None where it is."""
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        names = sorted(_thread_name(thread) for thread in threads if int(thread) != os.getpid())
        return f"importing {_names(born)} started threads ({', '.join(names)})"
    with open(f"/proc/self/task/{threads[0]}/children", encoding="ascii") as file:
        if file.read().split():
            return f"importing {_names(born)} started processes"
    for name, target in _open_files():
        if target.startswith(_DEVICES):
            return f"importing {_names(born)} opened the device {target}"
        if target.startswith(_SHARED) and name not in known:
            return f"importing {_names(born)} opened a {target.partition(':')[0]}"
    return _shadowed(born)


def _shadowed(born: dict[str, Any]) -> str | None:
    """A module beside the script that took the place of another one while warming."""
    path0, wanted = born["path0"], {name.partition(".")[0] for name in born["preload"]}
    if path0 is None:
        return None
    inside = os.path.join(path0, "")
    installed = [entry for entry in sys.path if entry.startswith(inside)]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if not file.startswith(inside) or name.partition(".")[0] in wanted:
            continue
        if not any(file.startswith(os.path.join(entry, "")) for entry in installed):
            return f"{file} stands in for the module {name!r} that {_names(born)} needs"
    return None


def _names(born: dict[str, Any]) -> str:
    return ", ".join(born["preload"]) or "nothing"


def _thread_name(thread: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return thread


def _open_files() -> list[tuple[int, str]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed the directory is closed again
            found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


# ---- forking -----------------------------------------------------------------------------


def _keep_spares(
    born: dict[str, Any],
    queue: socket.socket,
    status: socket.socket,
    missing: list[str],
    seconds: float,
) -> None:
    """Keep that many spares waiting; returns only in one that was taken."""
    lives: list[int] = []  # one pipe for each spare: it ends when the spare is taken or dies
    told = False
    while True:
        while len(lives) < born["spares"]:
            spare, fd = _fork_spare(status, lives)
            if spare:
                worker.await_request(born, queue, fd)
                return
            lives.append(fd)
        if not told:
            worker.send_line(status, {"ready": round(seconds, 3), "missing": missing})
            told = True
        ready, _, _ = select.select([status.fileno(), *lives], [], [])
        if status.fileno() in ready:  # the agent speaks once; this is its end
            os._exit(0)
        for life in [life for life in lives if life in ready]:
            os.close(life)
            lives.remove(life)


def _fork_spare(status: socket.socket, lives: list[int]) -> tuple[bool, int]:
    """Fork twice, so that the spare becomes the agent's child; (whether we are it, its pipe).

    The spare holds the pipe's writing end for as long as it waits. It goes on once its first
    parent has been collected: then it has been handed on already, and asks for the death of its
    new parent, not of the old one, to be its own.
    """
    gate, opener = os.pipe()
    life, lifeline = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork():
            os._exit(0)
        os.close(opener)
        os.read(gate, 1)
        for held in (gate, life, *lives):
            os.close(held)
        status.close()
        return True, lifeline
    os.close(lifeline)
    _, ended = os.waitpid(between, 0)
    os.close(opener)
    os.close(gate)
    if ended != 0:
        _refuse(status, "it could not fork; look at the limits on processes and memory")
    return False, life
