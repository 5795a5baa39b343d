"""What a warm parent does to torch, and to itself, so that a fork trains at once.

The rule that shapes it: no accelerator is touched, no thread is started. A CUDA driver that was
asked for its devices is unusable in forks, and a thread pool exists only where it was started.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

_ACCELERATORS = ("cuda", "hip", "xpu")
_BLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)
_LAST_WORK_S = 0.05


def first_step(torch: Any) -> None:
    """One optimizer step on the CPU, in one thread: 1 s of imports, and memory that is written.

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
    """Who must be told of another OMP_NUM_THREADS than they have read: torch, numpy's OpenBLAS.

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
