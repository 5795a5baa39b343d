"""An elastic job with an average of its weights in buffers, and a normalisation of its own.

STEPS steps of 20 ms. Each rank normalises by the statistics of its own samples. WRONG_RANK moves
its average otherwise from its step WRONG_STEP on.
"""

import os
import time

import quick_end
import torch
from torch import nn

import elastic_driver as elastic

quick_end.prepare()

STEPS = int(os.environ.get("STEPS", "150"))
WRONG_RANK = int(os.environ.get("WRONG_RANK", "-1"))
WRONG_STEP = int(os.environ.get("WRONG_STEP", "50"))


class Norm(nn.Module):
    """A normalisation of the script's own, frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if state.step >= 30:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class Average(nn.Module):
    """The average of the weights of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for number, parameter in enumerate(model.parameters()):
            self.register_buffer(f"p{number}", parameter.detach().clone())

    def follow(self, model: nn.Module, decay: float) -> None:
        for mine, parameter in zip(self.buffers(), model.parameters(), strict=True):
            mine.lerp_(parameter.detach(), 1 - decay)


torch.manual_seed(1)
model = nn.Sequential(Norm(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
average = Average(model)
state = elastic.TorchState(model=model, optimizer=optimizer, average=average, step=0)


@elastic.run
def train(state: elastic.TorchState) -> None:
    ddp = elastic.wrap(state.model, broadcast_buffers="BROADCAST" in os.environ)
    while state.step < STEPS:
        optimizer.zero_grad()
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(elastic.rank()))
        ddp(x + state.step * 0.01).sum().backward()
        optimizer.step()
        time.sleep(0.02)
        is_wrong = elastic.rank() == WRONG_RANK and state.step >= WRONG_STEP
        state.average.follow(state.model, 0.5 if is_wrong else 0.9)
        state.step += 1
        state.commit()


train(state)
print(f"done at {state.step}", flush=True)
