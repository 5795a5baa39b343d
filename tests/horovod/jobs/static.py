"""Never calls `hvd.elastic.run`: writes its pid by rank, and waits in a collective for a loss."""

import os
import sys
from pathlib import Path

import torch

import elastic_driver.horovod.torch as hvd

hvd.init()
restarts, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], hvd.rank()
hvd.allreduce(torch.ones(1))
file = Path(sys.argv[1], f".{restarts}.{rank}")
file.write_text(str(os.getpid()))
file.rename(Path(sys.argv[1], f"{restarts}.{rank}"))
if restarts == "0":
    while True:
        hvd.allreduce(torch.ones(1))
