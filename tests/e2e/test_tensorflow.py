"""Real TensorFlow: MultiWorkerMirroredStrategy through 2 → 3 → 2 workers.

Under `elasticrun --tf-config`, and started by orchestrators that meet over HTTP.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil
import pytest

from elastic_driver.features.tensorflow.worker import ClusterSpec, TfNode, tf_config
from launcher.agent.host import free_ports
from tests.support.job import JOBS, ROOT, Hosts, RunningJob, elasticrun
from tests.support.orchestrators import Orchestrators
from tests.support.tensorflow import tensorflow_python

SCRIPT = str(ROOT / "examples" / "tf_digits.py")
EPOCHS = 24
PATIENCE_S = 120.0  # for importing TensorFlow on machines that are busy
F = TypeVar("F", bound=Callable[..., None])


def real(test: F) -> F:
    """Mark a test that needs TensorFlow itself."""
    return pytest.mark.tensorflow(pytest.mark.slow(pytest.mark.timeout(400)(test)))


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


@real
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


@real
def test_a_killed_worker_is_replaced_and_training_goes_on(tmp_path: Path) -> None:
    python = tensorflow_python()
    # More epochs than any machine trains in this test: the kill never comes too late.
    script = (SCRIPT, "--epochs", "1000000", "--backup", str(tmp_path / "backup"))
    with elasticrun("-np", "2", "--stop-grace", "1", "--tf-config", "--", python, *script) as job:
        job.until(lambda: len(epochs(job)) >= 2, "two epochs", PATIENCE_S)
        workers = {e["rank"]: e["pid"] for e in job.events("worker_started")}
        psutil.Process(workers[1]).send_signal(signal.SIGKILL)
        job.until(lambda: len(job.events("round_opened")) == 2, "a second round", PATIENCE_S)
        reached = max(epoch.number for epoch in epochs(job))
        job.until(lambda: epochs(job)[-1].number > reached + 2, "later epochs", PATIENCE_S)
        (killed,) = (e for e in job.events("worker_exited") if e["pid"] == workers[1])
        assert (killed["exit_code"], killed["expected"]) == (-signal.SIGKILL, False)
        trained = epochs(job)
        assert {epoch.workers for epoch in trained} == {2}
        numbers = {epoch.number for epoch in trained}
        assert sorted(numbers) == list(range(len(numbers))), "an epoch was lost"
        # One at most is trained again: the one whose backup was being written.
        assert len(trained) <= len(numbers) + 1
        # Where TensorFlow is imported in a few seconds, the kill comes before the driver is sure
        # that nobody calls `elastic.init()`, and the first round never completes.
        assert job.rounds() in ([2], [2, 2])
        assert len(job.events("round_opened")) == 2
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(PATIENCE_S) == 143, job.describe()
        job.assert_nothing_left()


@real
@pytest.mark.parametrize(("model", "samples"), [("mnist", "768"), ("resnet", "512")])
def test_networks_as_for_mnist_and_residual_ones_train_on_two_workers(
    tmp_path: Path, model: str, samples: str
) -> None:
    python = tensorflow_python()
    size = ("--model", model, "--samples", samples, "--epochs", "8", "--batch-size", "64")
    script = (SCRIPT, *size, "--backup", str(tmp_path / "backup"))
    with elasticrun("-np", "2", "--tf-config", "--", python, *script) as job:
        assert job.wait(2 * PATIENCE_S) == 0, job.describe()
        trained = epochs(job)
        assert [(epoch.number, epoch.workers) for epoch in trained] == [(n, 2) for n in range(8)]
        assert trained[-1].loss < 0.8 * trained[0].loss
        job.assert_nothing_left()


@real
def test_parameter_servers_end_with_the_chief() -> None:
    python = tensorflow_python()
    roles = ("-np", "4", "--min-np", "3", "--tf-roles", "chief=1,ps=1")
    with elasticrun(*roles, "--", python, str(JOBS / "tf_servers.py")) as job:
        assert job.wait(PATIENCE_S) == 0, job.describe()
        assert "total 10\n" in job.stdout
        job.assert_nothing_left()


def test_every_worker_is_born_with_its_own_tf_config() -> None:
    with elasticrun("-np", "3", "--tf-config", "sh", "-c", 'echo "$TF_CONFIG"') as job:
        assert job.wait(90) == 0, job.describe()
        said = sorted(re.findall(r"^\[(\d)\]<stdout>:(.*)$", job.stdout, re.M))
    configs = {int(rank): json.loads(text) for rank, text in said}
    (cluster,) = {json.dumps(config["cluster"]) for config in configs.values()}
    assert len(set(json.loads(cluster)["worker"])) == 3
    assert {rank: config["task"] for rank, config in configs.items()} == {
        rank: {"type": "worker", "index": rank} for rank in range(3)
    }


# ---- started by orchestrators ------------------------------------------------------------


def run_task(node: TfNode, spec: ClusterSpec, start: float, python: str) -> float:
    """Run one TensorFlow task of this cluster, and stay a member meanwhile; the sum it printed."""
    env = {**os.environ, "TF_CONFIG": tf_config(spec.cluster, spec.task), "START": str(start)}
    argv = [python, str(JOBS / "tf_collective.py")]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as task:
        try:
            while True:
                try:
                    said, _ = task.communicate(timeout=0.3)
                    break
                except subprocess.TimeoutExpired:
                    node.waiting_nodes()
        finally:
            task.kill()
    assert task.returncode == 0, said
    return float(said.split()[-1])


def add_up(nodes: Orchestrators, specs: dict[str, ClusterSpec], start: float, python: str) -> float:
    """Have all nodes run their task; the sum, on which they agree by way of the driver."""

    def work(node: TfNode, spec: ClusterSpec) -> dict[str, bytes]:
        found = run_task(node, spec, start, python)
        return node.synchronize("total", str(found).encode(), PATIENCE_S)

    calls = [
        nodes.call(name, lambda node, spec=spec: work(node, spec)) for name, spec in specs.items()
    ]
    values = [call.result(PATIENCE_S) for call in calls]
    (total,) = {value for found in values for value in found.values()}
    assert all(len(found) == len(specs) for found in values)
    return float(total)


@real
def test_a_collective_variable_goes_through_two_three_and_two_nodes(tmp_path: Path) -> None:
    python = tensorflow_python()
    with Orchestrators(tmp_path, lease=5.0) as nodes:
        for name, port in zip("abc", free_ports(3), strict=True):
            nodes.add(name, f"127.0.0.1:{port}")
        total = add_up(nodes, nodes.together("a", "b"), 0.0, python)
        assert total == 2
        newcomer = nodes.join("c", PATIENCE_S)
        nodes.until_waiting("a", 1)
        grown = {**nodes.together("a", "b"), "c": newcomer.result(30.0)}
        total = add_up(nodes, grown, total, python)
        assert total == 2 + 3
        shrunk = nodes.together("a", "b")  # c asks no more: it is lost after its lease
        assert {spec.generation for spec in shrunk.values()} == {3}
        assert add_up(nodes, shrunk, total, python) == 2 + 3 + 2
