"""The node check's transformer: as large as there is room for, and a real one."""

from __future__ import annotations

import pytest
import torch

from elastic_driver.features.checks.worker.measure import (
    MEMORY_SHARE,
    SIZES,
    SMALLEST,
    Transformer,
    largest_that_fits,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("free", "name"),
    [(0, "on a CPU"), (4, "124M"), (8, "355M"), (16, "774M"), (24, "1.5B"), (80, "1.5B")],
)
def test_the_largest_model_that_fits_is_chosen(free: int, name: str) -> None:
    assert SIZES[largest_that_fits(free * GIB)].name == name


def test_a_model_never_needs_more_than_its_share_of_the_memory() -> None:
    for free in range(1, 100):
        chosen = largest_that_fits(free * GIB)
        assert SIZES[chosen].needed <= MEMORY_SHARE * free * GIB


def test_the_number_of_parameters_is_the_one_that_is_reckoned_with() -> None:
    model = Transformer(SMALLEST)
    assert sum(p.numel() for p in model.parameters()) == SMALLEST.parameters
    assert [round(size.parameters / 1e6) for size in SIZES[1:]] == [124, 354, 773, 1557]


def test_a_token_is_predicted_from_earlier_ones_only() -> None:
    torch.manual_seed(0)
    model = Transformer(SMALLEST)
    batch = torch.randint(SMALLEST.vocabulary, (1, 8))
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda _module, _args, output: seen.append(output))
    model(batch)
    batch[0, -1] = (batch[0, -1] + 1) % SMALLEST.vocabulary
    model(batch)
    torch.testing.assert_close(seen[0][:, :-1], seen[1][:, :-1])
    assert not torch.equal(seen[0][:, -1], seen[1][:, -1])


def test_every_parameter_gets_a_gradient() -> None:
    model = Transformer(SMALLEST)
    model(torch.randint(SMALLEST.vocabulary, (2, SMALLEST.tokens))).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.abs().sum() > 0), name
