"""Root that has to keep to file permissions, for tests of what is forbidden to others."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_VERSION_3 = 0x20080522  # linux/capability.h, as are the others
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_Sets = ctypes.c_uint32 * 6  # effective, permitted, inheritable; then the same, bits 32 and up
_libc = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")


def where_permissions_apply(call: Callable[[], T]) -> T:
    """Return what `call` returns in a thread that may only access what file modes allow.

    A thread of its own, since access(2) looks at what root may take back.
    """
    with ThreadPoolExecutor(1, initializer=_give_up_file_access) as thread:
        return thread.submit(call).result()


def _give_up_file_access() -> None:
    sets = _Sets()
    _call("capget", sets)
    for kind in range(3):
        sets[kind] &= ~(1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH)
    _call("capset", sets)


def _call(name: str, sets: ctypes.Array[ctypes.c_uint32]) -> None:
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)  # 0: the calling thread
    if getattr(_libc, name)(header, sets) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
