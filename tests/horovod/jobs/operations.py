"""Checks of Horovod's operations between real workers: each function is one, on every rank."""

import copy
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import elastic_driver.horovod.torch as hvd
from tests.horovod.jobs.checking import run_checks

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]


def mine(dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    return torch.full(shape or (3,), hvd.rank() + 1).to(dtype)


def check_every_dtype_is_reduced() -> None:
    size = hvd.size()
    total = size * (size + 1) // 2
    for dtype in DTYPES:
        assert_close(hvd.allreduce(mine(dtype), op=hvd.Sum), torch.full((3,), total).to(dtype))
        average = torch.full((3,), total / size).to(dtype)  # integers are truncated
        assert_close(hvd.allreduce(mine(dtype)), average)
        assert_close(hvd.allreduce(mine(dtype), average=True), average)
        assert_close(hvd.allreduce(mine(dtype), op=hvd.Min), torch.ones(3).to(dtype))
        assert_close(hvd.allreduce(mine(dtype), op=hvd.Max), torch.full((3,), size).to(dtype))
    product = torch.tensor(range(1, size + 1)).prod().item()
    assert_close(hvd.allreduce(mine(), op=hvd.Product), torch.full((3,), float(product)))


def check_scaling_is_in_double_precision() -> None:
    size = hvd.size()
    x = torch.tensor([7, -7], dtype=torch.int32)
    assert hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5).tolist() == [3 * size, -3 * size]
    scaled = hvd.allreduce(x, op=hvd.Sum, postscale_factor=1 / 3).tolist()
    assert scaled == [int(7 * size / 3), int(-7 * size / 3)]


def check_factors_of_half_precision_are_not_rounded() -> None:
    halves = [torch.arange(-100.0, 100.0, dtype=torch.float16) for _ in range(5)]
    factor = 0.9296160928171479
    for found in hvd.grouped_allreduce(halves, op=hvd.Sum, postscale_factor=factor):
        assert torch.equal(found, (halves[0].float() * hvd.size() * factor).half())


def check_in_place_grouped_and_compressed() -> None:
    total = hvd.size() * (hvd.size() + 1) / 2
    x, strided = mine(), mine(torch.float32, 4, 6)[:, ::2]
    assert hvd.allreduce_(x, op=hvd.Sum) is x
    assert_close(x, torch.full((3,), total))
    handle = hvd.allreduce_async_(strided, op=hvd.Sum)
    assert hvd.synchronize(handle) is strided
    assert_close(strided, torch.full((4, 3), total))
    group = [mine(), mine(torch.int64, 2, 2), mine(torch.float64, 1)]
    results = hvd.grouped_allreduce(group, op=hvd.Sum, name="group")
    for before, after in zip(group, results, strict=True):
        assert_close(after, torch.full_like(before, total))
    assert hvd.grouped_allreduce_(group, op=hvd.Sum)[0] is group[0]
    halves = hvd.allreduce(mine(), compression=hvd.Compression.fp16, op=hvd.Sum)
    assert halves.dtype == torch.float32
    assert_close(halves, torch.full((3,), total))


def check_any_order_of_calls() -> None:
    names = [f"order.{n}" for n in range(40)]
    random.Random(hvd.rank()).shuffle(names)
    handles = {}
    for name in names:
        number = int(name.partition(".")[2])
        handles[name] = hvd.allreduce_async(torch.full((number + 1,), 1.0 * number), name=name)
    for name in sorted(names):
        number = int(name.partition(".")[2])
        assert_close(hvd.synchronize(handles[name]), torch.full((number + 1,), 1.0 * number))


