"""Reduces with a rank that does not move its tensor for a long time; rank 0 writes the error."""

import os
import sys
import time
from pathlib import Path

import torch

import elastic_driver.horovod.torch as hvd
from elastic_driver.horovod.engine.transfer import Transfers

hvd.init()
hvd.allreduce(torch.ones(1), name="before")
time.sleep(float(os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"]) + 1)  # nothing is exchanged meanwhile
hvd.allreduce(torch.ones(1), name="after a pause")
if hvd.rank() == 1:
    start = Transfers.start

    def start_late(*args: object) -> object:
        while not Path(sys.argv[1]).exists():
            time.sleep(0.1)
        return start(*args)

    Transfers.start = start_late
try:
    hvd.allreduce(torch.ones(1), name="late")
except hvd.HorovodInternalError as error:
    if hvd.rank() == 0:
        Path(sys.argv[1]).write_text(str(error))
