"""Real TensorFlow under `elasticrun --tf-config`: MultiWorkerMirroredStrategy, 2 → 3 → 2."""

from __future__ import annotations

import re
import signal
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support.job import ROOT, Hosts, RunningJob, elasticrun
from tests.support.tensorflow import tensorflow_python

pytestmark = [pytest.mark.tensorflow, pytest.mark.slow, pytest.mark.timeout(400)]
SCRIPT = str(ROOT / "examples" / "tf_digits.py")
EPOCHS = 24
PATIENCE_S = 120.0  # for importing TensorFlow on machines that are busy


class Epoch(NamedTuple):
    number: int
    loss: float
    workers: int


def epochs(job: RunningJob) -> list[Epoch]:
    """The finished epochs as worker 0 has printed them."""
    lines = re.findall(r"epoch (\d+) loss ([0-9.]+) .* workers (\d+)\n", job.stdout)
    return [Epoch(int(number), float(loss), int(workers)) for number, loss, workers in lines]


def sizes(job: RunningJob) -> list[int]:
    """The numbers of workers that epochs were finished with, without repeats."""
    found = [epoch.workers for epoch in epochs(job)]
    return found[:1] + [now for before, now in pairwise(found) if now != before]


def test_keras_trains_on_through_two_three_and_two_workers(tmp_path: Path) -> None:
    python = tensorflow_python()
    hosts = Hosts(tmp_path, "127.0.0.2", "127.0.0.3")
    args = (
        *("--host-discovery-script", str(hosts.script), "--discovery-interval", "0.2"),
        *("-np", "2", "--min-np", "2", "--stop-grace", "1", "--tf-config"),
        *("--", python, SCRIPT, "--epochs", str(EPOCHS), "--backup", str(tmp_path / "backup")),
    )
    with elasticrun(*args) as job:
        job.until(lambda: sizes(job) == [2], "an epoch with two workers", PATIENCE_S)
        hosts.set("127.0.0.2", "127.0.0.3", "127.0.0.4")
        job.until(lambda: sizes(job) == [2, 3], "an epoch with three workers", PATIENCE_S)
        hosts.set("127.0.0.2", "127.0.0.4")
        job.until(lambda: sizes(job) == [2, 3, 2], "an epoch with two again", PATIENCE_S)
        assert job.wait(PATIENCE_S) == 0, job.describe()
        assert f"done after {EPOCHS} epochs with 2 workers" in job.stdout
        assert job.rounds() == [2, 3, 2]
        trained = epochs(job)
        assert sorted({epoch.number for epoch in trained}) == list(range(EPOCHS)), "an epoch lost"
        # One at most is trained again at each change: the one whose backup was being written.
        assert len(trained) <= EPOCHS + 2
        for before, after in pairwise(trained):
            if after.workers != before.workers:
                assert after.loss < 1.2 * before.loss, f"training began anew: {before} {after}"
        assert trained[-1].loss < trained[0].loss / 10
        job.assert_nothing_left()


def test_a_killed_worker_is_replaced_and_training_goes_on(tmp_path: Path) -> None:
    python = tensorflow_python()
    script = (SCRIPT, "--epochs", "12", "--backup", str(tmp_path / "backup"))
    with elasticrun("-np", "2", "--stop-grace", "1", "--tf-config", "--", python, *script) as job:
        job.until(lambda: len(epochs(job)) >= 2, "two epochs", PATIENCE_S)
        workers = {e["rank"]: e["pid"] for e in job.events("worker_started")}
        psutil.Process(workers[1]).send_signal(signal.SIGKILL)
        assert job.wait(PATIENCE_S) == 0, job.describe()
        trained = epochs(job)
        assert sorted({epoch.number for epoch in trained}) == list(range(12))
        assert len(trained) <= 13
        assert job.rounds() == [2, 2]
