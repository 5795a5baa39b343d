"""The warm parent: imports what workers need, then forks them on request.

It is the job's own command (`python train.py --epochs 3`); `sitecustomize` holds it just before the
interpreter would run the script. So CPython itself makes all that a worker takes from its
interpreter (flags, `sys.argv`, `sys.path`, `__main__`, tracebacks, the exit status).

Its owner is an agent, or the local backend where several agents share this machine. It keeps
*spares*: processes that are forked in advance, are the owner's children already, and wait for a
request (`_elastic_warm_worker`). Each agent that the backend requests gets a warm parent of its
own, which is a fork too and runs the same code.

It uses the standard library only, reads nothing but its inherited sockets, and starts no thread. It
never touches an accelerator: a process that forks after that has a broken device (CUDA says "cannot
re-initialize in forked subprocess").
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import select
import socket
import sys
import time
import warnings
from collections.abc import Callable
from importlib.machinery import FrozenImporter, PathFinder
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from launcher.agent.warm.parent import _elastic_warm_worker as worker
else:  # as `sys.path` has it here, where the project may not be importable at all
    import _elastic_warm_worker as worker

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")
_SHARED = ("socket:", "pipe:", "anon_inode:")
_BLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)
_LAST_WORK_S = 0.05
_LET_START_S = 0.3
_MOST_DEATHS = 3


def serve(conversation: str, baseline: frozenset[str]) -> None:
    """Run the warm parent until it ends; return only in a worker, which then runs the command.

    Args:
        conversation: two inherited descriptors: the queue of requests, which all spares read, and
            the connection to our owner; we end when it closes.
        baseline: the modules that a new interpreter has imported by now.
    """
    queue_fd, status_fd = (int(number) for number in conversation.split(","))
    status = socket.socket(fileno=status_fd)
    queue = socket.socket(fileno=queue_fd)
    for held in (status, queue):
        held.set_inheritable(False)
    setup = {**worker.receive_line(status), "baseline": baseline}
    if getattr(sys.flags, "safe_path", False):  # -P: nothing is found beside the script
        setup["path0"] = None
    os.environ.clear()
    os.environ.update(setup["env"])
    began = time.monotonic()
    worker.die_with(setup["parent"])
    missing = _warm_up(setup)
    with warnings.catch_warnings():
        # Fork once for nothing: thread pools that know about forks (OpenBLAS) stop their threads
        # for it. Other threads still run afterwards, and would be missing in a worker.
        warnings.simplefilter("ignore")  # Python >= 3.12 warns of threads, which are checked next
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    sys.stdout.flush()  # output of an import is no worker's output
    reason = _unsafe(setup, {0, 1, 2, queue_fd, status_fd}) or _shadowed(setup)
    if reason:
        _refuse(status, reason)
    sys.path_importer_cache.pop(setup["path0"], None)  # a worker looks at the folder anew
    torch: Any = sys.modules.get("torch")
    setup["thread_setters"] = _thread_setters(torch) if torch else []
    gc.collect()
    gc.freeze()  # the collector no longer writes to these objects: their pages stay shared
    atexit.register(gc.unfreeze)  # at its end a worker collects what hangs together with them
    setup["ready"] = {
        "ready": round(time.monotonic() - began, 3),
        "missing": missing,
        "threads": torch.get_num_threads() if torch else 0,
    }
    ends: worker.Ends | None = (queue, status)
    while ends is not None:  # once more in the warm parent of an agent that was forked
        ends = _keep_spares(setup, *ends)


def _refuse(status: socket.socket, reason: str) -> NoReturn:
    worker.send_line(status, {"refused": reason})
    os._exit(0)


# ---- warming -----------------------------------------------------------------------------


def _warm_up(setup: dict[str, Any]) -> list[str]:
    """Import the modules as the script would; return a line for each that cannot be imported."""
    missing: list[str] = []
    path0: str | None = setup["path0"]
    gc.disable()  # until the fork: most objects of an import live as long as the process
    if path0 is not None:
        sys.path.insert(0, path0)
    for name in setup["preload"]:
        try:
            importlib.import_module(name)
        except Exception as error:
            missing.append(f"{name}: {type(error).__name__}: {error}")
    if "torch" in sys.modules and not any(line.startswith("torch:") for line in missing):
        if setup["rehearse"]:
            worker.first_step(sys.modules["torch"])
        _let_last_work_end(sys.modules["torch"])
    if "rendezvous.tls" in sys.modules:
        sys.modules["rendezvous.tls"].context_without_chain()
    if path0 is not None:
        sys.path.remove(path0)
    return missing


def _let_last_work_end(torch: Any) -> None:
    """Keep torch from a deadlock if a DistributedDataParallel object outlives its group.

    The object's reducer is then the group's last owner, and waits for the group's threads while it
    holds the interpreter's lock. A thread that frees its last work may still need this lock (seen
    with torch 2.13; for destructors that block see pytorch's issue 56297). A new process is rarely
    fast enough for it, because it makes its imports first; a warm worker is.
    """
    wrapper = torch.nn.parallel.DistributedDataParallel

    def wait_without_lock(_ddp: Any, pause: Callable[[float], None] = time.sleep) -> None:
        if not torch.distributed.is_initialized():
            pause(_LAST_WORK_S)

    if not hasattr(wrapper, "__del__"):
        wrapper.__del__ = wait_without_lock


def _thread_setters(torch: Any) -> list[Callable[[int], Any]]:
    """Return the setters for another OMP_NUM_THREADS: of torch, and of numpy's OpenBLAS.

    The warm parent finds them in advance, so that the start of a worker takes no time for it.
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


