"""Checks that `DistributedOptimizer` trains one model on all ranks, whatever scripts do with it."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import mse_loss

import elastic_driver.horovod.torch as hvd
from elastic_driver.horovod.torch.optimizer import unfinished
from tests.horovod.jobs.checking import run_checks


def equal_on_all(*tensors: torch.Tensor) -> bool:
    """Whether all ranks have the same bits."""
    found = hvd.allgather_object([tensor.detach().tolist() for tensor in tensors])
    return all(each == found[0] for each in found)


def own_batch(features: int = 3) -> torch.Tensor:
    """A batch that only this rank has."""
    seed = torch.Generator().manual_seed(100 + hvd.rank())
    return torch.randn(8, features, generator=seed)


def body_and_head(**options: object) -> tuple[torch.nn.Module, torch.nn.Module, object, object]:
    """A body that no optimizer trains yet, a head, its optimizer and the distributed one."""
    torch.manual_seed(1)
    body, head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    first = torch.optim.SGD(head.parameters(), lr=0.1)
    pairs = torch.nn.Sequential(body, head).named_parameters()
    return body, head, first, hvd.DistributedOptimizer(first, pairs, **options)


def take_step(optimizer: object, loss: Callable[[], torch.Tensor]) -> None:
    optimizer.zero_grad()
    loss().square().mean().backward()
    optimizer.step()


# ---- parameters that come later ----------------------------------------------------------


def check_a_group_that_is_added_is_reduced_too() -> None:
    for options in ({}, {"op": hvd.Adasum}, {"groups": 1}, {"backward_passes_per_step": 2}):
        for by_first in (False, True):
            body, head, first, optimizer = body_and_head(**options)
            x = own_batch()
            take_step(optimizer, lambda: head(body(x)))  # noqa: B023 - called at once
            group = {"params": list(body.parameters()), "lr": 0.01}
            (first if by_first else optimizer).add_param_group(group)
            for _ in range(3):
                take_step(optimizer, lambda: head(body(x)))  # noqa: B023 - called at once
                assert equal_on_all(*head.parameters(), *body.parameters()), (options, by_first)


def check_a_group_of_another_model_is_reduced_too() -> None:
    _, head, _, optimizer = body_and_head()
    late = torch.nn.Linear(3, 3)
    hvd.broadcast_parameters(late.state_dict(), 0)
    optimizer.add_param_group({"params": late.parameters()})
    take_step(optimizer, lambda: head(late(own_batch())))
    assert equal_on_all(*head.parameters(), *late.parameters())


def check_parameters_that_are_replaced_are_reduced() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)])
    take_step(optimizer, lambda: weight * (hvd.rank() + 1))
    wider = torch.nn.Parameter(torch.ones(5))  # as a vocabulary that has grown
    optimizer.param_groups[0]["params"] = [wider]
    for _ in range(2):
        take_step(optimizer, lambda: wider * (hvd.rank() + 1))
        assert equal_on_all(wider)
    assert not torch.equal(wider, torch.ones(5))


# ---- schedulers and states ---------------------------------------------------------------


def check_a_scheduler_of_the_first_optimizer_goes_on_after_a_state_is_loaded() -> None:
    _, head, first, optimizer = body_and_head()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(first, gamma=0.5)
    kept = optimizer.state_dict()
    optimizer.load_state_dict(kept)
    take_step(optimizer, lambda: head(own_batch()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch looks for a step of the first optimizer
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert optimizer.state is first.state
    take_step(optimizer, lambda: head(own_batch()))
    assert optimizer.param_groups is first.param_groups


# ---- closures ----------------------------------------------------------------------------


def check_gradients_that_a_closure_computes_are_reduced_before_the_step() -> None:
    for kind in (torch.optim.SGD, torch.optim.Adam):
        torch.manual_seed(2)
        model = torch.nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(
            kind(model.parameters(), lr=0.1), model.named_parameters()
        )
        alone = torch.nn.Linear(3, 1)
        alone.load_state_dict(model.state_dict())
        reference = kind(alone.parameters(), lr=0.1)
        everything = hvd.allgather(own_batch())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()  # noqa: B023 - called in this turn
            loss = model(own_batch()).square().mean()  # noqa: B023 - as above
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
            reference.zero_grad()
            alone(everything).square().mean().backward()
            reference.step()
            assert equal_on_all(*model.parameters()), kind
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs)


def check_a_closure_that_only_returns_the_loss_changes_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    loss = (weight * (hvd.rank() + 1)).sum()
    loss.backward()
    optimizer.step(lambda: loss)
    total = hvd.size() * (hvd.size() + 1) / 2
    assert weight.tolist() == [1 - total] * 2, "reduced once"


def check_lbfgs_makes_the_same_steps_on_all_ranks() -> None:
    torch.manual_seed(4)
    model = torch.nn.Linear(3, 1)
    inner = torch.optim.LBFGS(model.parameters(), lr=0.5, line_search_fn="strong_wolfe")
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    x = own_batch()
    target = x.sum(1, keepdim=True) + 0.1 * own_batch(1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        return loss

    before = float(hvd.allreduce(mse_loss(model(x), target).detach()))
    for _ in range(3):
        optimizer.step(closure)
        assert equal_on_all(*model.parameters())
    assert float(hvd.allreduce(mse_loss(model(x), target).detach())) < before / 10


# ---- mistakes ----------------------------------------------------------------------------


def check_a_gradient_that_is_changed_while_it_is_reduced_is_an_error() -> None:
    def clip(model: torch.nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    def clear(model: torch.nn.Module) -> None:
        model.zero_grad()

    def zero(model: torch.nn.Module) -> None:
        model.zero_grad(set_to_none=False)

    for options in ({}, {"groups": 1}, {"compression": hvd.Compression.fp16}):
        for change in (clip, clear, zero):
            model = torch.nn.Linear(3, 1)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)
            model(own_batch()).sum().backward()
            change(model)
            with pytest.raises(
                AssertionError, match=r"gradient of \w+ was changed.*optimizer\.synchronize\(\)"
            ):
                optimizer.step()
            hvd.barrier()  # all reductions are over
            optimizer.zero_grad()
            model(own_batch()).sum().backward()
            optimizer.synchronize()
            change(model)
            with optimizer.skip_synchronize():
                optimizer.step()


def check_a_step_without_its_reductions_is_an_error() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    model(own_batch()).sum().backward()
    with (
        pytest.raises(AssertionError, match=r"without optimizer\.synchronize"),
        optimizer.skip_synchronize(),
    ):
        optimizer.step()
    optimizer.step()


def check_a_gradient_scaler_needs_reduced_gradients() -> None:
    for kind, options in ((torch.optim.SGD, {}), (torch.optim.Adam, {"fused": True})):
        models = [torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)]
        optimizers = [
            hvd.DistributedOptimizer(
                kind(model.parameters(), lr=0.1, **options), model.named_parameters()
            )
            for model in models
        ]
        model, optimizer = models[0], optimizers[0]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(model(own_batch()).sum()).backward()
        with pytest.raises(AssertionError, match=r"optimizer\.synchronize\(\) before"):
            scaler.step(optimizer)
        hvd.barrier()  # all reductions are over
        model, optimizer = models[1], optimizers[1]
        hvd.broadcast_parameters(model.state_dict(), 0)
        for infinite in (False, True, False):  # a step that one rank alone would skip
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            optimizer.zero_grad()
            factor = float("inf") if infinite and hvd.rank() == 1 else 1.0
            scaler.scale(model(own_batch()).sum() * factor).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            assert equal_on_all(*model.parameters()), kind
        off = torch.amp.GradScaler("cpu", enabled=False)
        optimizer.zero_grad()
        off.scale(model(own_batch()).sum()).backward()
        off.step(optimizer)
        assert equal_on_all(*model.parameters()), kind


def check_a_commit_amid_a_step_is_told() -> None:
    for passes in (1, 3):
        model = torch.nn.Linear(3, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            sgd, model.named_parameters(), backward_passes_per_step=passes
        )
        assert unfinished(optimizer) == unfinished(sgd) == ""
        for number in range(1, passes + 1):
            model(own_batch()).sum().backward()
            if number < passes:
                assert f"{number} of 3 backward passes" in unfinished(optimizer)
        assert "being reduced" in unfinished(optimizer)
        optimizer.step()
        assert unfinished(optimizer) == ""


def check_a_commit_amid_a_step_is_refused() -> None:
    model = torch.nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), backward_passes_per_step=2)
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    state.sync()
    for said in ("1 of 2 backward passes", "being reduced"):
        model(own_batch()).sum().backward()
        with pytest.raises(ValueError, match=f"commit.*{said}.*after optimizer.step"):
            state.commit()
    optimizer.step()
    state.commit()


if __name__ == "__main__":
    run_checks(globals())
