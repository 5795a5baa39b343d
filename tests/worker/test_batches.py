"""FixedBatch in one process: what a step is made of, and what a loop may and may not do."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_driver import contract
from elastic_driver.arithmetic import allocate_microbatches, virtual_ranges
from elastic_driver.errors import UsageError
from elastic_driver.worker.batches import EpochPlan, FixedBatch


def numbers(samples: int) -> list[Tensor]:
    return [torch.tensor([float(n)]) for n in range(samples)]


def batches_of(samples: int = 24, micro_batch_size: int = 2, **options: Any) -> FixedBatch:
    if "model" not in options:
        options["model"] = nn.Linear(1, 1)
    options.setdefault("virtual_workers", 4)
    return FixedBatch(numbers(samples), micro_batch_size, **options)


def train(batches: FixedBatch, model: nn.Module, steps: int = 10**9) -> list[list[int]]:
    """The samples of each step."""
    seen = []
    for step in batches:
        found: list[int] = []
        for inputs in step:
            found += [int(value) for value in inputs.flatten().tolist()]
            model(inputs).mean().backward()
        seen.append(found)
        batches.advance()
        if len(seen) == steps:
            break
    return seen


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 90),
    virtual_workers=st.integers(1, 9),
    micro_batch_size=st.integers(1, 5),
    workers=st.integers(1, 11),
)
def test_what_a_step_is_made_of_does_not_depend_on_the_number_of_workers(
    samples: int, virtual_workers: int, micro_batch_size: int, workers: int
) -> None:
    plan = EpochPlan(samples, virtual_workers, micro_batch_size, shuffle=True, seed=3, epoch=1)
    steps = range(-(-samples // (virtual_workers * micro_batch_size)))
    alone = dict(plan.micro_batches(steps, range(virtual_workers)))
    shared: dict[tuple[int, ...], list[int]] = {}
    for mine in virtual_ranges(allocate_microbatches(virtual_workers, workers)):
        for identity, batch in plan.micro_batches(steps, mine):
            assert identity not in shared
            shared[identity] = batch
    assert shared == alone
    assert Counter(index for batch in shared.values() for index in batch) == Counter(range(samples))


def test_the_gradient_is_the_mean_over_the_steps_samples_also_in_a_short_last_step() -> None:
    model = nn.Linear(1, 1, bias=False)
    batches = batches_of(8 + 3, model=model)
    for step in batches:
        total = 0.0
        for inputs in step:
            total += inputs.sum().item()
            model(inputs).mean().backward()
        assert model.weight.grad.item() == pytest.approx(total / step.samples)
        batches.advance()
    assert step.samples == 3
    assert len(step) == 2  # micro-batches of 2 and 1: a mean over them would be another number


def test_steps_start_without_gradients_even_if_the_loop_forgets_to_drop_them() -> None:
    model = nn.Linear(1, 1, bias=False)
    gradients = []
    for step in batches_of(16, model=model, shuffle=False):
        for inputs in step:
            model(inputs).mean().backward()
        gradients.append(model.weight.grad.item())
    assert gradients == [3.5, 11.5]


def test_parameters_that_no_sample_reached_keep_no_gradient() -> None:
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    for step in batches_of(8, model=model):
        for inputs in step:
            model[0](inputs).mean().backward()
    assert model[0].weight.grad is not None
    assert model[1].weight.grad is None


def test_batch_norm_moves_by_the_mean_of_the_micro_batches_and_constants_stay() -> None:
    model = nn.BatchNorm1d(1)
    model.register_buffer("mask", torch.tensor([float("-inf"), 1 / 3]))
    means = []
    for step in batches_of(8, model=model, shuffle=False):
        for inputs in step:
            means.append(inputs.mean().item())
            model(inputs).mean().backward()
    assert model.running_mean.item() == pytest.approx(0.1 * sum(means) / 4)
    assert model.num_batches_tracked.item() == 1
    assert torch.equal(model.mask, torch.tensor([float("-inf"), 1 / 3]))


@pytest.fixture
def _default_kernels() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


class Buffered(nn.Linear):
    """Has a buffer of every kind, all of which each micro-batch changes."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("table", torch.zeros(2, 2).t())
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))
        self.register_buffer("started", torch.tensor(False))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean.copy_(inputs.mean())
        self.table[0, 1] += inputs.mean()
        self.seen += len(inputs)
        self.started.fill_(True)
        return super().forward(inputs)


