"""A plain torchrun-style script: env:// initialisation, none of our API.

FAIL_ONCE: rank 1 exits so in the first attempt. HANG_STEP: rank 1 reads what never comes.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = int(os.environ.get("STEPS", "50"))
STEP_S = float(os.environ.get("STEP_MS", "20")) / 1000
HANG_STEP = int(os.environ.get("HANG_STEP", "-1"))


def read_what_never_comes() -> None:
    os.read(os.pipe()[0], 1)


dist.init_process_group("gloo")
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
note = Path(os.environ["STEP_RECORDS"]) / f"plain.{os.getpid()}"
for step in range(STEPS):
    if step == HANG_STEP and dist.get_rank() == 1:
        read_what_never_comes()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    note.write_text(f"{restarts} {dist.get_rank()} {dist.get_world_size()} {step + 1}\n")
    if os.environ.get("FAIL_ONCE") and restarts == 0 and step == 5 and dist.get_rank() == 1:
        sys.exit(int(os.environ["FAIL_ONCE"]))
    time.sleep(STEP_S)
print(f"plain done restarts={restarts} size={dist.get_world_size()}", flush=True)
dist.destroy_process_group()
