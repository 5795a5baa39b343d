"""What it costs a job to be measured: longer steps, and the processor time of its agent.

One job of two workers has steps of 100 ms, most of which they sleep, so that nothing hides what a
step costs beside its computation. Every other step is measured, as those of any job are; in between
a worker takes no times and counts no samples. The difference is that of the medians of a block of
steps. The agent samples its host and its workers each second all the time.

    python -m benchmarks.measured [--blocks 20]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

import elastic_driver as elastic
from benchmarks.common import OURS, Figure, report
from benchmarks.systems import System, cpu_of, running

WORKERS = 2
STEP_S = 0.1
STEPS = 100  # in a block
READY_S = 60.0
Block = list[tuple[bool, float, float]]  # see `steps_of`


# ---- in the workers ----------------------------------------------------------------------


def work() -> None:
    """Train for ever; write down how long each step took beside its sleep."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        ddp, measure = elastic.wrap(state.model), state._measure
        with (Path(os.environ["RECORDS"]) / f"{elastic.rank()}.jsonl").open("a") as file:
            while True:
                measured = state.step % 2 == 0
                state._meter.clock.watch([optimizer] if measured else [])
                state._meter.clock._step.began = state._meter.clock._moment()
                setattr(state, "_measure", measure if measured else lambda *_: None)  # noqa: B010
                time.sleep(STEP_S)
                began, used = time.perf_counter(), time.thread_time()
                optimizer.zero_grad()
                ddp(torch.randn(8, 64)).pow(2).mean().backward()
                optimizer.step()
                state.step += 1
                state.commit()
                took = time.perf_counter() - began, time.thread_time() - used
                file.write(json.dumps([measured, *took]) + "\n")
                file.flush()

    train(state)


# ---- outside -----------------------------------------------------------------------------


def steps_of(system: System, rank: int = 0) -> Block:
    """Return of each step: was it measured, its seconds beside its sleep, processor seconds."""
    lines = (system.records_dir / f"{rank}.jsonl").read_text().splitlines(keepends=True)
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


def measure(blocks: int) -> list[Figure]:
    """Run the job, and compare the two kinds of its steps block by block."""
    argv = [sys.executable, "-m", "launcher.cli", "-np", str(WORKERS)]
    argv += ["--state-dir", "{records}", "--", str(Path(__file__).resolve())]
    with running("elasticrun", argv, {"HOW": "measured"}) as system:
        system.until((system.records_dir / "0.jsonl").exists, "first step", READY_S)
        system.until(lambda: len(steps_of(system)) >= STEPS, "steps", READY_S)
        agent, began = system.agent(), time.monotonic()
        used, first = cpu_of(agent), len(steps_of(system))
        needed = first + blocks * STEPS
        while len(steps_of(system)) < needed:
            time.sleep(1.0)
        share = (cpu_of(agent) - used) / (time.monotonic() - began)
        steps = steps_of(system)[first:needed]
    blocks_of = [steps[start : start + STEPS] for start in range(0, len(steps), STEPS)]
    alone = tuple(1e3 * _median(block, 1, measured=False) for block in blocks_of)
    longer = tuple(_more(block, 1) for block in blocks_of)
    busier = tuple(_more(block, 2) for block in blocks_of)
    return [
        Figure(OURS, "step beside its sleep, not measured", "ms", alone),
        Figure(OURS, "measured: longer", "% of 100 ms", longer),
        Figure(OURS, "measured: processor time", "% of 100 ms", busier),
        Figure(OURS, "agent of two workers", "% of a core", (100 * share,)),
    ]


def _median(block: Block, which: int, *, measured: bool) -> float:
    return statistics.median(step[which] for step in block if step[0] == measured)


def _more(block: Block, which: int) -> float:
    """Return how much more the measured steps of a block take, in per cent of a whole step."""
    with_it, without = (_median(block, which, measured=kind) for kind in (True, False))
    return 100 * (with_it - without) / STEP_S


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=20)
    report("measured", measure(parser.parse_args().blocks))


if __name__ == "__main__":
    work() if os.environ.get("HOW") == "measured" else main()
