"""Makes quick batches, without a commit, until a change of the hosts is followed.

MODE `check`: checks for changes after each batch. `commit`: commits for the first time some batches
after a file `ready` is there. Each process writes the batch, and by what it was told to leave.
"""

import os
import sys
import time
from pathlib import Path

import torch

import elastic_driver.horovod.torch as hvd
from elastic_driver.horovod.common.exceptions import HostsUpdatedInterrupt

folder, mode = Path(sys.argv[1]), sys.argv[2]
AFTER = 10  # batches
hvd.init()


@hvd.elastic.run
def train(state: hvd.elastic.ObjectState) -> None:
    if hvd.size() == 3:
        (folder / f"{os.getpid()}.entered").write_text(str(state.batch))
        return
    since = 0
    while True:
        since += int(hvd.allreduce(torch.tensor((folder / "ready").exists()), op=hvd.Min))
        state.batch += 1
        time.sleep(0.02)
        try:
            if mode == "check":
                state.check_host_updates()
            elif since == AFTER:
                state.commit()
        except HostsUpdatedInterrupt:
            (folder / f"{os.getpid()}.left").write_text(str(state.batch))
            raise
        assert since < 10 * AFTER


train(hvd.elastic.ObjectState(batch=0))
