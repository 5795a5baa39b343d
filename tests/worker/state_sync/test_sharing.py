"""State moved between real ranks: every kind of tensor, in place, in bounded chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync import transfer
from elastic_driver.worker.state_sync.parts import OptimizerPart, StatePart, TensorSpec, part_for
from elastic_driver.worker.state_sync.rng import RandomStates
from elastic_driver.worker.state_sync.sharing import LiveState, receive, send, stand_by
from elastic_driver.worker.state_sync.transfer import Route
from elastic_driver.worker.state_sync.values import apart, join, packed, unpacked
from tests.support.gloo import run_ranks
from tests.worker.training import digest


def test_a_value_is_the_same_after_being_taken_apart() -> None:
    value = {"a": [torch.ones(2), ("tensor", 0)], 3: {"deep": (None, torch.zeros(1))}}
    document, tensors = apart(value, "v")
    assert [path for path, _ in tensors] == ["v.a.0", "v.3.deep.1"]
    again = join(unpacked(packed(document, "x")), [tensor for _, tensor in tensors])
    assert torch.equal(again["a"][0], torch.ones(2))
    assert again["a"][1] == ("tensor", 0), "a value that looks like an index stays a value"
    assert again[3]["deep"][0] is None


def test_code_is_refused_when_packed_and_when_unpacked() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (print, ("run",))

    with pytest.raises(UsageError, match="the thing cannot be sent"):
        packed(Evil(), "the thing")


def share(
    rank: int, size: int, seed: int, chunk: int, receivers: frozenset[int]
) -> tuple[str, str]:
    """Rank 1 sends; others stand by or have no part. (digest before, digest after)"""
    transfer.CHUNK_BYTES = chunk
    transfer.ALONE_BYTES = 64
    route = Route(1, receivers)
    torch.manual_seed(seed + rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1).double())
    model.register_parameter("strided", nn.Parameter(torch.rand(3, 4).t()))
    model.register_buffer("flags", torch.rand(9) > 0.5)
    model.register_parameter("small", nn.Parameter(torch.rand(3).to(torch.bfloat16)))
    model.register_buffer("none", torch.empty(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank not in receivers:  # a receiver's optimizer has made no state of its own yet
        for parameter in model.parameters():
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
    values: dict[str, Any] = {"model": model, "optimizer": optimizer, "note": [rank, {"r": rank}]}
    parts: dict[str, StatePart] = {
        name: part for name, value in values.items() if (part := part_for(name, value)) is not None
    }
    shared = LiveState(parts, values, RandomStates())
    pointers = [p.data_ptr() for p in model.parameters()]
    before = digest(model.state_dict(), optimizer.state_dict(), values["note"])
    if rank == 1:
        send(shared, route)
    elif rank in receivers:
        receive(shared, route, newcomer=True)
    elif route.takes_all:
        stand_by(route)
    assert [p.data_ptr() for p in model.parameters()] == pointers, "written in place"
    return before, digest(model.state_dict(), optimizer.state_dict(), values["note"])


@pytest.mark.parametrize("chunk", [32, 1 << 20])
def test_one_receiver_has_the_senders_state_and_nobody_else_takes_part(
    tmp_path: Path, chunk: int
) -> None:
    only = frozenset({0})
    (_, received), (sent, after), (before, kept) = run_ranks(3, share, tmp_path, 5, chunk, only)
    assert sent == after == received
    assert before == kept
    assert before != sent


@pytest.mark.parametrize("chunk", [32, 1 << 20])
def test_several_receivers_have_the_senders_state_and_a_bystander_its_own(
    tmp_path: Path, chunk: int
) -> None:
    both = frozenset({0, 3})
    (_, one), (sent, after), (before, kept), (_, other) = run_ranks(
        4, share, tmp_path, 5, chunk, both
    )
    assert sent == after == one == other
    assert before == kept
    assert before != sent


def test_optimizer_state_of_another_dtype_than_its_parameter_stays_exact() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    exact = torch.tensor([1.0000001, 2.0, 3.0])
    document, tensors = apart({**optimizer.state_dict(), "state": {0: {"momentum_buffer": exact}}})
    OptimizerPart("o", optimizer).accept(document, [tensor for _, tensor in tensors])
    found = optimizer.state[parameter]["momentum_buffer"]
    assert found.dtype == torch.float32
    assert torch.equal(found, exact)


def test_a_model_that_is_built_differently_is_named() -> None:
    mine, theirs = part_for("net", nn.Linear(2, 2)), part_for("net", nn.Linear(2, 3))
    assert mine is not None
    assert theirs is not None
    document, tensors = theirs.outgoing()
    with pytest.raises(UsageError, match="net is built differently"):
        mine.places(document, [TensorSpec.of(tensor) for _, tensor in tensors])
