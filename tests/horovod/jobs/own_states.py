"""Trains with a state of the script's own until a file `stop` is there; commits each fifth step.

KIND `alone`: the state keeps everything by itself. `more`: it keeps one thing besides what it was
given. Each process writes the worlds that it enters.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import elastic_driver.horovod.torch as hvd
from elastic_driver.horovod.common.elastic import State

folder, kind = Path(sys.argv[1]), sys.argv[2]
worlds: list[int] = []
hvd.init()


class Told(State):
    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        facts = {"ago": time.time() - timestamp, "change": update_res, "entered": len(worlds)}
        with (folder / f"{os.getpid()}.told").open("a") as file:
            file.write(json.dumps(facts) + "\n")
        super().on_hosts_updated(timestamp, update_res)
        raise RuntimeError("an error of the script there")


class Alone(Told):
    def __init__(self) -> None:
        self.step, self.seen = 0, []
        self.save()
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)

    def save(self) -> None:
        self._saved = self.step, list(self.seen)

    def restore(self) -> None:
        self.step, self.seen = self._saved[0], list(self._saved[1])

    def sync(self) -> None:
        self._saved = self._bcast_object(self._saved)
        self.restore()


class More(Told, hvd.elastic.ObjectState):
    def __init__(self) -> None:
        self.seen = []
        super().__init__(step=0)

    def save(self) -> None:
        self._seen = list(self.seen)
        super().save()

    def restore(self) -> None:
        super().restore()
        self.seen = list(self._seen)

    def sync(self) -> None:
        self._seen = self._bcast_object(list(self.seen))
        super().sync()
        self.seen = list(self._seen)


@hvd.elastic.run
def train(state: State) -> None:
    assert state.seen == list(range(state.step))
    with (folder / f"{os.getpid()}.entered").open("a") as file:
        facts = {"rank": hvd.rank(), "size": hvd.size(), "step": state.step}
        file.write(json.dumps(facts) + "\n")
    worlds.append(hvd.size())
    while True:
        hvd.allreduce(torch.ones(1), name="step")
        state.seen.append(state.step)
        state.step += 1
        time.sleep(0.02)
        over = hvd.broadcast_object((folder / "stop").exists(), 0)
        if state.step % 5 == 0:
            state.commit()
        if over:
            return


state = Alone() if kind == "alone" else More()
train(state)
(folder / f"{os.getpid()}.done").write_text(json.dumps({"step": state.step}) + "\n")
