"""Buffers of any kind, start and share: the mean of what micro-batches leave, whatever its size."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elastic_driver.arithmetic import virtual_ranges
from elastic_driver.worker.batching.buffers import Buffers, _from_key, _to_key
from elastic_driver.worker.batching.gradients import ExactSum, PlainSum, StepSum
from elastic_driver.worker.batching.sight import Sight

numbers = st.floats(width=32, allow_nan=False)
modest = st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6)


class Holder(nn.Module):
    def __init__(self, start: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("kept", torch.tensor(start))


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=True), min_size=1, max_size=20))
def test_numbers_travel_as_integers_in_their_order(values: list[float]) -> None:
    keys = _to_key(torch.tensor(values, dtype=torch.float64))
    back = _from_key(keys).tolist()
    for value, found in zip(values, back, strict=True):
        assert found == value or (math.isnan(found) and math.isnan(value))
    known = [(v, k) for v, k in zip(values, keys.tolist(), strict=True) if not math.isnan(v)]
    assert [v for v, _ in sorted(known, key=lambda each: each[1])] == sorted(v for v, _ in known)
    assert all(k > max((k for _, k in known), default=0) for k in keys[keys > 2**63 - 2].tolist())


@settings(max_examples=60, deadline=None)
@given(
    start=st.lists(numbers, min_size=1, max_size=4),
    data=st.data(),
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=7),
    kind=st.sampled_from([PlainSum, ExactSum]),
)
def test_the_mean_of_what_micro_batches_leave_is_as_exact_as_the_values(
    start: list[float], data: st.DataObject, counts: list[int], kind: type[StepSum]
) -> None:
    leave = [data.draw(st.lists(modest, min_size=len(start), max_size=len(start))) for _ in counts]
    weights = [count / sum(counts) for count in counts]
    model = Holder(start)
    sums = kind(model)
    sums.begin([range(len(counts))], weights, 0)
    for virtual_worker, values in enumerate(leave):
        sums.before(virtual_worker)
        assert torch.equal(model.kept, torch.tensor(start)), "as the step began"
        model.kept.copy_(torch.tensor(values))
        sums.after(virtual_worker)
    sums.finish()
    for at, found in enumerate(model.kept.tolist()):
        values = [each[at] for each in leave]
        wanted = sum(w * v for w, v in zip(weights, values, strict=True))
        # Rounding in the numbers that are added: the values, and the start if it is not far away.
        size = max(map(abs, values))
        size = max(size, abs(start[at]) if abs(wanted) > 2e-4 * abs(start[at]) else 0)
        assert abs(found - wanted) <= 1e-5 * size + 1e-30


@settings(max_examples=60, deadline=None)
@given(
    changes=st.lists(st.integers(-5, 5), min_size=1, max_size=8),
    shares=st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_the_verdict_of_all_ranks_is_that_of_one(changes: list[int], shares: list[int]) -> None:
    """A counter's changes in micro-batches, by one rank and shared among several."""

    def verdict(mine: range) -> torch.Tensor:
        model = nn.Module()
        model.register_buffer("count", torch.tensor([3, 4]))
        buffers = Buffers(model)
        buffers.look(Sight(model))
        buffers.begin()
        for virtual_worker in mine:
            buffers.rewind()
            model.count += changes[virtual_worker]
            buffers.leaf(virtual_worker)
        found = buffers.verdict(torch.device("cpu"))
        assert found is not None
        assert len(found) == buffers.verdict_size
        return found

    cut = [range(r.start, min(r.stop, len(changes))) for r in virtual_ranges([*shares, 99])]
    together = torch.stack([verdict(r) for r in cut]).amax(0)
    assert torch.equal(together, verdict(range(len(changes))))
