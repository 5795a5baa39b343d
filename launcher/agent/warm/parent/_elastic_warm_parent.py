"""The warm parent: imports what workers need, then forks them on request.

It is the job's own command (`python train.py --epochs 3`), held by `sitecustomize` just before the
interpreter would run it. So everything a worker takes from its interpreter (flags, `sys.argv`,
`sys.path`, `__main__`, tracebacks, the exit status) is made by CPython itself, not imitated.

Three kinds of processes run this module: the *parent* (one), *spares* (forked, waiting for a
request, children of the agent already) and, for a moment, the process that becomes a worker. Where
several agents share a machine there is a *shared parent* too, from which agents are forked with
parents of their own (`_elastic_warm_shared`). It uses the standard library only, reads nothing but
its inherited sockets, and starts no thread. It never touches an accelerator: a process that forks
after that has a broken device (CUDA says "cannot re-initialize in forked subprocess").
"""

import atexit
import contextlib
import gc
import importlib
import os
import select
import socket
import sys
import time
import warnings
from importlib.machinery import FrozenImporter, PathFinder
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from launcher.agent.warm.parent import _elastic_warm_common as common
    from launcher.agent.warm.parent import _elastic_warm_shared as shared
    from launcher.agent.warm.parent import _elastic_warm_worker as worker
else:  # as `sys.path` has it here, where the project may not be importable at all
    import _elastic_warm_common as common
    import _elastic_warm_shared as shared
    import _elastic_warm_worker as worker

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")
_LET_START_S = 0.3
_MOST_DEATHS = 3
_SHARED = ("socket:", "pipe:", "anon_inode:")


def serve(conversation: str, baseline: frozenset[str]) -> None:
    """Be the warm parent for ever; returns only in a process that is to run the command.

    Args:
        conversation: two inherited descriptors: the queue of requests, which all spares read, and
            the line to the agent, whose end is our end.
        baseline: the modules that a new interpreter has imported by now.
    """
    queue_fd, status_fd = (int(number) for number in conversation.split(","))
    status = socket.socket(fileno=status_fd)
    queue = socket.socket(fileno=queue_fd)
    for held in (status, queue):
        held.set_inheritable(False)
    setup = {**common.receive_line(status), "baseline": baseline}
    if getattr(sys.flags, "safe_path", False):  # -P: nothing is found beside the script
        setup["path0"] = None
    os.environ.clear()
    os.environ.update(setup["env"])
    began = time.monotonic()
    if "shared" in setup:
        shared.bind_to(setup["parent"])
    missing = _warm_up(setup)
    _rehearse_fork()
    sys.stdout.flush()  # what an import printed is no worker's output
    reason = _unsafe(setup, {0, 1, 2, queue_fd, status_fd}) or _shadowed(setup)
    if reason:
        _refuse(status, reason)
    sys.path_importer_cache.pop(setup["path0"], None)  # a worker looks at the folder anew
    torch: Any = sys.modules.get("torch")
    setup["thread_setters"] = common.thread_setters(torch) if torch else []
    gc.collect()
    gc.freeze()  # the collector no longer writes to these objects: their pages stay shared
    atexit.register(gc.unfreeze)  # at its end a worker collects what hangs together with them
    setup["ready"] = {
        "ready": round(time.monotonic() - began, 3),
        "missing": missing,
        "threads": torch.get_num_threads() if torch else 0,
    }
    if "shared" in setup:
        queue, status = shared.fork_agents(setup, queue, status)
    _keep_spares(setup, queue, status)


def _refuse(status: socket.socket, reason: str) -> NoReturn:
    common.send_line(status, {"refused": reason})
    os._exit(0)


# ---- warming -----------------------------------------------------------------------------


def _warm_up(setup: dict[str, Any]) -> list[str]:
    """Import the modules as the script would; return a line for each that cannot be had."""
    missing: list[str] = []
    path0: str | None = setup["path0"]
    gc.disable()  # until the fork: most of what an import makes lives as long as the process
    if path0 is not None:
        sys.path.insert(0, path0)
    for name in setup["preload"]:
        try:
            importlib.import_module(name)
        except Exception as error:
            missing.append(f"{name}: {type(error).__name__}: {error}")
    if "torch" in sys.modules and not any(line.startswith("torch:") for line in missing):
        if setup["rehearse"]:
            common.first_step(sys.modules["torch"])
        common.let_last_work_end(sys.modules["torch"])
    if path0 is not None:
        sys.path.remove(path0)
    return missing


def _rehearse_fork() -> None:
    """Fork once for nothing: thread pools that know about forks (OpenBLAS) stop for it.

    Threads that still run afterwards do not know, and would be missing in a worker.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python >= 3.12 warns of exactly what is checked next
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _unsafe(setup: dict[str, Any], known: set[int]) -> str | None:
    """Return why a fork of this process would not be as good as a new one; None where it is."""
    names = ", ".join(setup["preload"]) or "nothing"
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        others = sorted(_thread_name(thread) for thread in threads if int(thread) != os.getpid())
        return f"importing {names} started threads ({', '.join(others)})"
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
    """Return which module beside the script would take the place of an imported one, if any."""
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


def _thread_name(thread: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return thread


# ---- forking -----------------------------------------------------------------------------


def _keep_spares(setup: dict[str, Any], queue: socket.socket, status: socket.socket) -> None:
    """Keep that many spares waiting; returns only in one that was taken."""
    lives: list[int] = []  # one pipe for each spare: it says when the spare is taken or dies
    deaths = 0  # in a row
    announced = False
    while True:
        while len(lives) < setup["spares"]:
            spare, fd = _fork_spare(status, lives)
            if spare:
                worker.await_request(setup, queue, fd)
                return
            if not os.read(fd, 1):
                _refuse(status, "a fork did not become the agent's child; is it a child subreaper?")
            lives.append(fd)
        if not announced:
            common.send_line(status, setup["ready"])
            announced = True
        ready, _, _ = select.select([status.fileno(), *lives], [], [])
        if status.fileno() in ready:  # the agent speaks once; this is its end
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


def _fork_spare(status: socket.socket, lives: list[int]) -> tuple[bool, int]:
    """Fork a spare, which is the agent's child; return whether we are it, and its pipe.

    The spare holds the pipe's writing end for as long as it waits.
    """
    life, lifeline = os.pipe()
    ended = common.fork_apart()
    if ended is None:
        for held in (life, *lives):
            os.close(held)
        status.close()
        return True, lifeline
    os.close(lifeline)
    if ended != 0:
        _refuse(status, "it could not fork; look at the limits on processes and memory")
    return False, life
