"""Whether `--auto-scale` finds the fastest size of a transformer, and how soon.

A small transformer trains with a fixed batch of eight micro-batches. First one job with as many
workers as slots is asked for each size in turn, and its steps per second are measured. Then
`--auto-scale` searches. Told are the speed of the size that it found against the best, its moves
and the time until then.

    python -m benchmarks.auto_scale [--slots 8] [--seconds 12]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

import elastic_driver as elastic
from benchmarks.common import OURS, Figure, report
from benchmarks.systems import System, running
from elastic_driver import contract
from elastic_driver.runtime.run_dir import read_endpoint
from rendezvous.auth import read_credentials
from rendezvous.client import RendezvousClient

READY_S = 120.0
SEARCH_S = 300.0
RUN = "auto-scale"
WORDS, LENGTH, WIDTH = 200, 16, 64


# ---- in the workers ----------------------------------------------------------------------


class Sentences(torch.utils.data.Dataset):  # type: ignore[misc] # torch has no types here
    """Random words; the next word follows from the one before."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        first = torch.randint(WORDS, (1,), generator=generator)
        return (first + 7 * torch.arange(LENGTH + 1)) % WORDS


def make_model() -> torch.nn.Module:
    """Return a transformer with two layers."""
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    return torch.nn.Sequential(
        torch.nn.Embedding(WORDS, WIDTH),
        torch.nn.TransformerEncoder(layer, 2),
        torch.nn.Linear(WIDTH, WORDS),
    )


def work() -> None:
    """Train for ever; rank 0 writes down when each step ended, and with how many workers."""
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = elastic.FixedBatch(Sentences(), 4, model=model, virtual_workers=8)
    state = elastic.TorchState(model=model, optimizer=optimizer, batches=batches, epoch=0, step=0)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        while True:
            batches.set_epoch(state.epoch)
            for step in batches:
                for words in step:
                    found = model(words[:, :-1]).flatten(0, 1)
                    torch.nn.functional.cross_entropy(found, words[:, 1:].flatten()).backward()
                optimizer.step()
                state.step += 1
                state.commit()
                if elastic.rank() == 0:
                    with (Path(os.environ["RECORDS"]) / "steps.jsonl").open("a") as file:
                        file.write(json.dumps({"t": time.time(), "size": elastic.size()}) + "\n")
            state.epoch += 1

    train(state)


# ---- outside -----------------------------------------------------------------------------


def speed_at(system: System, size: int, seconds: float) -> float:
    """Return the steps per second with this many workers, by the newest so many seconds."""
    lines = (system.records_dir / "steps.jsonl").read_text().splitlines()[:-1]
    steps = [json.loads(line) for line in lines]
    times = [float(s["t"]) for s in steps if s["size"] == size and s["t"] > time.time() - seconds]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return 1 / statistics.median(gaps)


def events(system: System, name: str) -> list[dict[str, object]]:
    """Return the events of this name so far."""
    lines = (system.records_dir / RUN / "events.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["event"] == name]


def measure(slots: int, seconds: float) -> list[Figure]:
    """Search, then measure each size in the same job."""
    argv = [sys.executable, "-m", "launcher.cli", "-H", f"localhost:{slots}", "--auto-scale"]
    argv += ["--run-id", RUN, "--state-dir", "{records}", "--", str(Path(__file__).resolve())]
    with running("elasticrun", argv, {"HOW": "auto_scale"}) as system:
        trains = system.records_dir / "steps.jsonl"
        system.until(trains.exists, "first step", READY_S)
        began = time.time()
        system.until(lambda: bool(events(system, "size_found")), "search", SEARCH_S)
        found, took = events(system, "size_found")[-1], time.time() - began
        moves = len(events(system, "size_proposed"))
        endpoint = read_endpoint(system.records_dir / RUN)
        assert endpoint is not None
        token, known_by = read_credentials(system.records_dir / RUN / "token-operator")
        speeds = {}
        with RendezvousClient(endpoint.url, token, fingerprint=known_by) as client:
            for size in range(1, slots + 1):
                client.post_json(contract.SCALE_PATH, json.dumps({"num_proc": size}).encode())
                time.sleep(seconds)
                speeds[size] = speed_at(system, size, seconds * 0.6)
    best = max(speeds.values())
    size = int(str(found["size"]))
    note = ", ".join(f"{n}: {speed:.3g}" for n, speed in speeds.items())
    return [
        Figure(OURS, "speed found / best", "x", (speeds[size] / best,), note=note),
        Figure(OURS, "size found", "workers", (float(size),)),
        Figure(OURS, "moves", "changes", (float(moves),)),
        Figure(OURS, "first step → found", "s", (took,)),
    ]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=12.0, help="for each size")
    given = parser.parse_args()
    report("auto_scale", measure(given.slots, given.seconds))


if __name__ == "__main__":
    work() if os.environ.get("HOW") == "auto_scale" else main()
