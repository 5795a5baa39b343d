"""Reduces in a loop; the last rank dies in the middle. The others write how the loop ended."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import elastic_driver.horovod.torch as hvd

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all are restarted after the loss, a moment later
hvd.init()
rank, last = hvd.rank(), hvd.size() - 1
for step in range(10**6):
    handles = [hvd.allreduce_async(torch.ones(1000), name=f"{step}.{n}") for n in range(8)]
    if rank == last and step == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        for handle in handles:
            hvd.synchronize(handle)
    except hvd.HorovodInternalError as error:
        ended = 0
        for handle in handles:
            try:
                hvd.synchronize(handle)
            except (hvd.HorovodInternalError, ValueError):
                ended += 1
        hvd.shutdown()
        file = Path(sys.argv[1], f".{rank}")
        file.write_text(f"{step} {ended} {time.monotonic() - began:.3f} {error}")
        file.rename(Path(sys.argv[1], str(rank)))
        break