@pytest.mark.usefixtures("_default_kernels")
@pytest.mark.parametrize("deterministic", [False, True])
def test_buffers_of_every_kind_start_each_micro_batch_from_the_steps_first_value(
    deterministic: bool,
) -> None:
    model = Buffered()
    batches = batches_of(16, model=model, shuffle=False, deterministic=deterministic)
    train(batches, model, steps=2)
    assert model.mean.item() == 11.5  # it is 3.5 after the first step
    assert model.table.tolist() == [[0.0, 15.0], [0.0, 0.0]]
    assert model.seen.item() == 4  # two micro-batches of two: virtual worker 0's
    assert model.started.item() is True


def test_progress_moves_with_the_optimizer_and_resumes_in_the_middle_of_an_epoch() -> None:
    model = nn.Linear(1, 1)
    whole = train(batches_of(model=model), model)
    first = batches_of(model=model)
    begun = train(first, model, steps=1)
    second = batches_of(model=model)
    second.load_state_dict(first.state_dict())
    assert begun + train(second, model) == whole


def test_each_epoch_is_another_order_and_the_next_begins_by_itself() -> None:
    model = nn.Linear(1, 1)
    batches = batches_of(model=model)
    first, second = train(batches, model), train(batches, model)
    assert batches.epoch == 1
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(24))


def test_a_rejoin_after_the_last_step_of_an_epoch_does_not_begin_another_one() -> None:
    model = nn.Linear(1, 1)
    batches = batches_of(model=model)
    train(batches, model)
    batches.reset()
    assert train(batches, model) == []
    assert len(train(batches, model)) == 3


def test_a_loop_that_names_its_epochs_may_come_back_into_a_finished_one() -> None:
    model = nn.Linear(1, 1)
    batches = batches_of(model=model)
    for epoch, expected in ((0, 3), (0, 0), (1, 3), (1, 0)):
        batches.set_epoch(epoch)
        assert len(train(batches, model)) == expected


def test_the_short_last_step_can_be_left_out() -> None:
    assert len(batches_of(25)) == 4
    assert len(batches_of(25, drop_last=True)) == 3


