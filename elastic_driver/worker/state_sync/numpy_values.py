"""NumPy's arrays and scalars, as plain values; NumPy is imported only where a script uses it."""

import sys
import warnings
from typing import Any

LARGEST_BYTES = 2**32 - 1  # of an array, that msgpack carries


def _numpy() -> Any:
    return sys.modules.get("numpy")


def is_array(value: Any) -> bool:
    """Return whether a value is a NumPy array without objects."""
    numpy = _numpy()
    return numpy is not None and type(value) is numpy.ndarray and _travels(value)


def is_scalar(value: Any) -> bool:
    """Return whether a value is a NumPy scalar."""
    numpy = _numpy()
    return numpy is not None and isinstance(value, numpy.generic) and _travels(value)


def is_of_numpy(value: Any) -> bool:
    """Return whether a value is an array of NumPy, or a scalar of another kind than `is_scalar`."""
    numpy = _numpy()
    return numpy is not None and (
        type(value) is numpy.ndarray or (isinstance(value, numpy.generic) and not is_scalar(value))
    )


def _travels(value: Any) -> bool:
    """Return whether a NumPy value is one of plain data: its dtype can be written and read."""
    dtype = value.dtype
    found = _dtypes.get(dtype)
    if found is None:
        found = _dtypes[dtype] = not dtype.hasobject and _is_written_whole(dtype)
    return found and value.nbytes <= LARGEST_BYTES


_dtypes: dict[Any, bool] = {}


def written_dtype(dtype: Any) -> Any:
    """Return a dtype of NumPy as its file format writes it; what people add to it is left out."""
    import numpy  # noqa: PLC0415 - only where a script uses it

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what is left out
        return numpy.lib.format.dtype_to_descr(dtype)


def _is_written_whole(dtype: Any) -> bool:
    import numpy  # noqa: PLC0415 - only where a script uses it

    try:
        return bool(numpy.lib.format.descr_to_dtype(written_dtype(dtype)) == dtype)
    except (TypeError, ValueError):  # its fields overlap, or are of a kind of its own
        return False
