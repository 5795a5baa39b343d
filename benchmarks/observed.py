"""Whether a job trains slower while somebody looks at it.

One job of two workers computes steps of about 100 ms and prints a line for each. In every other
stretch of some seconds one viewer has the page's stream, `elasticctl logs -f` and
`elasticctl events -f` run, and the metrics are read every five seconds. Each stretch is compared
with the mean of its two neighbours, in which nobody looks: a ratio of 1.003 is a step that takes
0.3 % longer. Agents measure their hosts in all stretches; their processor time is told too.

    python -m benchmarks.observed [--pairs 20] [--seconds 8]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import elastic_driver as elastic
from benchmarks.common import OURS, Figure, report
from benchmarks.systems import System, cpu_of, running
from elastic_driver import contract
from elastic_driver.runtime.run_dir import read_endpoint
from rendezvous.auth import Credentials, read_credentials
from rendezvous.client import RendezvousClient
from rendezvous.errors import RendezvousError

WORKERS = 2
STEP_S = 0.1
SIDE = 384  # of the matrices that a step multiplies
SETTLE_S = 3.0  # of a stretch, for viewers to start and to end
SCRAPE_S = 5.0
SILENCE_S = 60.0
READY_S = 60.0
RUN = "observed"


# ---- in the workers ----------------------------------------------------------------------


def work() -> None:
    """Train for ever; write down when each step ended."""
    torch.set_num_threads(1)
    left, right = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)

    def products(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            torch.mm(left, right)
        return time.perf_counter() - began

    count = int(STEP_S / min(products(20) / 20 for _ in range(10)))
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        ddp = elastic.wrap(state.model)
        with (Path(os.environ["RECORDS"]) / f"{elastic.rank()}.jsonl").open("a") as file:
            while True:
                products(count)
                optimizer.zero_grad()
                ddp(torch.randn(8, 64)).pow(2).mean().backward()
                optimizer.step()
                state.step += 1
                state.commit()
                print(f"step {state.step}", flush=True)
                file.write(json.dumps({"t": time.time()}) + "\n")
                file.flush()

    train(state)


# ---- viewers -----------------------------------------------------------------------------


def view(url: str, found: Credentials) -> None:
    """Follow the page's stream, and read the metrics now and then, until this process is killed."""

    def connect() -> RendezvousClient:
        return RendezvousClient(url, found.token, fingerprint=found.fingerprint)

    def follow() -> None:
        with connect() as client, contextlib.suppress(RendezvousError):
            for _ in client.follow(contract.LIVE_PATH, SILENCE_S):
                pass

    threading.Thread(target=follow, daemon=True).start()
    with connect() as client:
        while True:
            client.get_bytes(contract.METRICS_PATH)
            time.sleep(SCRAPE_S)


@contextlib.contextmanager
def looked_at(folder: Path) -> Iterator[None]:
    """Look at the job of this state directory as long as this lasts."""
    ctl = [sys.executable, "-m", "launcher.ctl"]
    where = ["--run-id", RUN, "--state-dir", str(folder)]
    commands = (
        [sys.executable, "-m", "benchmarks.observed", "--view", str(folder / RUN)],
        [*ctl, "logs", "-f", *where],
        [*ctl, "events", "-f", *where],
    )
    started = [subprocess.Popen(argv, stdout=subprocess.DEVNULL) for argv in commands]
    try:
        yield
        ended = [process.args for process in started if process.poll() is not None]
        assert not ended, f"nobody looked: {ended}"
    finally:
        for process in started:
            process.kill()
            process.wait()


# ---- outside -----------------------------------------------------------------------------


def steps_of(system: System, began: float, ended: float) -> list[float]:
    """Return the times of rank 0's steps in a stretch, the first seconds left out; seconds."""
    lines = (system.records_dir / "0.jsonl").read_text().splitlines()[:-1]
    moments = [json.loads(line)["t"] for line in lines]
    kept = [moment for moment in moments if began + SETTLE_S <= moment <= ended]
    return [after - before for before, after in itertools.pairwise(kept)]


def measure(pairs: int, seconds: float) -> list[Figure]:
    """Run the job, look at it in every other stretch, and compare."""
    argv = [sys.executable, "-m", "launcher.cli", "-np", str(WORKERS), "--run-id", RUN]
    argv += ["--state-dir", "{records}", "--", str(Path(__file__).resolve())]
    with running("elasticrun", argv, {"HOW": "observed"}) as system:
        trains = system.records_dir / "0.jsonl"
        system.until(trains.exists, "first step", READY_S)
        agent = system.agent()
        time.sleep(seconds)
        used, began = cpu_of(agent), time.time()
        medians: list[float] = []
        for number in range(2 * pairs + 1):
            with looked_at(system.records_dir) if number % 2 else contextlib.nullcontext():
                started = time.time()
                time.sleep(seconds)
                medians.append(statistics.median(steps_of(system, started, time.time())))
        share = (cpu_of(agent) - used) / (time.time() - began)
    unseen = [(a + b) / 2 for a, b in zip(medians[::2], medians[2::2], strict=False)]
    ratios = tuple(seen / alone for seen, alone in zip(medians[1::2], unseen, strict=True))
    noise = tuple(b / a for a, b in zip(medians[::2], medians[2::2], strict=False))
    return [
        Figure(OURS, "step, nobody looks", "ms", tuple(1e3 * m for m in medians[::2])),
        Figure(OURS, "step, looked at / not", "x", ratios),
        Figure(OURS, "step, not looked at / the stretch before", "x", noise),
        Figure(OURS, "agent, output included", "% of a core", (100 * share,)),
    ]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a stretch")
    parser.add_argument("--view", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.view:
        endpoint = read_endpoint(Path(given.view))
        assert endpoint is not None
        view(endpoint.url, read_credentials(Path(given.view) / "token-reader"))
    report("observed", measure(given.pairs, given.seconds))


if __name__ == "__main__":
    work() if os.environ.get("HOW") == "observed" and "--view" not in sys.argv else main()
