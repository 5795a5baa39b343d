"""Answers about this installation, and small helpers of Horovod's API."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from elastic_driver.horovod.common.exceptions import HorovodUsageError


def gloo_built(verbose: bool = False) -> bool:
    """Return True: gloo carries the tensors of the CPU."""
    return True


def mpi_built(verbose: bool = False) -> bool:
    """Return False: MPI carries no tensor."""
    return False


def nccl_built(verbose: bool = False) -> int:
    """Return NCCL's version as a number, 22005 for 2.20.5; 0 where this torch has no NCCL."""
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10_000 + minor * 100 + patch)


def ddl_built(verbose: bool = False) -> bool:
    """Return False: IBM's DDL carries no tensor."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return False: oneCCL carries no tensor."""
    return False


def cuda_built() -> bool:
    """Return whether this torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether this torch was built for ROCm."""
    return torch.version.hip is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether torch sees a CUDA device; the name of the framework is not needed."""
    return bool(torch.cuda.is_available())


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether this API is there for a framework: for "torch" alone."""
    return ext_base_name == "torch"


def _cache(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is carried out once for each set of arguments."""
    return cache(f)


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set variables of the environment inside; those that are None stay as they are."""
    values = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether the number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: list[Any], n: int) -> list[list[Any]]:  # noqa: E741 - Horovod's name
    """Return `n` parts of the list, in order; their lengths differ by one at most."""
    least, longer = divmod(len(l), n)
    bounds = [part * least + min(part, longer) for part in range(n + 1)]
    return [l[a:b] for a, b in pairwise(bounds)]


def is_iterable(x: object) -> bool:
    """Return whether `iter(x)` works."""
    return isinstance(x, Iterable)


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, Any], Any]:
    """Return a function of `op` and the older `average` that returns the operation meant."""

    def operation(op: Any, average: bool | None) -> Any:
        if op is not None:
            if average is not None:
                raise HorovodUsageError("give op or average, not both; average is the older one")
            return op
        if average is None:
            return reduce_ops.Average
        return reduce_ops.Average if average else reduce_ops.Sum

    return operation