def check_rows_are_gathered() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (*DTYPES, torch.bool):
        rows = torch.full((rank, 2), rank).to(dtype)  # rank 0 has none
        expected = torch.cat([torch.full((r, 2), r) for r in range(size)]).to(dtype)
        assert_close(hvd.allgather(rows, name="rows"), expected)
    one, two = hvd.grouped_allgather([torch.tensor([rank]), torch.ones(rank + 1, 3)])
    assert one.tolist() == list(range(size))
    assert two.shape == (size * (size + 1) // 2, 3)


def check_broadcast_from_each_root() -> None:
    for root in range(hvd.size()):
        for dtype in (*DTYPES, torch.bool):
            x = torch.full((2, 2), hvd.rank() % 2).to(dtype)
            assert_close(hvd.broadcast(x, root), torch.full((2, 2), root % 2).to(dtype))
        y = mine(torch.float32, 4, 4).t()[:2]
        assert hvd.broadcast_(y, root) is y
        assert_close(y, torch.full((2, 4), root + 1.0))


def check_alltoall_and_reducescatter() -> None:
    rank, size = hvd.rank(), hvd.size()
    out, counts = hvd.alltoall(torch.full((size * (rank + 1),), rank), [rank + 1] * size)
    assert out.tolist() == [r for r in range(size) for _ in range(r + 1)]
    assert counts.tolist() == [r + 1 for r in range(size)]
    assert hvd.alltoall(torch.arange(size)).tolist() == [rank] * size
    rows = torch.arange(2.0 * size + 1)
    start = 2 * rank + min(rank, 1)
    assert_close(hvd.reducescatter(rows), rows[start : start + 2 + (rank < 1)])
    parts = hvd.grouped_reducescatter([rows, rows.double()], op=hvd.Sum)
    assert_close(parts[1], rows[start : start + 2 + (rank < 1)].double() * size)


def check_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = torch.ones(2, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum).backward(torch.full((2,), rank + 1.0))
    assert x.grad is not None
    assert_close(x.grad, torch.full((2,), size * (size + 1) / 2))
    y = torch.ones(rank + 1, requires_grad=True)
    rows = torch.cat([torch.full((r + 1,), float(r)) for r in range(size)])
    hvd.allgather(y).backward(rows)
    assert_close(y.grad, torch.full((rank + 1,), float(rank)))
    z = torch.ones(2, requires_grad=True)
    hvd.broadcast(z, 1).backward(torch.ones(2))
    assert_close(z.grad, torch.full((2,), 1.0 if rank == 1 else 0.0))
    w = torch.ones(size, requires_grad=True)
    hvd.alltoall(w).backward(torch.full((size,), float(rank)))
    assert_close(w.grad, torch.arange(float(size)))
    v = torch.ones(size, requires_grad=True)
    hvd.reducescatter(v, op=hvd.Sum).backward(torch.ones(1))
    assert_close(v.grad, torch.full((size,), float(size)))


def check_disagreements_are_errors_on_every_rank() -> None:
    odd = hvd.rank() == 1
    cases = [
        (lambda: hvd.allreduce(torch.ones(5 if odd else 4), name="d"), r"shape: \[4\] on ranks 0,"),
        (lambda: hvd.allreduce(mine(torch.int8 if odd else torch.int32), name="d"), "dtype: int32"),
        (lambda: hvd.allreduce(mine(), op=hvd.Min if odd else hvd.Max, name="d"), "Min on rank 1"),
        (lambda: hvd.broadcast(mine(), 1 if odd else 0, name="d"), "root rank: 0 on"),
        (lambda: hvd.allgather(torch.ones(2, 3 if odd else 4), name="d"), r"\[\*, 3\] on rank 1"),
        (lambda: hvd.alltoall(torch.ones(hvd.size(), 1 + odd), name="d"), r"\[\*, 2\] on rank 1"),
    ]
    for call, words in cases:
        with pytest.raises(hvd.HorovodInternalError, match=words) as error:
            call()
        assert "'d'" in str(error.value)
        assert_close(hvd.allreduce(torch.ones(2), name="d"), torch.ones(2))  # the world goes on


def check_mistakes_of_one_rank_are_refused_at_once() -> None:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(mine(), name="twice")
        with pytest.raises(ValueError, match="'twice' is pending already"):
            hvd.allreduce_async(mine(), name="twice")
    hvd.barrier()
    if hvd.rank() > 0:
        handle = hvd.allreduce_async(mine(), name="twice")
    hvd.synchronize(handle)
    with pytest.raises(ValueError, match="unknown"):
        hvd.synchronize(handle)
    with pytest.raises(ValueError, match="splits"):
        hvd.alltoall(torch.ones(2), [1])
    with pytest.raises(ValueError, match="root rank"):
        hvd.broadcast(mine(), hvd.size())
    with pytest.raises(ValueError, match=r"not (added|part)"):
        hvd.allreduce(mine(), process_set=hvd.ProcessSet([0]))


def check_ranks_with_fewer_batches_join() -> None:
    rank, size = hvd.rank(), hvd.size()
    for step in range(rank + 1):  # rank 0 joins first
        present = size - step
        assert_close(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), 1.0 * present))
        assert_close(hvd.allreduce(torch.ones(3)), torch.full((3,), present / size))
        assert_close(hvd.allreduce(mine(), op=hvd.Min), torch.full((3,), step + 1.0))
        if 0 < step < size - 1:
            with pytest.raises(hvd.HorovodInternalError, match="joined, and allgather needs all"):
                hvd.allgather(torch.ones(1), name=f"after.{step}")
    assert hvd.join() == size - 1
    assert_close(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.tensor([1.0 * size]))


