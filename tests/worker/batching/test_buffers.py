"""What the micro-batches of a step make of a model's buffers; here in one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_driver.errors import UsageError
from elastic_driver.worker.batching.gradients import ExactSum, PlainSum, StepSum
from tests.worker.batching import kinds

WEIGHTS = {"full": [1 / 4] * 4, "short": [3 / 10, 3 / 10, 2 / 10, 2 / 10]}
BOTH = pytest.mark.parametrize("kind", [PlainSum, ExactSum])


def parts_of(weights: list[float], step: int = 0) -> list[Tensor]:
    """Micro-batches of as many samples as these weights say; the first number changes its sign."""
    generator = torch.Generator().manual_seed(step)
    sizes = [4 if weight == 1 / 4 else round(10 * weight) for weight in weights]
    parts = [torch.randn(size, 4, generator=generator) for size in sizes]
    for number, part in enumerate(parts):
        part[0, 0] = (-1) ** number
    return parts


def train(sums: StepSum, model: nn.Module, parts: list[Tensor], weights: list[float]) -> None:
    """Make one step, in this process alone."""
    sums.begin([range(len(parts))], weights, 0, "step 0 of epoch 0")
    try:
        for virtual_worker, part in enumerate(parts):
            sums.before(virtual_worker)
            model(part).square().mean().backward()
            sums.after(virtual_worker)
        sums.finish()
    except UsageError:
        sums.abandon()
        raise


def close(found: Tensor, expected: Any) -> None:
    wanted = torch.as_tensor(expected).to(found.dtype)
    tolerance = 1e-2 if found.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


@BOTH
@pytest.mark.parametrize("shares", WEIGHTS)
@pytest.mark.parametrize("name", kinds.SUMMED)
def test_a_buffer_is_combined_by_its_rule(name: str, shares: str, kind: type[StepSum]) -> None:
    make, expected = kinds.SUMMED[name]
    model = kinds.Kept(make())
    weights = WEIGHTS[shares]
    parts = parts_of(weights)
    train(kind(model), model, parts, weights)
    close(model.keeper.kept, expected(parts, weights))


@BOTH
@pytest.mark.parametrize("name", ["counter", "float counter"])
def test_a_counter_counts_steps_without_rounding(name: str, kind: type[StepSum]) -> None:
    """1/49 of 49 is not 1, in numbers of a computer."""
    model = kinds.Kept(kinds.SUMMED[name][0]())
    sums = kind(model)
    start = model.keeper.kept.item()
    for step in range(1, 4):
        parts = [torch.randn(2, 4) for _ in range(49)]
        train(sums, model, parts, [1 / 49] * 49)
        assert model.keeper.kept.item() == start + step * (2 if name == "counter" else 1)


@BOTH
def test_the_bits_of_what_micro_batches_do_not_change_stay(kind: type[StepSum]) -> None:
    start = torch.tensor([1 / 3, -1e9, 0.1, float("-inf")])
    model = kinds.Kept(kinds.Keeper(start, lambda kept, x: torch.where(kept == 0.1, x[0], kept)))
    train(kind(model), model, [torch.randn(2, 4) for _ in range(49)], [1 / 49] * 49)
    unchanged = torch.tensor([True, True, False, True])
    assert torch.equal(model.keeper.kept[unchanged], start[unchanged])


@BOTH
@pytest.mark.parametrize("rebind", [False, True])
def test_a_buffer_keeps_its_identity_and_starts_each_micro_batch_from_the_steps_start(
    kind: type[StepSum], rebind: bool
) -> None:
    model = kinds.Kept(kinds.Keeper(torch.zeros(4), lambda kept, x: kept + x.mean(0), rebind))
    buffer, sums = model.keeper.kept, kind(model)
    wanted = torch.zeros(4)
    for step in range(3):
        parts = parts_of(WEIGHTS["full"], step)
        train(sums, model, parts, WEIGHTS["full"])
        wanted += sum(part.mean(0) for part in parts) / 4
    assert model.keeper.kept is buffer
    close(buffer, wanted)


@BOTH
def test_buffers_that_are_replaced_added_resized_or_dropped_between_steps_are_those_of_now(
    kind: type[StepSum],
) -> None:
    model = kinds.Kept(kinds.Keeper(torch.zeros(4), lambda kept, x: x.mean(0)))
    sums = kind(model)
    parts, weights = parts_of(WEIGHTS["full"]), WEIGHTS["full"]
    train(sums, model, parts, weights)
    wanted = sum(part.mean(0) for part in parts) / 4

    model.keeper.kept = torch.full((4,), 5.0)  # rebound
    train(sums, model, parts, weights)
    close(model.keeper.kept, wanted)

    model.keeper = kinds.Keeper(torch.zeros(2), lambda kept, x: x.mean(0)[:2])  # another module
    train(sums, model, parts, weights)
    close(model.keeper.kept, wanted[:2])

    model.keeper.kept.resize_(4).zero_()
    model.keeper.update = lambda kept, x: x.mean(0)
    model.register_buffer("late", torch.zeros(()))

    def counts(module: nn.Module, inputs: tuple[Tensor], _: Tensor) -> None:
        module.late.add_(inputs[0].mean())

    model.register_forward_hook(counts)
    train(sums, model, parts, weights)
    close(model.keeper.kept, wanted)
    close(model.late, wanted.mean())

    del model.keeper._buffers["kept"]
    model.keeper.update, model.keeper.kept = lambda kept, x: None, None
    train(sums, model, parts, weights)
    assert "kept" not in model.keeper._buffers


@BOTH
@pytest.mark.parametrize("name", kinds.QUANTIZERS)
def test_a_fake_quantizers_scale_is_that_of_its_combined_observer(
    name: str, kind: type[StepSum]
) -> None:
    model = kinds.Kept(kinds.QUANTIZERS[name]())
    sums = kind(model)
    for step in range(3):
        train(sums, model, parts_of(WEIGHTS["full"], step), WEIGHTS["full"])
        keeper: Any = model.keeper
        scale, zero_point = keeper.activation_post_process.calculate_qparams()
        close(keeper.scale, scale)
        assert torch.equal(keeper.zero_point, zero_point.to(keeper.zero_point.dtype))
        assert keeper.scale.isfinite().all()
        assert (keeper.scale != 1).all()
    keeper.disable_observer()
    before = keeper.scale.clone()
    train(sums, model, [9 * part for part in parts_of(WEIGHTS["full"])], WEIGHTS["full"])
    assert torch.equal(keeper.scale, before)


@BOTH
def test_batch_norm_over_workers_is_batch_norm_where_there_is_one_worker(
    kind: type[StepSum],
) -> None:
    found = []
    for make in (nn.BatchNorm1d, nn.SyncBatchNorm):
        model = kinds.Kept(make(4))
        train(kind(model), model, parts_of(WEIGHTS["full"]), WEIGHTS["full"])
        found.append(model.state_dict())
    for one, other in zip(*(each.values() for each in found), strict=True):
        assert torch.equal(one, other)


@BOTH
def test_a_power_iteration_moves_as_far_in_a_step_as_in_one_forward_pass(
    kind: type[StepSum],
) -> None:
    model, alone = kinds.Kept(kinds.Spectral()), kinds.Kept(kinds.Spectral())
    alone.load_state_dict(model.state_dict())
    train(kind(model), model, parts_of(WEIGHTS["full"]), WEIGHTS["full"])
    alone(torch.randn(2, 4))
    for one, other in zip(model.buffers(), alone.buffers(), strict=True):
        close(one, other)


@pytest.fixture(autouse=True)
def _torch_says_that_observers_will_move() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.ao")
        yield


@BOTH
@pytest.mark.parametrize("name", kinds.REFUSED)
def test_what_has_no_mean_is_refused_by_name_and_left_as_it_was(
    name: str, kind: type[StepSum]
) -> None:
    make, words = kinds.REFUSED[name]
    model = kinds.Kept(make())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=words):
        train(kind(model), model, parts_of(WEIGHTS["full"]), WEIGHTS["full"])
    for key, value in before.items():
        assert torch.equal(model.state_dict()[key], value), key
    assert all(parameter.grad is None for parameter in model.parameters())


@BOTH
def test_a_buffer_that_is_removed_inside_the_loop_is_refused(kind: type[StepSum]) -> None:
    class Removes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gone", torch.zeros(1))

        def forward(self, inputs: Tensor) -> None:
            self._buffers.pop("gone", None)

    model = kinds.Kept(Removes())
    with pytest.raises(UsageError, match=r"buffer keeper\.gone was removed inside the loop"):
        train(kind(model), model, parts_of(WEIGHTS["full"]), WEIGHTS["full"])


@BOTH
def test_a_counter_of_samples_is_refused_in_the_first_step_in_which_it_is_no_counter(
    kind: type[StepSum],
) -> None:
    model = kinds.Kept(kinds.Keeper(0, lambda kept, x: kept + len(x)))
    sums = kind(model)
    train(sums, model, parts_of(WEIGHTS["full"]), WEIGHTS["full"])
    assert model.keeper.kept.item() == 4, "as of one micro-batch"
    with pytest.raises(UsageError, match=r"kept of whole numbers was changed by 2 in one.*by 3 in"):
        train(sums, model, parts_of(WEIGHTS["short"]), WEIGHTS["short"])
