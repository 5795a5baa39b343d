"""Root that has to keep to file permissions, for tests of what is forbidden to others."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_VERSION_3 = 0x20080522  # linux/capability.h, as are the others
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_Sets = ctypes.c_uint32 * 6  # effective, permitted, inheritable: low words, then high words
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, sets: ctypes.Array[ctypes.c_uint32]) -> None:
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)  # 0: the calling thread
    if getattr(_libc, name)(header, sets) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


@contextlib.contextmanager
def file_permissions_apply() -> Iterator[None]:
    """While this lasts, the calling thread may read and write only what file modes allow it."""
    before = _Sets()
    _call("capget", before)
    fewer = _Sets(*before)
    fewer[0] &= ~(1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH)
    _call("capset", fewer)
    try:
        yield
    finally:
        _call("capset", before)
