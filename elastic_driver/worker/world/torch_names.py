"""What torch's own functions say and do in a world that `groups` has made.

Our backend is gloo's object under another name, by which torch finds the function that makes it.
Scripts, and torch itself, ask for the name: `monitored_barrier()` and the differentiable
`all_to_all()` are for "gloo" only. So torch's functions that take or return a name are replaced by
ones that translate it. Where a device has collectives of its own, its half names the group.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import Join

from elastic_driver.errors import UsageError
from elastic_driver.worker.torch_seams import process_groups

BACKEND = "elastic_gloo"
_REMOVE = "remove the call, or make it only where elastic-driver is not used"


class _Installed:
    """The mutable fields of this module."""

    done = False
    ours = False  # the call of `init_process_group` is that of `groups`


def translate() -> None:
    """Have torch's functions speak of "gloo"; a second call does nothing. On the main thread."""
    if _Installed.done:
        return
    _Installed.done = True
    _replace("get_backend", _get_backend)
    _replace("new_group", _new_group)
    _replace("init_process_group", _init_process_group)
    notify = Join.notify_join_context

    @functools.wraps(notify)
    def notify_join_context(joinable: Any) -> Any:
        work = notify(joinable)
        if (see := getattr(joinable, "see_join_work", None)) is not None:
            see(work)
        return work

    Join.notify_join_context = staticmethod(notify_join_context)


def make_group(name: str, *args: Any) -> None:
    """Call torch's `init_process_group`; raises `UsageError` where the script has called it."""
    if dist.is_initialized():
        raise UsageError(
            "the script has called init_process_group() before the function under @elastic.run, in "
            f"which elastic-driver makes torch's process group: {_REMOVE}"
        )
    _Installed.ours = True
    try:
        dist.init_process_group(name, *args)
    finally:
        _Installed.ours = False


def _replace(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    replaced = make(getattr(c10d, name))
    setattr(c10d, name, replaced)
    setattr(dist, name, replaced)


def _get_backend(of_torch: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(of_torch)
    def get_backend(group: Any = None) -> str:
        name = of_torch(group)
        if BACKEND not in name:
            return name
        _, _, device = name.partition(",")
        return device.partition(":")[2] or dist.Backend.GLOO

    return get_backend


def _new_group(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(of_torch)
    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: str | None = None,
        *args: Any,
        **others: Any,
    ) -> Any:
        """See torch: a group of "gloo" is one of this world, and breaks with it."""
        if backend == dist.Backend.GLOO and BACKEND in of_world():
            backend = BACKEND
        return of_torch(ranks, timeout, backend, *args, **others)

    return new_group


def of_world() -> str:
    """Return torch's name of the default group's backend; "" where there is none."""
    if not dist.is_initialized():
        return ""
    return process_groups.backend_names(process_groups.default_group())


def _init_process_group(of_torch: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(of_torch)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not _Installed.ours and BACKEND in of_world():
            raise UsageError(
                "init_process_group() is called in a world, for which elastic-driver has made "
                f"torch's process group: {_REMOVE}"
            )
        of_torch(*args, **kwargs)

    return init_process_group
