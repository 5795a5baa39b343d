"""An elastic job whose script is another one, once rank 1 has ended its process at step 30.

HOW: in what the new script differs: "class" of the optimizer, "shape" of the model, or "part".
"""

import os
import time
from pathlib import Path

import quick_end
import torch

import elastic_driver as elastic

quick_end.prepare()

CHANGED = Path(os.environ["STEP_RECORDS"]) / "changed"
STEPS = int(os.environ.get("STEPS", "200"))
how = os.environ["HOW"] if CHANGED.exists() or "EARLY" in os.environ else ""
if "EARLY" in os.environ and os.environ["RANK"] == "0":
    how = ""
torch.manual_seed(1)
model = torch.nn.Linear(4, 2 if how == "shape" else 1)
kind = torch.optim.SGD if how == "class" else torch.optim.Adam
optimizer = kind(model.parameters(), lr=0.01)
more = {"more": torch.nn.Linear(1, 1)} if how == "part" else {}
state = elastic.TorchState(model=model, optimizer=optimizer, step=0, **more)


@elastic.run
def train(state: elastic.TorchState) -> None:
    ddp = elastic.wrap(state.model)
    while state.step < STEPS:
        optimizer.zero_grad()
        ddp(torch.full((2, 4), state.step * 0.01)).sum().backward()
        optimizer.step()
        time.sleep(0.03)
        state.step += 1
        state.commit()
        if state.step == 30 and elastic.rank() == 1:
            CHANGED.touch()
            os._exit(9)


train(state)
print(f"done at {state.step}", flush=True)
