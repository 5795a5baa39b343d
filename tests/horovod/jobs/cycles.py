"""Calls `hvd.init()` and `hvd.shutdown()` in turn; rank 0 writes the seconds of processor time."""

import sys
import time
from pathlib import Path

import torch

import elastic_driver.horovod.torch as hvd

cycles = int(sys.argv[2])
rank, began = 0, time.process_time()
for cycle in range(cycles):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    total = hvd.allreduce(torch.full((3,), float(cycle + rank)), op=hvd.Sum, name="x")
    assert total.tolist() == [cycle * size + size * (size - 1) / 2] * 3
    hvd.shutdown()
    assert not hvd.is_initialized()
if rank == 0:
    Path(sys.argv[1]).write_text(f"{time.process_time() - began:.3f}")