def test_a_step_that_a_grad_scaler_skips_is_over_all_the_same() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    stepped: list[int] = []
    optimizer.register_step_post_hook(lambda *_: (batches.advance(), stepped.append(batches.step)))
    batches = batches_of(model=model)
    weights = [model.weight.item()]
    for step in batches:
        for inputs in step:
            loss = model(inputs).mean()
            scaler.scale(loss * float("inf") if step.number == 1 else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        weights.append(model.weight.item())
    assert stepped == [1, 3]
    assert weights[1] == weights[2] != weights[3]
    assert scaler.get_scale() == 2.0


def test_only_a_commit_moves_the_position_and_as_often_as_wanted() -> None:
    model = nn.Linear(1, 1)
    batches = batches_of(model=model)
    seen = []
    for step in batches:
        batches.advance()  # before the loop over its micro-batches: what was trained until now
        seen.append(batches.step)
        for inputs in step:
            model(inputs).mean().backward()
        seen.append(batches.step)
        batches.advance()
        batches.advance()
        seen.append(batches.step)
    assert seen == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    batches.advance()
    assert batches.step == 3


def test_two_steps_for_one_commit_count_as_two() -> None:
    model = nn.Linear(1, 1)
    batches = batches_of(model=model)
    for step in batches:
        for inputs in step:
            model(inputs).mean().backward()
        if step.number == 1:
            break
    assert batches.step == 1
    batches.advance()
    assert batches.step == 2


def test_an_optimizer_may_not_step_inside_the_loop_over_micro_batches() -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    step = next(iter(batches_of(model=model)))
    loop = iter(step)
    model(next(loop)).mean().backward()
    others.step()
    with pytest.raises(UsageError, match="the optimizer stepped before the gradients of step 0"):
        mine.step()
    for inputs in loop:
        model(inputs).mean().backward()
    mine.step()


def test_the_loop_draws_nothing_from_the_global_generators() -> None:
    model = nn.Linear(1, 1)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    train(batches_of(model=model), model)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.usefixtures("_default_kernels")
def test_in_deterministic_mode_chance_depends_on_the_micro_batch_alone() -> None:
    def draws(spoil: int) -> list[float]:
        random.seed(spoil)
        torch.manual_seed(spoil)
        model = nn.Linear(1, 1)
        found = []
        for step in batches_of(model=model, deterministic=True):
            for inputs in step:
                found += [random.random(), torch.rand(()).item()]
                model(inputs).mean().backward()
        return found

    assert draws(1) == draws(2)
    assert len(set(draws(1))) == 24


@pytest.mark.usefixtures("_default_kernels")
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_trained_is_looked_up_in_every_step(deterministic: bool) -> None:
    """An unfrozen layer, a frozen, a replaced and a new one, and tied weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    batches = batches_of(32, model=model, shuffle=False, deterministic=deterministic)

    changes = [
        lambda: None,
        lambda: model[0].requires_grad_(True),
        lambda: model[1].requires_grad_(False),
        lambda: model.__setitem__(1, nn.Linear(3, 3)),
    ]
    for step, change in zip(batches, changes, strict=True):
        change()
        parts = []
        for inputs in step:
            parts.append(inputs)
            model(inputs).square().mean().backward()
        found = [each.grad for each in model.parameters()]
        model.zero_grad()
        model(torch.cat(parts)).square().mean().backward()
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            if not parameter.requires_grad:
                assert gradient is None
            else:
                torch.testing.assert_close(gradient, parameter.grad)


def test_no_gradient_of_a_frozen_layer_is_left_from_the_step_before() -> None:
    """Optimizers use the gradient of a parameter also if it has been frozen since."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for step in batches_of(model=model):
        model[0].requires_grad_(step.number != 1)
        for inputs in step:
            model(inputs).mean().backward()
        assert (model[0].weight.grad is None) == (step.number == 1)


@pytest.mark.usefixtures("_default_kernels")
@pytest.mark.parametrize("deterministic", [False, True])
def test_parameters_of_the_optimizers_outside_of_the_model_are_trained_too(
    deterministic: bool,
) -> None:
    model, scale = nn.Linear(1, 1, bias=False), nn.Parameter(torch.ones(1))
    batches = batches_of(16, model=model, shuffle=False, deterministic=deterministic)
    batches.trained_by([scale, *model.parameters()])
    found = []
    for step in batches:
        for inputs in step:
            (inputs * scale).mean().backward()
        found.append(scale.grad.item())
    assert found == [3.5, 11.5]


def test_two_models_with_batches_of_their_own_leave_each_other_alone() -> None:
    """A state tells each of its batches what all of its optimizers train."""
    models = nn.Linear(1, 1), nn.Linear(1, 1)
    pair = [batches_of(16, model=model, shuffle=False) for model in models]
    for batches in pair:
        batches.trained_by([each for model in models for each in model.parameters()])
    for steps in zip(*pair, strict=True):
        for model, step in zip(models, steps, strict=True):
            for inputs in step:
                model(inputs).mean().backward()
        assert models[0].weight.grad.item() == models[1].weight.grad.item() > 0


def test_a_frozen_model_may_be_calibrated_without_gradients() -> None:
    model = nn.BatchNorm1d(1).requires_grad_(False)
    batches = batches_of(8, model=model, shuffle=False)
    with torch.no_grad():
        for step in batches:
            for inputs in step:
                model(inputs)
    assert model.running_mean.item() == pytest.approx(0.1 * 3.5)
    with pytest.raises(UsageError, match="nothing to train: each parameter is frozen"):
        next(iter(next(iter(batches))))


def test_a_lazy_model_has_to_run_once_before_it_is_trained() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    batches = batches_of(model=model)
    with pytest.raises(UsageError, match=r"0\.weight has no shape yet"):
        next(iter(next(iter(batches))))
    model(torch.ones(2, 1))
    assert len(train(batches, model)) == 3


def changes_in_the_loop(change: Any) -> FixedBatch:
    model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
    batches = batches_of(model=model)
    for step in batches:
        for inputs in step:
            model(inputs).mean().backward()
            change(model[0].weight)
    return batches


@torch.no_grad()
def rebound(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.9


@torch.no_grad()
def in_place(weight: nn.Parameter) -> None:
    weight.mul_(0.9)


@torch.no_grad()
def moved(weight: nn.Parameter) -> None:
    weight.data = weight.data.clone()


@pytest.mark.parametrize("change", [rebound, in_place])
def test_a_parameter_that_each_micro_batch_moves_is_refused_by_name(change: Any) -> None:
    """A momentum encoder would move as often as this worker has micro-batches."""
    with pytest.raises(UsageError, match=r"parameter 0\.weight was changed inside the loop"):
        changes_in_the_loop(change)


def test_a_parameter_that_gets_another_address_only_is_not() -> None:
    assert changes_in_the_loop(moved).step == 3


def test_leaving_the_micro_batches_early_is_an_error_that_says_what_to_do() -> None:
    for step in (batches := batches_of()):
        for _ in step:
            break
        break
    with pytest.raises(UsageError, match="state was committed before the gradients of step 0"):
        batches.advance()
    iterator = iter(batches_of())
    next(iterator)
    with pytest.raises(UsageError, match="the loop went on before"):
        next(iterator)


def half_a_step(batches: FixedBatch, model: nn.Module) -> Any:
    """The loop over a step's micro-batches, after the first of them."""
    loop = iter(next(iter(batches)))
    model(next(loop)).mean().backward()
    return loop


def test_a_step_left_by_an_error_leaves_buffers_and_gradients_as_it_found_them() -> None:
    model = nn.BatchNorm1d(1)
    loop = half_a_step(batches_of(model=model), model)
    assert model.running_mean.item() != 0
    with pytest.raises(RuntimeError, match="peer"):
        loop.throw(RuntimeError("connection closed by peer"))
    assert model.running_mean.item() == 0
    assert model.num_batches_tracked.item() == 0
    assert model.weight.grad is None


def test_a_step_thrown_away_late_does_not_touch_what_was_restored_meanwhile() -> None:
    model = nn.BatchNorm1d(1)
    batches = batches_of(model=model)
    loop = half_a_step(batches, model)
    batches.reset()
    model.running_mean.fill_(5.0)
    loop.close()
    assert model.running_mean.item() == 5.0


def test_a_step_can_be_iterated_only_once() -> None:
    model = nn.Linear(1, 1)
    step = next(iter(batches_of(model=model)))
    for inputs in step:
        model(inputs).mean().backward()
    with pytest.raises(UsageError, match="step 0 of epoch 0 was iterated twice"):
        list(step)


def test_virtual_workers_come_from_the_job_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.VIRTUAL_WORKERS, "6")
    assert batches_of(virtual_workers=None).virtual_workers == 6
    assert batches_of(virtual_workers=2).virtual_workers == 2
    monkeypatch.setenv(contract.VIRTUAL_WORKERS, "six")
    with pytest.raises(UsageError, match="ELASTIC_VIRTUAL_WORKERS='six'"):
        batches_of(virtual_workers=None)


def test_a_newcomer_takes_over_the_number_of_virtual_workers_of_the_others() -> None:
    """What it would choose by itself is the number of workers of a later, larger world."""
    newcomer = batches_of(virtual_workers=None)
    assert newcomer.virtual_workers == 1
    newcomer.load_state_dict(batches_of(virtual_workers=3).state_dict())
    assert newcomer.virtual_workers == 3


@pytest.mark.parametrize(
    "other", [{"samples": 25}, {"micro_batch_size": 3}, {"virtual_workers": 5}]
)
def test_progress_made_with_other_steps_is_refused(other: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"the saved progress has {next(iter(other))}="):
        batches_of(**other).load_state_dict(batches_of().state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"virtual_workers": 0}, "number of virtual workers is 0"),
        ({"model": "linear"}, "model is a str"),
        ({"model": nn.ReLU()}, "without trainable parameters"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        batches_of(**options)


def test_a_stream_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match="ShardedDataset"):
        FixedBatch(iter([1]), 1, model=nn.Linear(1, 1))


@pytest.mark.usefixtures("_default_kernels")
@pytest.mark.parametrize("deterministic", [False, True])
def test_sparse_gradients_are_refused_by_name(deterministic: bool) -> None:
    model = nn.Embedding(30, 1, sparse=True)
    batches = batches_of(model=model, virtual_workers=2, deterministic=deterministic)
    step = iter(next(iter(batches)))
    for _ in range(2):
        model(next(step).long()).mean().backward()
    with pytest.raises(UsageError, match="sparse gradients"):
        next(step)
