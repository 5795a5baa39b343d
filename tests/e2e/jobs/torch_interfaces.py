"""Calls torch's collectives and DDP as its examples do, in a world of ours or of torchrun's.

Writes what each function found to `<folder>/<rank>.json`: `torch_interfaces.py FOLDER [plain]`.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

Wrap = Callable[..., DistributedDataParallel]
OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX")


def mine(*shape: int) -> torch.Tensor:
    """Numbers of this rank."""
    start = 1.0 + 10 * dist.get_rank()
    return torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)


def names(_: Wrap) -> list[object]:
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "ROLE_NAME", "ROLE_RANK")
    group = dist.new_group([0, 1])
    found = [os.environ.get(name) for name in variables]
    backends = [dist.get_backend(), dist.get_backend(group), dist.get_backend_config()]
    return [*found, *map(str, backends[:2]), dist.get_rank(), dist.get_world_size(group)]


def reductions(_: Wrap) -> list[object]:
    found: list[object] = []
    for name in OPERATIONS:
        tensor = mine(3)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
        dist.reduce(other := mine(2), 0, getattr(dist.ReduceOp, name))
        found += [tensor.tolist(), other.tolist() if dist.get_rank() == 0 else None]
    work = dist.all_reduce(tensor := mine(2).to(torch.bfloat16), async_op=True)
    work.wait()
    return [*found, tensor.tolist()]


def movements(_: Wrap) -> list[object]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.broadcast(sent := mine(2), 1)
    parts = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(parts, mine(2))
    dist.all_gather_into_tensor(whole := torch.zeros(2 * size), mine(2))
    dist.reduce_scatter_tensor(share := torch.zeros(2), mine(2 * size))
    dist.all_to_all_single(turned := torch.zeros(size, 2), mine(size, 2))
    at_root = [torch.zeros(2) for _ in range(size)] if rank == 0 else None
    dist.gather(mine(2), at_root)
    dist.scatter(part := torch.zeros(2), [mine(2) + n for n in range(size)] if rank == 0 else None)
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    swapped = torch.zeros(2)
    swaps = [dist.P2POp(dist.isend, mine(2), ahead), dist.P2POp(dist.irecv, swapped, behind)]
    for work in dist.batch_isend_irecv(swaps):
        work.wait()
    tensors = [sent, *parts, whole, share, turned, *(at_root or ()), part, swapped]
    return [tensor.tolist() for tensor in tensors]


def objects(_: Wrap) -> list[object]:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    one = ["from 0" if rank == 0 else None]
    dist.broadcast_object_list(one, 0)
    scattered: list[object] = [None]
    dist.scatter_object_list(scattered, list(range(size)) if rank == 0 else None, 0)
    return [*gathered, *one, *scattered]


def groups(_: Wrap) -> list[object]:
    group, subgroups = dist.new_subgroups(1)
    again = dist.new_group(backend="gloo")
    dist.all_reduce(alone := mine(1), group=group)
    dist.all_reduce(together := mine(1), group=again)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    dist.all_reduce(meshed := mine(1), group=mesh.get_group("dp"))
    found = [alone.tolist(), together.tolist(), meshed.tolist(), len(subgroups)]
    return [*found, mesh.get_local_rank("dp"), str(dist.get_backend(again))]


def barriers(_: Wrap) -> list[object]:
    dist.barrier()
    dist.monitored_barrier()
    missing = ""
    group = dist.new_group()
    if dist.get_rank() == 0:
        try:
            dist.monitored_barrier(group, timedelta(seconds=0.5), wait_all_ranks=True)
        except RuntimeError as error:
            missing = str(error).partition("\n")[0]
    dist.barrier()
    return [missing]


def gradients_of_collectives(_: Wrap) -> list[object]:
    size, found = dist.get_world_size(), list[object]()
    x = mine(size).requires_grad_()
    differentiable.all_reduce(x * x).sum().backward()
    found.append(x.grad.tolist())
    outputs = [torch.zeros(1) for _ in range(size)]
    y = mine(size).requires_grad_()
    turned = differentiable.all_to_all(outputs, list((y * y).split(1)))
    torch.cat(tuple(turned)).sum().backward()
    return [*found, y.grad.tolist(), torch.cat(tuple(turned)).tolist()]


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def weights(of: torch.nn.Module) -> list[float]:
    return [p.detach().double().sum().item() for p in of.parameters()]


def train(ddp: torch.nn.Module, steps: int = 3, every: int = 1) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(steps * every):
        torch.manual_seed(100 * dist.get_rank() + step)
        last = (step + 1) % every == 0
        with nullcontext() if last else ddp.no_sync():
            ddp(torch.randn(5, 4)).square().mean().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def wrappers(wrap: Wrap) -> list[object]:
    found: list[object] = []
    for arguments in (
        {}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.0001},
        {"find_unused_parameters": True}, {"broadcast_buffers": False},
    ):  # fmt: skip
        train(wrap(module := model(), **arguments))
        found.append(weights(module))
    train(wrap(module := model()), every=2)
    return [*found, weights(module)]


def buffers(wrap: Wrap) -> list[object]:
    found: list[object] = []
    for arguments in ({}, {"broadcast_buffers": False}):
        module = torch.nn.Sequential(model(), torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2))
        module.register_buffer("rank", torch.full((3, 2), dist.get_rank(), dtype=torch.bfloat16))
        module.register_buffer("number", torch.tensor(dist.get_rank()))
        ddp = wrap(module, **arguments)
        train(ddp)
        with ddp.join():
            train(ddp, 1 + dist.get_rank())
        found += [weights(module), [b.double().tolist() for b in module.buffers()]]
    return found


def hooks(wrap: Wrap) -> list[object]:
    found: list[object] = []
    power = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    for state, hook in (
        (None, default_hooks.allreduce_hook),
        (None, default_hooks.fp16_compress_hook),
        (power, powerSGD_hook.powerSGD_hook),
    ):
        ddp = wrap(module := model())
        ddp.register_comm_hook(state, hook)
        train(ddp, 4)
        found.append(weights(module))
    return found


def uneven(wrap: Wrap) -> list[object]:
    found: list[object] = []
    for initial in (True, False):
        for compressed in (False, True):
            ddp = wrap(module := model())
            if compressed:
                ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
            with ddp.join(divide_by_initial_world_size=initial):
                train(ddp, 2 + dist.get_rank())
            train(ddp, 2)  # all take part again
            found.append(weights(module))
    ddp = wrap(module := model())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    with Join([ddp, optimizer]):
        for _ in range(2 + dist.get_rank()):
            ddp(mine(5, 4) / 100).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*found, weights(module)]


FUNCTIONS = (
    names, reductions, movements, objects, groups, barriers, gradients_of_collectives, wrappers,
    buffers, hooks, uneven,
)  # fmt: skip


def run(wrap: Wrap) -> None:
    found: dict[str, Any] = {function.__name__: function(wrap) for function in FUNCTIONS}
    path = Path(sys.argv[1]) / f"{dist.get_rank()}.json"
    path.write_text(json.dumps(found))


if sys.argv[2:] == ["plain"]:
    dist.init_process_group("gloo")
    run(DistributedDataParallel)
    dist.destroy_process_group()
else:
    import elastic_driver as elastic

    elastic.run(lambda _: run(elastic.wrap))(elastic.ObjectState(step=0))
