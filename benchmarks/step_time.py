"""The cost of `commit()`, and a step under elasticrun against plain DDP under torchrun.

One job of two workers under elasticrun trains in blocks, every other one without commits, so that
both kinds run at the same moments of a busy machine. Blocks without commits train a model of the
same shape that is not in the state. (With the state's own model, collectives would follow on steps
that are not committed; a state has to copy what such steps change, and would do so at each commit
from then on.) torchrun runs the same steps between two such jobs. A ratio of 1.01 is one percent;
the time of `commit()` alone is measured as well. What the comparison of the ranks costs is too
little for a ratio of step times: it is the time that the training spends in making marks.

    python -m benchmarks.step_time [--blocks N] [--step-ms 10]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elastic_driver as elastic
from benchmarks.common import OURS, Figure, report
from benchmarks.peers.floor import make_model
from benchmarks.systems import running
from benchmarks.train import one_step
from elastic_driver.worker.marks import Marks

STEPS = 50  # in a block
TURNS = 3
Block = dict[str, Any]


# ---- in the workers ----------------------------------------------------------------------


def elastic_worker(blocks: int) -> list[Block]:
    """Train blocks with and without commits in turn; return step and commit times of each."""
    model, optimizer = make_model()
    other, others_optimizer = make_model()
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)
    done: list[Block] = []
    marking = timed(Marks, "mark_if_due")

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        committed = elastic.wrap(state.model), state.optimizer
        plain = DistributedDataParallel(other), others_optimizer
        for number in range(2 * blocks + 2):
            commits = number % 2 == 0
            ddp, its_optimizer = committed if commits else plain
            steps, costs = [], []
            for _ in range(STEPS):
                started = time.perf_counter()
                one_step(ddp, its_optimizer)
                state.step += 1
                before = time.perf_counter()
                if commits:
                    state.commit()
                after = time.perf_counter()
                steps.append(after - started)
                costs.append(after - before)
            if number >= 2:  # the first two warm up
                cost = statistics.median(costs)
                block = {"commits": commits, "step": statistics.median(steps), "cost": cost}
                done.append(block | {"marking": sum(marking), "whole": sum(steps)})
            marking.clear()

    train(state)
    return done


def timed(owner: type[Any], name: str) -> list[float]:
    """Measure each call of a method from now on; return the list that gets the seconds."""
    method, took = getattr(owner, name), list[float]()

    @functools.wraps(method)
    def measured(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            took.append(time.perf_counter() - began)

    setattr(owner, name, measured)
    return took


def plain_worker(blocks: int) -> list[Block]:
    """Train the same steps with DDP alone."""
    dist.init_process_group("gloo")
    model, optimizer = make_model()
    ddp = DistributedDataParallel(model)
    done: list[Block] = []
    for number in range(blocks + 1):
        steps = []
        for _ in range(STEPS):
            started = time.perf_counter()
            one_step(ddp, optimizer)
            steps.append(time.perf_counter() - started)
        if number:
            done.append({"commits": False, "step": statistics.median(steps), "cost": 0.0})
    dist.destroy_process_group()
    return done


def work() -> None:
    """Train as one worker, and write the blocks to a file."""
    torch.set_num_threads(1)
    blocks = int(os.environ["BLOCKS"])
    train = elastic_worker if os.environ["HOW"] == "elastic" else plain_worker
    path = Path(os.environ["RECORDS"]) / f"{os.getpid()}.blocks"
    path.with_suffix(".part").write_text(json.dumps(train(blocks)))
    path.with_suffix(".part").replace(path)


# ---- outside -----------------------------------------------------------------------------


def blocks_of(how: str, step_ms: float, blocks: int) -> list[Block]:
    """Return the blocks of one rank of a job of two workers."""
    starters = {
        "elastic": ["launcher.cli", "-np", "2", "--state-dir", "{records}", "--"],
        "plain": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    }
    argv = [sys.executable, "-m", *starters[how], str(Path(__file__).resolve())]
    env = {"HOW": how, "STEP_MS": str(step_ms), "BLOCKS": str(blocks)}
    with running(how, argv, env) as system:
        deadline = time.monotonic() + 120 + blocks * STEPS * step_ms / 100
        while len(found := list(system.records_dir.glob("*.blocks"))) < 2:
            if time.monotonic() > deadline:
                output = (system.records_dir / "output").read_text(errors="replace")
                raise TimeoutError(f"{how}: no result\n{output[-1500:]}")
            time.sleep(0.05)
        return list(json.loads(found[0].read_text()))


def main() -> None:
    """Measure both systems in turn, three times; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=8, help="of each kind and job")
    parser.add_argument("--step-ms", type=float, default=10.0)
    options = parser.parse_args()
    ratios: list[float] = []
    costs: list[float] = []
    ours: list[float] = []
    plain: list[float] = []
    marked: list[float] = []
    for _ in range(TURNS):
        blocks = blocks_of("elastic", options.step_ms, options.blocks)
        pairs = list(zip(blocks[::2], blocks[1::2], strict=True))
        ratios += [with_["step"] / without["step"] for with_, without in pairs]
        costs += [with_["cost"] * 1e6 for with_, _ in pairs]
        part = sum(with_["marking"] for with_, _ in pairs)
        marked.append(100 * part / (sum(with_["whole"] for with_, _ in pairs) - part))
        ours += [with_["step"] * 1e3 for with_, _ in pairs]
        plain += [b["step"] * 1e3 for b in blocks_of("plain", options.step_ms, options.blocks)]
    name, turns = OURS, tuple(turn for turn in range(TURNS) for _ in range(options.blocks))
    step = f"step of {options.step_ms:g} ms"
    report(
        "step_time",
        [
            Figure("torchrun, plain DDP", step, "ms", tuple(plain), turns=turns),
            Figure(name, step, "ms", tuple(ours), turns=turns),
            Figure(name, "with commit / without, same job", "x", tuple(ratios)),
            Figure(name, "commit()", "µs", tuple(costs)),
            Figure(name, "comparison of the ranks, of all else", "%", tuple(marked)),
        ],
    )


if __name__ == "__main__":
    work() if "HOW" in os.environ else main()