def check_process_sets() -> None:
    rank, size = hvd.rank(), hvd.size()
    ends = hvd.add_process_set([0, size - 1])
    rest = hvd.add_process_set(hvd.ProcessSet(range(1, size)))
    assert ends.size() == 2
    assert ends.included() == (rank in (0, size - 1))
    if ends.included():
        assert ends.rank() == (rank > 0)
        assert_close(
            hvd.allreduce(mine(), op=hvd.Sum, process_set=ends), torch.full((3,), 1.0 + size)
        )
        hvd.barrier(ends)
    if rest.included():
        assert hvd.allgather(torch.tensor([rank]), process_set=rest).tolist() == [*range(1, size)]
    with pytest.raises(ValueError, match="already"):
        hvd.add_process_set([0, size - 1])
    assert hvd.remove_process_set(ends)
    assert not hvd.remove_process_set(ends)
    hvd.remove_process_set(rest)
    with pytest.raises(hvd.HorovodInternalError, match="disagree about the ranks"):
        hvd.add_process_set([0, 1 + (rank == 1)])


def check_objects_and_states() -> None:
    rank = hvd.rank()
    assert hvd.broadcast_object({"rank": rank, "x": torch.ones(rank)}, 1)["rank"] == 1
    assert hvd.allgather_object({rank}) == [{r} for r in range(hvd.size())]
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    assert len({str(weights) for weights in hvd.allgather_object(model.weight.tolist())}) == 1
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 0:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hvd.allgather_object(str(optimizer.state_dict()))
    assert len(set(states)) == 1
    assert "exp_avg" in states[0]


def check_sparse_tensors() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = torch.sparse_coo_tensor([[0, rank]], [1.0, 1.0], (size,), check_invariants=True)
    result = hvd.sparse_allreduce_async(x, name="sparse", op=hvd.Sum)()
    expected = torch.ones(size)
    expected[0] += size
    assert_close(result.to_dense(), expected)


def check_adasum_of_parallel_and_orthogonal_vectors() -> None:
    if hvd.size() & (hvd.size() - 1):
        with pytest.raises(NotImplementedError, match="2, 4, 8"):
            hvd.allreduce(mine(), op=hvd.Adasum)
        return
    same = torch.tensor([1.0, 2.0])
    assert_close(hvd.allreduce(same, op=hvd.Adasum), same)
    apart = torch.eye(hvd.size())[hvd.rank()]
    assert_close(hvd.allreduce(apart, op=hvd.Adasum), torch.ones(hvd.size()))


def rows_of_all() -> tuple[torch.Tensor, torch.Tensor, slice]:
    """The batch of all ranks, its targets, and which rows are this rank's."""
    torch.manual_seed(7)
    x, y = torch.randn(4 * hvd.size(), 6), torch.randn(4 * hvd.size(), 2)
    return x, y, slice(4 * hvd.rank(), 4 * hvd.rank() + 4)


def check_an_optimizer_steps_as_one_worker_with_the_whole_batch() -> None:
    x, y, mine_ = rows_of_all()
    for options in (
        {},
        {"groups": 2},
        {"backward_passes_per_step": 2},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
        {"op": hvd.Sum},
    ):
        torch.manual_seed(hvd.rank())
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        alone = copy.deepcopy(model)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(
            sgd, named_parameters=model.named_parameters(), **options
        )
        assert isinstance(optimizer, torch.optim.SGD)
        reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        passes = options.get("backward_passes_per_step", 1)
        factor = passes * (hvd.size() if options.get("op") == hvd.Sum else 1)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(passes):
                torch.nn.functional.mse_loss(model(x[mine_]), y[mine_]).backward()
            optimizer.step()
            reference.zero_grad()
            (factor * torch.nn.functional.mse_loss(alone(x), y)).backward()
            reference.step()
        close = {"rtol": 0.02, "atol": 0.01} if "compression" in options else {}
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert_close(ours, theirs, msg=str(options), **close)


def check_branches_and_frozen_parameters_may_differ() -> None:
    rank, size = hvd.rank(), hvd.size()
    parts = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(size))
    for part in parts:
        torch.nn.init.zeros_(part.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parts.parameters(), lr=1.0), named_parameters=parts.named_parameters()
    )
    parts[rank](torch.ones(1, 2)).sum().backward()  # another part on each rank
    with pytest.raises(AssertionError, match="being reduced"):
        optimizer.zero_grad()
    optimizer.step()
    for part in parts:
        assert_close(part.weight.detach(), torch.full((1, 2), -1.0 / size))
    parts[0].requires_grad_(False)
    optimizer.zero_grad()
    parts[1](torch.ones(1, 2)).sum().backward()
    optimizer.synchronize()
    assert_close(parts[1].weight.grad, torch.ones(1, 2))
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_close(parts[0].weight.detach(), torch.full((1, 2), -1.0 / size))
    parts[0].requires_grad_(True)
    optimizer.zero_grad(set_to_none=False)
    parts[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError, match="more than 1 times"):
        parts[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError, match=r"0\.weight was changed while it was reduced"):
        optimizer.step()
    with pytest.raises(ValueError, match="more than once: w"):
        hvd.DistributedOptimizer(optimizer, [("w", p) for p in parts.parameters()])


