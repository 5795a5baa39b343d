"""One rank: carries out its part of each plan, and checks what came of it.

    python -m tests.horovod.seeds.worker FOLDER FIRST COUNT

Rank R writes `R.ok`, the number of seeds that were right; or `R.wrong`, and ends.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_driver.horovod.torch as hvd
from tests.horovod.seeds.plan import Call, Fault, Plan, Planned, plan_of, process_sets

HANG_S = 60.0  # for one seed
NEW_WORLD = 40  # seeds in one world
ERROR: type[Exception] = hvd.HorovodInternalError
# What the error of each fault says.
SAYS = {Fault.DISAGREES: "ranks disagree about", Fault.FORGOTTEN: "did not"}
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Sum": lambda stacked: stacked.sum(0),
    "Average": lambda stacked: stacked.double().sum(0) / len(stacked),
    "Min": lambda stacked: stacked.min(0).values,
    "Max": lambda stacked: stacked.max(0).values,
    "Product": lambda stacked: stacked.prod(0),
}


# ---- what is called ----------------------------------------------------------------------


def tensor_of(call: Call, rank: int, places: int) -> torch.Tensor:
    """Return the rank's tensor: small whole numbers, other ones on each rank."""
    rows = sum(splits_of(call, places)) if call.kind == "alltoall" else call.shape[0] + call.rows
    shape = (rows, *call.shape[1:])
    return ((torch.arange(prod(shape)) + rank) % 5 + 1).view(shape).to(getattr(torch, call.dtype))


def splits_of(call: Call, places: int) -> list[int]:
    """Return how many rows of an alltoall each rank gets."""
    return [(call.rows + place) % 4 for place in range(places)]


def begin(call: Call, rank: int, places: int, process_set: Any) -> int:
    """Make the call; return its handle."""
    tensor, op = tensor_of(call, rank, places), getattr(hvd, call.op)
    here = {"name": call.name, "process_set": process_set}
    if call.kind == "allreduce":
        return hvd.allreduce_async(tensor, op=op, **here)
    if call.kind == "grouped":
        return hvd.grouped_allreduce_async([tensor, tensor + 1], op=op, **here)
    if call.kind == "allgather":
        return hvd.allgather_async(tensor, **here)
    if call.kind == "broadcast":
        return hvd.broadcast_async(tensor, call.root, **here)
    if call.kind == "reducescatter":
        return hvd.reducescatter_async(tensor, op=op, **here)
    splits = torch.tensor(splits_of(call, places), dtype=torch.int32)
    return hvd.alltoall_async(tensor, splits=splits, **here)


# ---- what is right -----------------------------------------------------------------------


