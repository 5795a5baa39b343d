"""Plain values: copies for a commit, and the form in which they are sent and stored.

`commit()` keeps plain attributes, schedulers and scalers as `copied` returns them. For sending,
`apart` takes the tensors out of a value, and `packed` turns the rest into bytes that torch's safe
unpickler (`weights_only=True`) reads: plain values, containers and tensors, but no code.
"""

import copy
import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elastic_driver.errors import UsageError

IMMUTABLE = frozenset({int, float, bool, str, bytes, complex, type(None), type, range, slice})
# The dtype (torch's name for it) and the shape of a tensor.
TensorKind = tuple[str, tuple[int, ...]]


def copied(value: Any) -> Any:
    """Return a copy of `value` that no later change of `value` reaches.

    Numbers, strings and containers of them take a few tenths of a microsecond; everything else
    goes to the slower `copy.deepcopy`. Not for parameters or optimizer state.
    """
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind([copied(item) for item in value])
    if kind is set:
        return set(value)
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value)


class TensorSpec(NamedTuple):
    """Dtype, shape and type of device ("cpu", "xpu") of a tensor that a receiver allocates."""

    dtype: str
    shape: tuple[int, ...]
    device: str

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Return the spec of a tensor; its first two fields are a `TensorKind`."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(dtype, tuple(tensor.shape), tensor.device.type)

    def allocate(self, device: str | None = None) -> Tensor:
        """Return an uninitialised tensor, on `device` or this process's device of the same type."""
        return torch.empty(self.shape, dtype=torch_dtype(self.dtype), device=device or self.device)


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype; raises `UsageError` where this version of torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        problem = f"the state has a torch.{name}, which torch {torch.__version__} does not know"
        raise UsageError(f"{problem}; use the version of torch that wrote it")
    return dtype


def apart(value: Any, path: str = "") -> tuple[Any, list[tuple[str, Tensor]]]:
    """Return `value` with each tensor replaced by an index into the list that comes with it.

    The list holds the dotted path of each tensor, which starts with `path`, and the tensor.
    Containers become tagged pairs, so that no value can be mistaken for an index.
    """
    tensors: list[tuple[str, Tensor]] = []

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors.append((path, value.detach()))
            return ("tensor", len(tensors) - 1)
        prefix = f"{path}." if path else ""
        if type(value) is dict:
            return ("dict", [(key, visit(item, f"{prefix}{key}")) for key, item in value.items()])
        if type(value) in (list, tuple):
            items = [visit(item, f"{prefix}{index}") for index, item in enumerate(value)]
            return (type(value).__name__, items)
        return ("value", value)

    return visit(value, path), tensors


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
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
