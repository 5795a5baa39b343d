"""`DistributedOptimizer` on two ranks, and where there is no world."""

from __future__ import annotations

import pytest
import torch

import elastic_driver.horovod.torch as hvd
from tests.horovod.on_ranks import STALL, checks_of, run_on

pytestmark = pytest.mark.timeout(240)  # torch is imported by each rank


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank found."""
    return run_on(2, "optimizers.py", tmp_path_factory.mktemp("results"), STALL)


@pytest.mark.parametrize("check", checks_of("optimizers.py"))
def test_on_every_rank(results: list[dict[str, str]], check: str) -> None:
    for rank, found in enumerate(results):
        assert found[check] == "ok", f"rank {rank}:\n{found[check]}"


def test_a_step_in_no_world_is_an_error() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    weight.sum().backward()
    with pytest.raises(ValueError, match=r"call hvd.init\(\) first"):
        optimizer.step()
    assert weight.item() == 1.0
