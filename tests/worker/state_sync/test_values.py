"""What a state cannot keep is refused, by the path at which it stands."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.contents import TensorSpec, UnkeptError, fill_tensor
from elastic_driver.worker.state_sync.message import Writer
from elastic_driver.worker.state_sync.taking import Taker
from elastic_driver.worker.state_sync.values import looked_up


class Own:
    """A class of a script."""


class Text(str):
    """Text that could hold more than text."""

    __slots__ = ()


@dataclasses.dataclass
class Holder:
    inner: Any


UNKEPT: dict[str, Callable[[], Any]] = {
    "generator": lambda: (each for each in ()),
    "iterator": lambda: iter([1]),
    "file": io.StringIO,
    "lambda": lambda: lambda: 0,
    "object": Own,
    "subclass": Text,
    "graph": lambda: torch.ones(1, requires_grad=True) * 2,
    "sparse": lambda: torch.ones(2).to_sparse(),
}


@pytest.mark.parametrize("kind", UNKEPT)
@pytest.mark.parametrize(
    "use", [lambda v, p: Writer().write(v, p), lambda v, p: Taker().take(v, p)]
)
def test_what_cannot_be_kept_is_refused_with_its_path(kind: str, use: Any) -> None:
    thing = UNKEPT[kind]()
    with pytest.raises(UnkeptError, match=r"the attribute 'top\.a\.1\.inner' cannot") as caught:
        use({"a": [0, Holder(thing)]}, "top")
    assert caught.value.path == "top.a.1.inner"
    assert "\n" not in str(caught.value)


def test_only_names_of_loaded_modules_are_looked_up() -> None:
    assert looked_up("builtins", "dict.fromkeys") == dict.fromkeys
    assert looked_up("nowhere", "anything") is None
    assert looked_up("builtins", "nothing.at.all") is None
    assert looked_up(3, "dict") is None


def test_a_tensor_without_memory_of_its_own_fits_nothing() -> None:
    spec = TensorSpec.of(torch.ones(2, 3))
    assert spec.fits(torch.zeros(2, 3))
    assert not spec.fits(torch.zeros(1, 3).expand(2, 3))
    assert not spec.fits(torch.empty(2, 3, device="meta"))
    assert not spec.fits(torch.zeros(2, 3, dtype=torch.float64))


def test_a_dtype_that_this_torch_lacks_is_named() -> None:
    with pytest.raises(UsageError, match=r"torch\.float3, which torch .* does not know"):
        TensorSpec("float3", (1,), "cpu").allocate()


def test_a_resized_tensor_is_filled_all_the_same() -> None:
    tensor = torch.zeros(2)
    content = torch.arange(6.0).view(2, 3)
    fill_tensor(tensor, content)
    assert torch.equal(tensor, content)
    assert tensor.data_ptr() != content.data_ptr()
