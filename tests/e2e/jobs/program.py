"""Trains a program of `tests.support.state_scripts` in a real job, and tells what it then holds.

PROGRAM: the name of a program below. DIES: `RANK STEP COLLECTIVE`: once, the process with that rank
(last: the highest one) is killed in that step before that collective, or before the commit if there
are fewer. FATE: the signal instead. WANT: the number of workers without which the last steps are
slow. Every rank writes all it holds to `told-RANK.json` beside its step records.
"""

import json
import os
import signal
import time
from pathlib import Path

import elastic_driver as elastic
from tests.support.state_scripts import Program, Script

STEPS = 60
STEP_S = 0.02
CHECKS = 24  # after a step while a worker is missing at the end
RECORDS = Path(os.environ["STEP_RECORDS"])
RARE = {
    8: "flags",
    10: "add_group",
    12: "freeze",
    14: "attribute",
    16: "late_value",
    18: "snapshot_load",
    22: "snapshot_load",
    24: "reload",
    26: "freeze",
}


def program(name: str) -> Program:
    """The program of this name."""
    values = {"list": [[], {1}], "dict": {"a": {}}}
    rare = RARE
    if name == "everything":
        step = (
            "follow zero pass clamp step:1 collective step:0 schedule normalize values rebind "
            "numpy tensors noise evaluate lr"
        )
        layers = (
            "linear norm dropout spectral tied momentum late rebound transient extra plain frozen "
            "linear"
        )
        optimizers, schedule, follower, accumulate = "adam sgd", "chain", "rebind", 1
    elif name == "by hand":
        step = "follow zero pass step:0 values collective tensors"
        layers, optimizers = "linear norm extra linear", "hand"
        schedule, follower, accumulate, rare = "", "dict", 1, {}
    elif name == "two passes":
        step = "pass step:0 step:1 zero schedule values collective follow"
        layers, optimizers = "linear norm linear", "sgd adamw"
        schedule, follower, accumulate, rare = "step", "averaged", 2, {}
    else:  # many closures
        step = "follow step:0 step:1 clamp values"
        layers, optimizers = "linear tied linear", "lbfgs counting"
        schedule, follower, accumulate, rare = "", "copy", 1, {}
    steps = []
    for number in range(STEPS):
        words = step.split()
        if number % accumulate < accumulate - 1:
            words = [word for word in words if word.partition(":")[0] not in ("step", "zero")]
        words[1:1] = [rare[number]] if number in rare else []
        steps.append(tuple(words))
    names = tuple(layers.split()), tuple(optimizers.split())
    return Program(*names, schedule, follower, values, tuple(steps), accumulate)


class Fate:
    """Kills this process at a collective, if that is its fate."""

    def __init__(self) -> None:
        rank, step, collective = os.environ.get("DIES", "none 0 0").split()
        self.rank, self.step, self.collective = rank, int(step), int(collective)
        self.count = 0

    def meet(self, collective) -> None:
        """Carry out a collective, or die before it."""
        self.count += 1
        if self.count > self.collective:
            self.strike()
        collective()

    def strike(self) -> None:
        """Die, if it is this rank's turn."""
        me = "last" if self.rank == "last" and elastic.rank() == elastic.size() - 1 else None
        if (me or str(elastic.rank())) != self.rank or state.step != self.step:
            return
        try:
            (RECORDS / "struck").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.Signals[os.environ.get("FATE", "SIGKILL")])


def note() -> None:
    context = {
        "t": time.time(),
        "step": state.step,
        "round": elastic.round_id(),
        "rank": elastic.rank(),
        "size": elastic.size(),
        "pid": os.getpid(),
        "worker": os.environ.get("ELASTIC_WORKER_ID", "alone"),
    }
    with (RECORDS / f"{context['worker']}.jsonl").open("a") as file:
        file.write(json.dumps(context) + "\n")


@elastic.run
def train(state):
    script.rejoin()
    while state.step < STEPS:
        fate.count = 0
        step = state.step
        for operation in script.program.steps[step]:
            script.do(operation, step)
        fate.strike()
        state.step += 1
        if "ELASTIC_WORKER_ID" in os.environ:
            time.sleep(STEP_S)
        note()
        state.commit()
        # A driver that got no answer on a busy machine names a boundary that is two seconds away,
        # by the pace of the steps before. Checks of that pace reach it, slow steps would not.
        late = elastic.size() != want and step > STEPS - 20
        if late and "ELASTIC_WORKER_ID" in os.environ:
            for _ in range(CHECKS):
                time.sleep(STEP_S)
                state.check_host_updates()


fate = Fate()
# The first worker's first values are those that a process alone has; all others have others.
host, slot, incarnation = os.environ.get("ELASTIC_WORKER_ID", "alone.0.1").rsplit(".", 2)
first = host in ("alone", "localhost") and (slot, incarnation) == ("0", "1")
script = Script(program(os.environ["PROGRAM"]), 0 if first else os.getpid(), fate.meet)
state, want = script.state, int(os.environ.get("WANT", "2"))
script.seed(1)
train(state)
told = json.dumps(script.told())
(RECORDS / f"told-{elastic.rank()}.json").write_text(told)
