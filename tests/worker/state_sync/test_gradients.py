"""Gradients that no step has used yet: which belong to a commit, and which cost nothing."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from elastic_driver.errors import UsageError
from elastic_driver.worker.state import TorchState
from elastic_driver.worker.state_sync import steps as module
from elastic_driver.worker.state_sync.steps import Gradients


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(number))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def alike(gradients: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(gradients) == len(others) and all(map(torch.equal, gradients, others))


def kept(state: TorchState) -> int:
    return len(state._tree.gradients.kept)


def test_a_plain_loop_keeps_no_gradient_whatever_it_leaves_behind() -> None:
    model = nn.Linear(3, 1)
    state = TorchState(model=model, optimizer=sgd(model))
    for number in range(5):
        state.optimizer.zero_grad()
        model(batch(number)).sum().backward()
        state.optimizer.step()
        state.commit()
        assert kept(state) == 0
    assert len(gradients_of(model)) == 2
    state.restore()
    assert gradients_of(model) == [], "dropped: they belong to no commit"


def test_an_accumulation_over_several_commits_is_put_back_at_each() -> None:
    model = nn.Linear(3, 1)
    state = TorchState(model=model, optimizer=sgd(model))
    state.commit()
    for number in range(4):
        model(batch(number)).sum().backward()
        state.commit()
        committed = gradients_of(model)
        model(batch(99)).sum().backward()
        state.restore()
        assert alike(gradients_of(model), committed)


def test_two_optimizers_that_step_at_different_commits_keep_their_gradients() -> None:
    fast, slow = nn.Linear(3, 1), nn.Linear(3, 1)
    state = TorchState(fast=fast, slow=slow, a=sgd(fast), b=sgd(slow))
    state.commit()
    for number in range(1, 7):
        (fast(batch(number)) * slow(batch(number))).sum().backward()
        state.a.step()
        state.a.zero_grad()
        if number % 3 == 0:
            state.b.step()
            state.b.zero_grad()
        state.commit()
        committed = gradients_of(slow)
        assert len(committed) == (0 if number % 3 == 0 else 2)
        slow(batch(99)).sum().backward()
        state.restore()
        assert alike(gradients_of(slow), committed)
        assert len(gradients_of(slow)) == len(committed)


def test_gradients_of_what_is_stepped_by_hand_beside_an_optimizer_are_put_back() -> None:
    own, hand = nn.Linear(3, 1), nn.Linear(3, 1)
    state = TorchState(own=own, hand=hand, optimizer=sgd(own))
    state.commit()
    for number in range(1, 9):
        (own(batch(number)) * hand(batch(number))).sum().backward()
        if number % 2 == 0:
            state.optimizer.step()
            with torch.no_grad():
                for parameter in hand.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
            own.zero_grad()
            hand.zero_grad()
        state.commit()
        committed = gradients_of(own), gradients_of(hand)
        assert len(committed[1]) == 2 * (number % 2)
        for _ in range(2):
            hand(batch(99)).sum().backward()
            state.restore()
            assert alike(gradients_of(own), committed[0])
            assert alike(gradients_of(hand), committed[1])


def test_gradients_of_what_nothing_ever_steps_are_soon_not_copied() -> None:
    body, head = nn.Linear(3, 2), nn.Linear(2, 1)
    state = TorchState(body=body, head=head, optimizer=sgd(head))
    state.commit()
    for number in range(module.IDLE + 2):
        assert kept(state) == (2 if 0 < number <= module.IDLE else 0)
        head(body(batch(number))).sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit()
    with torch.no_grad():
        body.weight.sub_(body.weight.grad)
    head(body(batch(0))).sum().backward()
    state.commit()
    assert [each.parameter for each in state._tree.gradients.kept if each.parameter is body.weight]


def test_gradients_that_a_generator_leaves_in_its_discriminator_are_soon_not_copied() -> None:
    generator, critic = nn.Linear(3, 3), nn.Linear(3, 1)
    state = TorchState(generator=generator, critic=critic, g=sgd(generator), c=sgd(critic))
    state.commit()
    copied = []
    for number in range(8):
        state.c.zero_grad()
        critic(generator(batch(number)).detach()).sum().backward()
        state.c.step()
        state.g.zero_grad()
        critic(generator(batch(number))).sum().backward()
        state.g.step()
        state.commit()
        copied.append(kept(state))
    assert copied == [2, 2, 2, 0, 0, 0, 0, 0]


def test_gradients_that_are_zeroed_in_place_are_soon_not_copied() -> None:
    model = nn.Linear(3, 1)
    state = TorchState(model=model, optimizer=sgd(model))
    copied = []
    for number in range(9):
        state.optimizer.zero_grad(set_to_none=False)
        for micro in range(2):
            model(batch(10 * number + micro)).sum().backward()
        state.optimizer.step()
        state.commit()
        copied.append(kept(state))
    assert copied[-3:] == [0, 0, 0]


def test_gradients_that_are_never_zeroed_are_kept() -> None:
    model = nn.Linear(3, 1)
    state = TorchState(model=model, optimizer=sgd(model), snapshot=True)
    for number in range(9):
        model(batch(number)).sum().backward()
        state.optimizer.step()
        state.commit()
    committed = gradients_of(model)
    model(batch(99)).sum().backward()
    state.restore()
    assert alike(gradients_of(model), committed)
    assert len(gradients_of(model)) == 2


def test_steps_of_optimizers_outside_of_the_state_use_nothing_up() -> None:
    model = nn.Linear(3, 1)
    state = TorchState(model=model, optimizer=sgd(model))
    state.commit()
    for task in range(2):
        inner = nn.Linear(3, 1)
        own = sgd(inner)
        inner(batch(task)).sum().backward()
        model(batch(task)).sum().backward()
        own.step()
    state.commit()
    assert kept(state) == 2


def test_a_commit_that_is_refused_leaves_the_last_one_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchState(model=model, optimizer=optimizer, snapshot=True, step=1, seen=[1])
    state.commit()
    before = [p.detach().clone() for p in model.parameters()]
    model(batch(1)).sum().backward()
    with torch.no_grad():
        model.weight.add_(1)
    state.step, state.optimizer.param_groups[0]["lr"] = 2, 0.5
    state.seen.append(2)
    monkeypatch.setattr(Gradients, "is_local_now", lambda *_: True)
    for _ in range(2):
        with pytest.raises(UsageError, match="each rank holds a part"):
            state.commit()
    assert (state.version, state.clean) == (0, True)
    state.restore()
    assert (state.step, state.seen, optimizer.param_groups[0]["lr"]) == (1, [1], 0.1)
    assert all(map(torch.equal, before, [p.detach() for p in model.parameters()]))


def test_gradients_that_were_received_are_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 1)
    state = TorchState(model=model, optimizer=sgd(model))
    monkeypatch.setattr(Gradients, "is_local_now", lambda *_: True)
    state._tree.walk()
    names = [f"model.{name}" for name, _ in model.named_parameters()]
    received = [(n, torch.ones_like(p)) for n, p in zip(names, model.parameters(), strict=True)]
    state._tree.receive_gradients(received)
    state._keep(from_others=True)
    assert kept(state) == 2


def test_a_sparse_gradient_that_no_step_has_used_is_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    state = TorchState(model=model, optimizer=torch.optim.SparseAdam(model.parameters()))
    state.commit()
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UsageError, match=r"a gradient that no step has used.*sparse"):
        state.commit()


def hooks(parameter: torch.Tensor) -> int:
    """How many hooks of `gradients` a parameter has."""
    found = [parameter._post_accumulate_grad_hooks, parameter._backward_hooks]
    functions = [getattr(hook, "func", None) for each in found for hook in (each or {}).values()]
    return sum(function in (module._passed, module._began) for function in functions)


def test_a_state_that_ends_leaves_no_hook_on_the_model() -> None:
    model = nn.Linear(3, 1)
    optimizer: Any = sgd(model)
    for _ in range(3):
        state = TorchState(model=model, optimizer=optimizer)
        for number in range(3):
            optimizer.zero_grad(set_to_none=False)
            model(batch(number)).sum().backward()
            optimizer.step()
            state.commit()
        assert sum(map(hooks, model.parameters())) == 3
        del state
    assert sum(map(hooks, model.parameters())) == 0


def test_no_gradient_is_held_back_from_being_freed() -> None:
    model = nn.Linear(3, 1)
    state = TorchState(model=model, optimizer=sgd(model))
    state.commit()
    model(batch(1)).sum().backward()
    state.optimizer.step()
    assert model.weight.grad is not None
    seen = weakref.ref(model.weight.grad)
    state.commit()
    state.optimizer.zero_grad()
    gc.collect()
    assert seen() is None
    assert module.DROPPED > 0


def test_a_layer_that_is_frozen_between_its_gradient_and_a_step_harms_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    state = TorchState(model=model, optimizer=sgd(model))
    state.commit()
    for number in range(6):
        state.optimizer.zero_grad(set_to_none=False)
        model(batch(number)).sum().backward()
        model[0].requires_grad_(number % 2 == 0)
        state.optimizer.step()
        model[0].requires_grad_(True)
        state.commit()
    assert len(gradients_of(model)) == 4
