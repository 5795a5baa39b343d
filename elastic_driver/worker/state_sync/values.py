"""Plain values: copies for a commit, and the form in which they are sent and stored.

`copied` is what `commit()` keeps of plain attributes, schedulers and scalers. `apart` takes the
tensors out of a value, `packed` turns the rest into bytes that torch's safe unpickler
(`weights_only=True`) reads back: plain values, containers and tensors pass, code does not.
"""

import copy
import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from elastic_driver.errors import UsageError

_IMMUTABLE = frozenset({int, float, bool, str, bytes, complex, type(None), type, range, slice})


# ---- copies ------------------------------------------------------------------------------


def is_immutable(value: Any) -> bool:
    """Return whether a value can never change, so that it is its own copy."""
    kind = type(value)
    return kind in _IMMUTABLE or (kind is tuple and all(map(is_immutable, value)))


def copied(value: Any) -> Any:
    """Return a copy of `value` that no later change of `value` reaches.

    Numbers, strings and containers of them take a few tenths of a microsecond; everything else
    goes to the slower `copy.deepcopy`. Not for parameters or optimizer state.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list:
        return [copied(item) for item in value]
    if kind is tuple:
        return tuple(copied(item) for item in value)
    if kind is set:
        return set(value)
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value)


# ---- values without their tensors --------------------------------------------------------


class TensorKind(Struct, frozen=True, array_like=True):
    """The dtype (torch's name for it) and the shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorKind":
        """Return the kind of a tensor."""
        return TensorKind(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """torch's dtype; raises `UsageError` where this version of torch has none."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"no torch.{self.dtype} here; use the version of torch that wrote it")
        return dtype


def apart(value: Any, path: str = "") -> tuple[Any, list[tuple[str, Tensor]]]:
    """Return `value` with each tensor replaced by an index into the list that comes with it.

    The list holds the dotted path of each tensor, which starts with `path`, and the tensor.
    Containers become tagged pairs, so that no value can be mistaken for an index.
    """
    tensors: list[tuple[str, Tensor]] = []
    return _apart(value, path, tensors), tensors


def _apart(value: Any, path: str, tensors: list[tuple[str, Tensor]]) -> Any:
    if isinstance(value, Tensor):
        tensors.append((path, value.detach()))
        return ("tensor", len(tensors) - 1)
    prefix = f"{path}." if path else ""
    if type(value) is dict:
        pairs = value.items()
        return ("dict", [(key, _apart(item, f"{prefix}{key}", tensors)) for key, item in pairs])
    if type(value) in (list, tuple):
        items = enumerate(value)
        return (type(value).__name__, [_apart(v, f"{prefix}{i}", tensors) for i, v in items])
    return ("value", value)


def join(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the value that was taken `apart`, with these tensors in their places."""
    kind, content = tree
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: join(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [join(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    return content


def packed(value: Any, what: str) -> bytes:
    """Return `value` in the form that `unpacked` reads.

    Raises `UsageError`, naming `what`, for a value that the safe unpickler would refuse.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        unpacked(buffer.getvalue())
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"{what} cannot be sent to other workers: {first_line(error)}. Give its class "
            "state_dict() and load_state_dict(), keep plain values and tensors in the state, or "
            f"allow {type(value).__name__} with torch.serialization.add_safe_globals([...])"
        ) from error
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the value in `data`; raises `pickle.UnpicklingError` for more than plain data."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, or its type where there is no message."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
