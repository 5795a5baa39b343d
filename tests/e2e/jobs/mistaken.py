"""An elastic job with one mistake, named by MISTAKE; "" is a right one, with everything.

STEPS steps of 20 ms. Rank 1 of the first round ends at step LOST, if that is given.
"""

import os
import time

import quick_end
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import elastic_driver as elastic

quick_end.prepare()

MISTAKE = os.environ.get("MISTAKE", "")
STEPS = int(os.environ.get("STEPS", "60"))
LOST = int(os.environ.get("LOST", "-1"))
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
average = torch.optim.swa_utils.AveragedModel(model)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
data = TensorDataset(torch.randn(96, 4))
sampler = elastic.ElasticSampler(data)
state = elastic.TorchState(
    model=model,
    optimizer=optimizer,
    average=average,
    schedule=schedule,
    sampler=sampler,
    step=0,
    epoch=0,
)


def is_lost() -> bool:
    return state.step == LOST and (elastic.rank(), elastic.round_id()) == (1, 1)


def train_a_step(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(x).float().square().mean()
    loss.backward()
    optimizer.step()
    schedule.step()
    average.update_parameters(model)
    time.sleep(0.02)
    return loss.detach()


@elastic.run
def train(state: elastic.TorchState) -> None:
    torch.manual_seed(elastic.rank())  # dropout of its own
    net = model if "alone" in MISTAKE else elastic.wrap(model)
    loader = DataLoader(data, 2, sampler=sampler)
    while state.step < STEPS:
        sampler.set_epoch(state.epoch)
        for (x,) in loader:
            loss = train_a_step(net, x)
            if MISTAKE == "alone, with a metric":
                dist.all_reduce(loss)
            state.step += 1
            state.commit()
            if is_lost() and MISTAKE == "":
                os._exit(9)
        if is_lost():
            os._exit(9)
        if MISTAKE == "":
            loss = torch.zeros(())
        dist.all_reduce(loss)
        state.epoch += 1
        state.commit()


@elastic.run
def swallow(state: elastic.TorchState) -> None:
    net = elastic.wrap(model)
    while state.step < STEPS:
        try:
            train_a_step(net, torch.ones(2, 4))
            if "whole" in MISTAKE:
                state.step += 1
                state.commit()
        except Exception as error:
            print(f"swallowed {type(error).__name__}", flush=True)
        if "whole" not in MISTAKE:
            state.step += 1
            state.commit()
        if is_lost():
            os._exit(9)


@elastic.run
def uneven(state: elastic.TorchState) -> None:
    net = elastic.wrap(model)
    while state.step < STEPS:
        train_a_step(net, torch.ones(2, 4))
        state.step += 1
        state.commit()
        if state.step == 20 and elastic.round_id() == 1 and elastic.rank() == 1:
            if MISTAKE == "a barrier":
                dist.barrier()
            else:
                return


if "swallow" in MISTAKE:
    swallow(state)
elif MISTAKE in ("returns early", "a barrier"):
    uneven(state)
else:
    train(state)
weights = sum(p.double().sum().item() for p in model.parameters())
print(f"done at {state.step}, committed {state.version}: {weights:.9f}", flush=True)
