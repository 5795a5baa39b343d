"""Checks of objects, parameters and optimizer states that are sent, also where one rank cannot."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import elastic_driver.horovod.torch as hvd
from tests.horovod.jobs.checking import run_checks

GUILTY = 1  # the rank whose object cannot be sent
AT_ONCE_S = 5.0


class Stubborn:
    """An object that has a reason not to be sent."""

    def __reduce__(self) -> Any:
        raise ValueError("it holds an open connection")


class Unpackable(torch.optim.SGD):
    """An optimizer whose state cannot be read on one rank."""

    def state_dict(self) -> Any:
        if hvd.rank() == GUILTY:
            raise RuntimeError("the state is on another device")
        return super().state_dict()


def fails_on_all(call: Callable[[], object], own: str, reason: str, guilty: int = GUILTY) -> None:
    """The call fails at once: with its own words on one rank, and on the others with its number.

    Afterwards the ranks still are in one world.
    """
    began = time.monotonic()
    with pytest.raises(Exception, match=own if hvd.rank() == guilty else reason) as raised:
        call()
    assert time.monotonic() - began < AT_ONCE_S
    assert not isinstance(raised.value, hvd.HorovodInternalError), "no world is broken"
    if hvd.rank() != guilty:
        assert re.search(rf"\brank {guilty}\b", str(raised.value)), raised.value
        assert "\n" not in str(raised.value)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def check_an_object_that_its_root_cannot_pack_fails_on_all_ranks() -> None:
    for bad, why in [
        (Stubborn(), "open connection"),
        (threading.Lock(), "lock"),
        ({"deep": [Stubborn()]}, "open connection"),
        (lambda: 0, "lambda"),
        (os.stat, "cannot be sent"),
    ]:
        fails_on_all(
            lambda bad=bad: hvd.broadcast_object(bad if hvd.rank() == GUILTY else 0, GUILTY),
            own=why,
            reason=f"broadcast_object: rank 1 cannot take part: .*{why}",
        )


def check_an_object_that_one_rank_cannot_pack_fails_on_all_that_gather() -> None:
    for bad, why in [(Stubborn(), "open connection"), (threading.Lock(), "lock")]:
        fails_on_all(
            lambda bad=bad: hvd.allgather_object(bad if hvd.rank() == GUILTY else 0, name="x"),
            own=why,
            reason=f"x: rank 1 cannot take part: .*{why}",
        )
    with pytest.raises(Exception, match=r"open connection|ranks 0, 2.*open connection"):
        hvd.allgather_object(Stubborn() if hvd.rank() in (0, 2) else 0)
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size())), "the world is whole"


def check_a_set_of_ranks_fails_without_the_others() -> None:
    pair = hvd.add_process_set([0, 1])
    if pair.included():
        with pytest.raises(Exception, match="open connection"):
            hvd.broadcast_object(Stubborn() if hvd.rank() == 1 else 0, 1, process_set=pair)
    hvd.remove_process_set(pair)


def check_empty_things_travel() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert hvd.allgather_object(b"x" * rank) == [b"x" * r for r in range(size)]
    for empty in (b"", "", [], {}, (), set(), frozenset(), bytearray(), None, range(0)):
        for found in (hvd.broadcast_object(empty, 1), *hvd.allgather_object(empty)):
            assert found == empty
            assert type(found) is type(empty)
        nested = {"in": [empty, (empty,)], "beside": 1}
        assert hvd.broadcast_object(nested if rank == 1 else None, 1) == nested
        assert hvd.allgather_object([empty] * rank) == [[empty] * r for r in range(size)]
    empty_tensor = torch.empty(0, 3)
    assert hvd.broadcast_object(empty_tensor if rank == 0 else 0).shape == (0, 3)
    hvd.broadcast_parameters({}, root_rank=0)
    hvd.broadcast_parameters({"none": torch.empty(0, 3)}, root_rank=0)


def check_what_a_rank_cannot_read_fails_there() -> None:
    class Local:
        pass

    if hvd.rank() == 0:
        torch.serialization.add_safe_globals([Local])
    with pytest.raises(Exception, match=r"cannot be (sent|read)"):
        hvd.broadcast_object(Local() if hvd.rank() == 0 else None)
    torch.serialization.clear_safe_globals()


# ---- parameters --------------------------------------------------------------------------


def check_parameters_that_are_none_on_one_rank_fail_on_all() -> None:
    model = torch.nn.Linear(2, 2)
    fails_on_all(
        lambda: hvd.broadcast_parameters(
            model if hvd.rank() == GUILTY else model.state_dict(), root_rank=0
        ),
        own="parameters of type Linear",
        reason="broadcast_parameters: rank 1 cannot take part: parameters of type Linear",
    )

    def broken() -> Iterable[tuple[str, torch.Tensor]]:
        yield "weight", model.weight
        if hvd.rank() == GUILTY:
            raise RuntimeError("half a model")
        yield "bias", model.bias

    fails_on_all(
        lambda: hvd.broadcast_parameters(broken(), root_rank=0),
        own="half a model",
        reason="rank 1 cannot take part: RuntimeError: half a model",
    )


def check_models_that_differ_are_told_apart_at_once() -> None:
    odd = hvd.rank() == GUILTY
    usual = torch.nn.Linear(2, 3)
    for other, said in [
        (torch.nn.Linear(2, 4), "bias: float32 [3] on ranks 0, 2; float32 [4] on rank 1"),
        (torch.nn.Linear(2, 3, bias=False), "bias: float32 [3] on ranks 0, 2; missing on rank 1"),
        (torch.nn.Linear(2, 3).double(), "bias: float32 [3] on ranks 0, 2; float64 [3] on rank 1"),
    ]:
        began = time.monotonic()
        with pytest.raises(ValueError, match="broadcast_parameters: ranks disagree") as raised:
            hvd.broadcast_parameters((other if odd else usual).state_dict(), root_rank=0)
        assert str(raised.value) == f"broadcast_parameters: ranks disagree about {said}"
        assert time.monotonic() - began < AT_ONCE_S


def check_lists_of_tensors_without_names_are_sent_whole() -> None:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    hvd.broadcast_parameters(list(model.parameters()), root_rank=2)
    found = hvd.allgather_object([p.tolist() for p in model.parameters()])
    assert all(each == found[2] for each in found)


def check_what_was_received_counts_as_a_change() -> None:
    model = torch.nn.Linear(2, 2)
    before = [p._version for p in model.parameters()]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    after = [p._version for p in model.parameters()]
    assert all(b > a for a, b in zip(before, after, strict=True)), "autograd and states see it"
    for call in (hvd.allreduce_, lambda p: hvd.broadcast_(p, 0)):
        before = [p._version for p in model.parameters()]
        for parameter in model.parameters():
            call(parameter.detach())
        after = [p._version for p in model.parameters()]
        assert all(b > a for a, b in zip(before, after, strict=True))


# ---- optimizers --------------------------------------------------------------------------


def check_an_optimizer_that_one_rank_cannot_read_fails_on_all() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    fails_on_all(
        lambda: hvd.broadcast_optimizer_state(Unpackable([weight], lr=0.1), GUILTY),
        own="on another device",
        reason="broadcast_optimizer_state: rank 1 cannot take part: .*on another device",
    )
    of_one = [weight, torch.nn.Parameter(torch.ones(3))] if hvd.rank() == GUILTY else [weight]
    with pytest.raises(ValueError, match="parameter 1 of group 0: missing on ranks 0, 2; float32"):
        hvd.broadcast_optimizer_state(torch.optim.SGD(of_one, lr=0.1), 0)
    kind = torch.optim.SGD if hvd.rank() == GUILTY else torch.optim.Adam
    with pytest.raises(ValueError, match="the optimizer: Adam on ranks 0, 2; SGD on rank 1"):
        hvd.broadcast_optimizer_state(kind([weight], lr=0.1), 0)
    fails_on_all(
        lambda: hvd.broadcast_optimizer_state(
            (torch.optim.LBFGS if hvd.rank() == GUILTY else torch.optim.SGD)([weight], lr=0.1), 0
        ),
        own="L-BFGS",
        reason="rank 1 cannot take part: .*L-BFGS",
    )


def check_state_that_is_no_tensor_arrives_as_it_was() -> None:
    rank = hvd.rank()
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    kept = {
        "phase": f"warm up {rank}",
        "history": [rank, (rank, "x")],
        "best": None,
        "nothing": b"",
        "exact": torch.full((2,), 1 / 3 + rank),  # of another dtype than the parameter
        "nested": {"name": "n", "tensors": [torch.full((1,), 1 / 3)]},
    }
    optimizer.state[weight].update(kept if rank == 0 else {"stale": 1})
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    found = optimizer.state[weight]
    assert found.keys() == kept.keys()
    assert found["phase"] == "warm up 0"
    assert found["history"] == [0, (0, "x")]
    assert (found["best"], found["nothing"]) == (None, b"")
    assert found["exact"].tolist() == torch.full((2,), 1 / 3).tolist()
    assert found["nested"] == {"name": "n", "tensors": [torch.full((1,), 1 / 3)]}


def check_a_rate_that_is_a_tensor_stays_the_tensor_of_the_script() -> None:
    rate = torch.tensor(0.1 * (hvd.rank() + 1))
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=rate)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    rate.mul_(0.5)  # as a script does that has captured it
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.05)


def check_a_scheduler_of_the_first_optimizer_sets_the_rates_after_a_broadcast() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    first = torch.optim.SGD([weight], lr=0.1 * (hvd.rank() + 1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(first, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(first, [("weight", weight)])
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    weight.sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="scheduler"):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


if __name__ == "__main__":
    run_checks(globals())
