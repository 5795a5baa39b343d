"""The gradients of micro-batches become that of the step; here in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic_driver.worker.batching.gradients import ExactSum, PlainSum, StepSum


def add_up(sums: StepSum, model: nn.Module, leaves: list[float | None]) -> torch.Tensor | None:
    """The step's gradient from one number, or none, of each of equally large micro-batches."""
    sums.begin([range(len(leaves))], [1 / len(leaves)] * len(leaves), rank=0)
    for virtual_worker, leaf in enumerate(leaves):
        sums.before(virtual_worker)
        if leaf is not None:
            gradient = torch.full((1, 1), float(leaf))
            old = model.weight.grad
            model.weight.grad = gradient if old is None else old + gradient
        sums.after(virtual_worker)
    sums.finish()
    return model.weight.grad


@pytest.mark.parametrize("kind", [PlainSum, ExactSum])
@pytest.mark.parametrize(
    ("leaves", "expected"),
    [([1, 2, 6], 3.0), ([None, 4], 2.0), ([4, None], 2.0), ([None, None], None)],
)
def test_a_micro_batch_without_a_gradient_counts_as_zeros(
    kind: type[StepSum], leaves: list[float | None], expected: float | None
) -> None:
    model = nn.Linear(1, 1, bias=False)
    found = add_up(kind(model), model, leaves)
    assert (None if found is None else found.item()) == pytest.approx(expected)


@pytest.mark.parametrize("leaves", [[-0.0, None], [None, -0.0]])
def test_in_the_fixed_tree_a_missing_gradient_adds_positive_zeros_as_it_does_on_its_way(
    leaves: list[float | None],
) -> None:
    model = nn.Linear(1, 1, bias=False)
    found = add_up(ExactSum(model), model, leaves)
    assert found is not None
    assert not found.signbit().item()