def check_an_optimizer_of_a_process_set_leaves_others_alone() -> None:
    rank = hvd.rank()
    pair = hvd.add_process_set([0, 1])
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=pair)
    (weight * (rank + 1)).sum().backward()
    optimizer.step()
    assert weight.item() == (-1.5 if rank < 2 else -rank - 1.0)
    hvd.remove_process_set(pair)


def check_adasum_of_steps() -> None:
    if hvd.size() & (hvd.size() - 1):
        return
    weight = torch.nn.Parameter(torch.zeros(hvd.size()))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Adasum)
    weight[hvd.rank()].backward()
    optimizer.step()
    assert_close(weight.detach(), -torch.ones(hvd.size()))


def check_batches_are_normalised_together() -> None:
    torch.manual_seed(3)
    whole = torch.randn(3 * hvd.size(), 4, 5) * 3 + 100
    mine_ = slice(3 * hvd.rank(), 3 * hvd.rank() + 3)
    ours, reference = hvd.SyncBatchNorm(4), torch.nn.BatchNorm1d(4)
    x, y = whole[mine_].clone().requires_grad_(), whole.clone().requires_grad_()
    for _ in range(2):
        out, expected = ours(x), reference(y)
        assert_close(out, expected[mine_], rtol=1e-3, atol=1e-3)
    out.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    assert_close(x.grad, y.grad[mine_], rtol=1e-2, atol=1e-2)
    assert_close(ours.running_mean, reference.running_mean)
    assert_close(ours.running_var, reference.running_var, rtol=1e-3, atol=1e-3)
    ours.eval()
    reference.eval()
    assert_close(ours(x), reference(y)[mine_], rtol=1e-3, atol=1e-3)


def check_running_means_that_differ_do_not_change_what_is_normalised() -> None:
    torch.manual_seed(3)
    whole = torch.randn(3 * hvd.size(), 4, 5) * 3 + 100
    mine_ = slice(3 * hvd.rank(), 3 * hvd.rank() + 3)
    ours, reference = hvd.SyncBatchNorm(4), torch.nn.BatchNorm1d(4)
    ours.running_mean.fill_(100.0 * hvd.rank())  # as where one rank alone has read a checkpoint
    x, y = whole[mine_].clone().requires_grad_(), whole.clone().requires_grad_()
    out, expected = ours(x), reference(y)
    assert_close(out, expected[mine_], rtol=1e-3, atol=1e-3)
    out.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    assert_close(x.grad, y.grad[mine_], rtol=1e-2, atol=1e-2)


def check_a_timeline_is_json() -> None:
    file = Path(sys.argv[1], "timeline.json")
    hvd.start_timeline(str(file), mark_cycles=True)
    hvd.barrier()
    hvd.allreduce(mine(), name="timed")
    hvd.stop_timeline()
    if hvd.rank() == 0:
        events = json.loads(file.read_text())
        names = [event.get("name") for event in events]
        for name in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START", "0", "1"):
            assert name in names, name
        assert "allreduce.timed" in [event.get("args", {}).get("name") for event in events]


def check_60_random_worlds_end_in_right_sums_or_named_errors() -> None:
    rank, size = hvd.rank(), hvd.size()
    for seed in range(60):
        shared, own = random.Random(seed), random.Random(f"{seed}.{rank}")
        calls = []
        for number in range(shared.randint(1, 6)):
            kind = shared.choice(["right", "right", "shape", "dtype"])
            calls.append((f"r{number}", kind, shared.randrange(size), shared.randint(1, 5)))
        own.shuffle(calls)
        handles = []
        for name, kind, guilty, length in calls:
            odd = rank == guilty
            dtype = torch.int32 if kind == "dtype" and odd else torch.float32
            x = torch.full((length + (kind == "shape" and odd),), rank + 1).to(dtype)
            handles.append((kind, hvd.allreduce_async(x, name=name, op=hvd.Sum), length))
        for kind, handle, length in handles:
            if kind in ("shape", "dtype"):
                with pytest.raises(hvd.HorovodInternalError, match=f"disagree about the {kind}"):
                    hvd.synchronize(handle)
            else:
                total = torch.full((length,), size * (size + 1) / 2)
                assert_close(hvd.synchronize(handle), total)


if __name__ == "__main__":
    run_checks(globals())
