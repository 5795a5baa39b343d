"""An elastic job of which a rank goes wrong.

STEPS steps of 20 ms. WRONG_RANK changes its learning rate in round WRONG_ROUND, at its step
WRONG_STEP there. FORGETS: this rank never commits. AFTER_RANK changes its state behind the last
commit.
"""

import os
import time

import quick_end
import torch

import elastic_driver as elastic

quick_end.prepare()

STEPS = int(os.environ.get("STEPS", "150"))
WRONG_RANK = int(os.environ.get("WRONG_RANK", "-1"))
WRONG_ROUND = int(os.environ.get("WRONG_ROUND", "1"))
WRONG_STEP = int(os.environ.get("WRONG_STEP", "3"))
FORGETS = int(os.environ.get("FORGETS", "-1"))
AFTER_RANK = int(os.environ.get("AFTER_RANK", "-1"))
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0)


@elastic.run
def train(state: elastic.TorchState) -> None:
    ddp, done = elastic.wrap(state.model), 0
    while state.step < STEPS:
        optimizer.zero_grad()
        ddp(torch.full((2, 4), state.step * 0.01)).sum().backward()
        optimizer.step()
        time.sleep(0.02)
        state.step += 1
        done += 1
        if (elastic.rank(), elastic.round_id(), done) == (WRONG_RANK, WRONG_ROUND, WRONG_STEP):
            optimizer.param_groups[0]["lr"] = 0.5
        if elastic.rank() != FORGETS:
            state.commit()
    if elastic.rank() == AFTER_RANK:
        optimizer.param_groups[0]["lr"] = 0.7
        state.step = STEPS  # as it is, in another write
        model.eval()


train(state)
print(f"done at {state.step} with {optimizer.param_groups[0]['lr']}", flush=True)