def reduced(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """Return the reduction of the ranks' tensors; an average of integers is truncated."""
    return REDUCTIONS[op](torch.stack(tensors)).to(tensors[0].dtype)


def expected(planned: Planned, rank: int) -> list[torch.Tensor]:
    """Return the tensors of a call that is right, for one of its ranks."""
    call, members = planned.calls[rank], planned.members
    places, index = len(members), members.index(rank)
    inputs = [tensor_of(planned.calls[member], member, places) for member in members]
    if call.kind == "allreduce":
        return [reduced(inputs, call.op)]
    if call.kind == "grouped":
        return [reduced(inputs, call.op), reduced([each + 1 for each in inputs], call.op)]
    if call.kind == "allgather":
        return [torch.cat(inputs)]
    if call.kind == "broadcast":
        return [inputs[members.index(call.root)]]
    if call.kind == "reducescatter":
        least, longer = divmod(call.shape[0], places)
        lengths = [least + (place < longer) for place in range(places)]
        return [reduced(inputs, call.op).split(lengths)[index]]
    shares = [
        tensor.split(splits_of(planned.calls[member], places))[index]
        for member, tensor in zip(members, inputs, strict=True)
    ]
    return [torch.cat(shares), torch.tensor([len(share) for share in shares], dtype=torch.int32)]


def check(planned: Planned, rank: int, handle: int) -> None:
    """Wait for a call; its result, or its error, has to be what the plan says."""
    error, found = "", []
    try:
        result = hvd.synchronize(handle)
        found = [result] if isinstance(result, torch.Tensor) else list(result)
    except ERROR as raised:
        error = str(raised)
    if error or planned.fault in SAYS:
        says = SAYS.get(planned.fault, "nothing is wrong")
        assert planned.name in error, f"{planned}: {error or found}"
        assert says in error, f"{planned}: {error}"
        return
    for there, right in zip(found, expected(planned, rank), strict=True):
        assert there.dtype == right.dtype, f"{planned}: {there.dtype}"
        assert torch.equal(there, right), f"{planned}: {there} is not {right}"


# ---- one seed ----------------------------------------------------------------------------


def play(plan: Plan, rank: int, sets: list[Any]) -> None:
    """Make all calls of the rank, in its order, and check them; then join, and meet again."""
    handles: dict[int, int] = {}

    def make(late: bool) -> None:
        for number in plan.orders[rank]:
            planned = plan.planned[number]
            if (rank in planned.late) == late:
                handles[number] = make_one(planned, rank, sets)

    make(late=False)
    hvd.barrier()
    make(late=True)
    for number in sorted(handles):
        check(plan.planned[number], rank, handles[number])
    torch.distributed.barrier()  # some ranks wait longer than others for what was forgotten
    if plan.steps:
        train_and_join(plan, rank)
    total = hvd.allreduce(torch.full((3,), rank + 1.0), op=hvd.Sum, name=f"{plan.seed}.end")
    assert total.tolist() == [hvd.size() * (hvd.size() + 1) / 2] * 3, f"after the seed: {total}"


def make_one(planned: Planned, rank: int, sets: list[Any]) -> int:
    """Make a call; where the plan says so twice, which is refused."""
    call, places = planned.calls[rank], len(planned.members)
    handle = begin(call, rank, places, sets[call.process_set])
    if planned.twice == rank:
        with pytest.raises(ValueError, match=f"'{planned.name}' is pending"):
            begin(call, rank, places, sets[call.process_set])
    return handle


def train_and_join(plan: Plan, rank: int) -> None:
    """Make as many steps as the plan says, and wait for those that make more."""
    for step in range(plan.steps[rank]):
        there = [r for r, steps in enumerate(plan.steps) if steps > step]
        one = torch.full((4,), rank + 1.0)
        total = hvd.allreduce(one, op=hvd.Sum, name=f"{plan.seed}.sum.{step}")
        average = hvd.allreduce(one, name=f"{plan.seed}.average.{step}")
        right = float(sum(r + 1 for r in there))
        assert total.tolist() == [right] * 4, f"step {step} of ranks {there}: {total}"
        close = torch.full((4,), right / hvd.size())
        assert torch.allclose(average, close), f"step {step} of ranks {there}: {average}"
    assert 0 <= hvd.join() < hvd.size()


def worlds(first: int, count: int) -> Iterator[range]:
    """Yield the seeds of each world."""
    for start in range(first, first + count, NEW_WORLD):
        yield range(start, min(start + NEW_WORLD, first + count))


def main() -> None:
    """Play all seeds."""
    folder, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    rank, right = int(os.environ["HOROVOD_RANK"]), 0
    seed = first
    try:
        for seeds in worlds(first, count):
            size = int(os.environ["HOROVOD_SIZE"])
            others = [hvd.ProcessSet(ranks) for ranks in process_sets(size)[1:]]
            hvd.init(process_sets=others)
            assert hvd.rank() == rank
            for seed in seeds:
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                play(plan_of(seed, size), rank, [hvd.global_process_set, *others])
                right += 1
            hvd.shutdown()
            faulthandler.cancel_dump_traceback_later()
    except BaseException:  # pytest's failures, too
        (folder / f"{rank}.wrong").write_text(f"seed {seed}: {traceback.format_exc()}")
        os._exit(1)
    (folder / f"{rank}.ok").write_text(str(right))


if __name__ == "__main__":
    main()
