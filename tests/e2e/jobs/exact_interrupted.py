"""exact.py, with a rank 0 that is killed in the very moment in which it passes new shares on."""

import os
import runpy
import signal
from pathlib import Path

import elastic_driver as elastic
from elastic_driver.words.orders import Allocation
from elastic_driver.worker import batches
from elastic_driver.worker.batches import BalancedShares

BEGUN = 8  # steps that come first


class Interrupted(BalancedShares):
    """Hears of new shares by itself, in round 1, and does not survive telling the others."""

    def __init__(self):
        super().__init__(lambda: Allocation(1, (6, 2), "a test") if self.due else None)
        self.due = False

    def begin(self, step, device):
        self.due = elastic.round_id() == 1 and step >= BEGUN
        super().begin(step, device)
        if self.due and elastic.rank() == 0 and self._sent is not None:
            assert self._sent[0].tolist() == [6, 2]
            os.kill(os.getpid(), signal.SIGKILL)


batches.BalancedShares = Interrupted
runpy.run_path(str(Path(__file__).with_name("exact.py")))
