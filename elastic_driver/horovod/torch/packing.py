"""Objects of a script as bytes that torch's safe unpickler reads: Horovod's calls send them.

A script may allow classes of its own with `torch.serialization.add_safe_globals`, as for
`torch.load`. `apart` takes the tensors out of a value, which travel by themselves.
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.values import first_line


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
