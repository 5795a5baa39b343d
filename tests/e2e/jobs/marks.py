"""An elastic job that marks its state by hand, and whose ranks go wrong.

STEPS steps of 20 ms. WRONG_RANK changes its learning rate in round WRONG_ROUND, at its step
WRONG_STEP. FORGETS: this rank never commits.
"""

import hashlib
import os
import time

import quick_end
import torch

import elastic_driver as elastic
from elastic_driver.worker.world import session

quick_end.prepare()

STEPS = int(os.environ.get("STEPS", "100"))
WRONG_RANK = int(os.environ.get("WRONG_RANK", "-1"))
WRONG_ROUND = int(os.environ.get("WRONG_ROUND", "1"))
WRONG_STEP = int(os.environ.get("WRONG_STEP", "3"))
FORGETS = int(os.environ.get("FORGETS", "-1"))
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0)


def leaves() -> list[tuple[str, str, str]]:
    """The state as it is described: name, digest and value of each leaf."""
    weights = [p.tolist() for p in model.parameters()]
    rate = optimizer.param_groups[0]["lr"]
    return [
        ("learning rate of group 0 of 'optimizer'", digest_of(rate), str(rate)),
        ("weights of 'model'", digest_of(weights), f"{weights[1][0]:.6g}"),
    ]


def digest_of(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


@elastic.run
def train(state: elastic.TorchState) -> None:
    member = session.membership()
    assert member is not None
    assert member.world is not None
    progress, kept = member.progress, {}
    progress.leaves = kept.get
    if member.world.repair:
        for parameter in model.parameters():
            torch.distributed.broadcast(parameter.data, 0)
        rate = torch.tensor([optimizer.param_groups[0]["lr"]], dtype=torch.float64)
        torch.distributed.broadcast(rate, 0)
        optimizer.param_groups[0]["lr"] = rate.item()
    ddp, done = elastic.wrap(state.model), 0
    while state.step < STEPS:
        optimizer.zero_grad()
        ddp(torch.full((2, 4), state.step * 0.01)).sum().backward()
        optimizer.step()
        progress.optimizer_stepped()
        time.sleep(0.02)
        state.step += 1
        done += 1
        wrong = (elastic.rank(), elastic.round_id(), done) == (WRONG_RANK, WRONG_ROUND, WRONG_STEP)
        if wrong:
            optimizer.param_groups[0]["lr"] = 0.5
        if elastic.rank() != FORGETS:
            kept[state.step] = leaves()
            state.commit()
            progress.marked(state.step, digest_of(kept[state.step]))


train(state)
print(f"done at {state.step} with {optimizer.param_groups[0]['lr']}", flush=True)
