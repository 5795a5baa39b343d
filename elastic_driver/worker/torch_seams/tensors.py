"""Tensors: their versions, and functions for many of them in one call."""

from collections.abc import Sequence
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

# Each takes a list of tensors, and changes them in place.
copy_all = torch._foreach_copy_  # from a list of others
add_all = torch._foreach_add_  # a list of others, or a number
multiply_all = torch._foreach_mul_
divide_all = torch._foreach_div_

version_of = attrgetter("_version")  # grows with each change in place; RuntimeError: it has none
viewed_by = attrgetter("_base")  # the tensor of which this one is a view; None: of none
flatten = _flatten_dense_tensors  # tensors of one type → one vector
unflatten = _unflatten_dense_tensors  # (vector, tensors) → views of it in their shapes


def buckets(tensors: Sequence[Tensor], size: int) -> list[list[int]]:
    """Return the indices of tensors in each bucket of about `size` bytes, as DDP makes them."""
    found, _ = dist._compute_bucket_assignment_by_size(list(tensors), [size])
    return list(found)


def coordinates(sparse: Tensor) -> Tensor:
    """Return the indices of a sparse tensor, some perhaps twice; shape (dimensions, values)."""
    return sparse._indices()


def entries(sparse: Tensor) -> Tensor:
    """Return the values of a sparse tensor, in the order of `coordinates`."""
    return sparse._values()