def _unsafe(setup: dict[str, Any], known: set[int]) -> str | None:
    """Return why this process must not be forked; None if forks are as good as new processes."""
    names = ", ".join(setup["preload"]) or "nothing"
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        others = []
        for thread in set(threads) - {str(os.getpid())}:
            comm = f"/proc/self/task/{thread}/comm"
            with contextlib.suppress(OSError), open(comm, errors="replace") as file:
                others.append(file.read().strip())
        return f"importing {names} started threads ({', '.join(sorted(others))})"
    with open(f"/proc/self/task/{threads[0]}/children", encoding="ascii") as file:
        if file.read().split():
            return f"importing {names} started processes"
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed the directory is closed again
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith(_DEVICES):
                return f"importing {names} opened the device {target}"
            if target.startswith(_SHARED) and int(number) not in known:
                return f"importing {names} opened a {target.partition(':')[0]}"
    return None


def _shadowed(setup: dict[str, Any]) -> str | None:
    """Return a problem if a module beside the script would replace an imported one; else None."""
    path0 = setup["path0"]
    if path0 is None:
        return None
    for name in sorted({name.partition(".")[0] for name in sys.modules}):
        if name in setup["baseline"] or FrozenImporter.find_spec(name) is not None:
            continue  # a new interpreter has it before it looks at the script's folder
        beside = PathFinder.find_spec(name, [path0])
        if beside is None or beside.loader is None:
            continue
        other = PathFinder.find_spec(name)
        if other is not None and other.loader is not None and other.origin != beside.origin:
            names = ", ".join(setup["preload"]) or "nothing"
            return f"{beside.origin} takes the place of a module that {names} needs"
    return None


# ---- forking -----------------------------------------------------------------------------


def _keep_spares(
    setup: dict[str, Any], queue: socket.socket, status: socket.socket
) -> worker.Ends | None:
    """Keep the plan's number of spares waiting; return only in a spare that was taken.

    There it returns the value of `await_request`.
    """
    lives: list[int] = []  # one pipe for each spare: it says when the spare is taken or dies
    deaths = 0  # in a row
    announced = False
    while True:
        while len(lives) < setup["spares"]:
            life, lifeline = os.pipe()
            if not _fork_apart(status):
                for held in (life, *lives):
                    os.close(held)
                status.close()
                return worker.await_request(setup, queue, lifeline)
            os.close(lifeline)
            if not os.read(life, 1):
                _refuse(status, "a fork did not become our owner's child; is it a child subreaper?")
            lives.append(life)
        if not announced:
            worker.send_line(status, setup["ready"])
            announced = True
        ready, _, _ = select.select([status.fileno(), *lives], [], [])
        if status.fileno() in ready:  # the owner speaks once; this is its end
            os._exit(0)
        for life in [life for life in lives if life in ready]:
            deaths = 0 if os.read(life, 1) else deaths + 1
            os.close(life)
            lives.remove(life)
        if deaths > _MOST_DEATHS:
            _refuse(status, f"{deaths} processes forked in advance have died, one after another")
        # A request that is there already is served at once; otherwise the fork waits, so that
        # the worker that has just started takes its first steps on a core of its own.
        select.select([status, queue], [], [], _LET_START_S)


def _fork_apart(status: socket.socket) -> bool:
    """Fork twice, so that the second child becomes our owner's, which adopts orphans.

    Return False in that child, once its first parent has been collected: then the owner has adopted
    it, and its parent-death signal concerns the owner. Return True for us.
    """
    gate, opener = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork():
            os._exit(0)
        os.close(opener)
        os.read(gate, 1)
        os.close(gate)
        return False
    _, ended = os.waitpid(between, 0)
    os.close(opener)
    os.close(gate)
    if ended != 0:
        _refuse(status, "it could not fork; look at the limits on processes and memory")
    return True
