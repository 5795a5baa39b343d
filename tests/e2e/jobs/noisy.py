"""A job whose gradients have a noise of a known scale, NOISE, in batches of one worker.

Steps of one worker take STEP_MS, and 0.3 times as much longer with each further one: three workers
take 1.9 times as many samples a second as one.
"""

import os
import time

import quick_end
import torch

import elastic_driver as elastic

quick_end.prepare()

STEP_S = float(os.environ["STEP_MS"]) / 1000
SIGMA = float(os.environ["NOISE"]) ** 0.5

model = torch.nn.Linear(1000, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0)


@elastic.run
def train(state):
    ddp = elastic.wrap(state.model)
    step_s = STEP_S * (1 + 0.3 * (elastic.size() - 1))
    while True:
        began = time.perf_counter()
        generator = torch.Generator().manual_seed(state.step * 1000 + elastic.rank())
        gradient = 1 + SIGMA * torch.randn(1, 1000, generator=generator)
        state.optimizer.zero_grad()
        ddp(gradient).sum().backward()  # the gradient of a linear layer is its input
        time.sleep(max(0.0, step_s - (time.perf_counter() - began)))
        state.optimizer.step()
        state.step += 1
        state.commit()


train(state)
