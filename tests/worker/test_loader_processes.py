"""What processes that a worker starts, such as those of a DataLoader, know of ranks and sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_driver import contract
from tests.support.job import ROOT

SCRIPT = '''
import multiprocessing, sys
import torch
from torch.utils.data import DataLoader, IterableDataset

import elastic_driver as elastic
from elastic_driver.words.world import SlotInfo
from elastic_driver.worker import current
from elastic_driver.worker.current import rank_and_size
from elastic_driver.worker.sampler import ElasticSampler


class Asks(IterableDataset):
    """Each process yields rank and size, as a data set does that takes a part of a stream."""

    def __iter__(self):
        yield torch.tensor([elastic.rank(), elastic.size(), *rank_and_size()])


class Nested(IterableDataset):
    def __iter__(self):
        yield from ElasticSampler(range(4))


def join(_):
    elastic.init()
    assert elastic.size() == 2


@elastic.run
def train(state):
    pass


def enter(rank, size, round_id):
    current.enter(SlotInfo("h", rank, rank, rank, 0, size, size, 1, 0, 1), round_id)


def look(loader):
    try:
        for batch in loader:
            print(*batch.flatten().tolist())
    except Exception as error:
        print(type(error).__name__, str(error).strip().splitlines()[-1])


def loader_of(data, method, **options):
    return DataLoader(data, num_workers=1, multiprocessing_context=method, **options)


if __name__ == "__main__":
    method, what = sys.argv[1:]
    if what == "early":
        look(loader_of(Asks(), method))
    elif what == "nested":
        enter(0, 2, 1)
        look(loader_of(Nested(), method))
    elif what == "joins":
        enter(0, 2, 1)
        context = multiprocessing.get_context(method)
        for call in (join, train):
            child = context.Process(target=call, args=(None,))
            child.start()
            child.join(60)
            print(child.exitcode)
    else:
        enter(1, 3, 1)
        look(loader_of(Asks(), method))
        lasting = loader_of(Asks(), method, persistent_workers=True)
        look(lasting)
        enter(0, 2, 2)
        look(lasting)
        look(loader_of(Asks(), method))
        current.forget()
        look(loader_of(Asks(), method))
'''


def run(tmp_path: Path, *args: str, elastic: bool = True) -> list[str]:
    script = tmp_path / "ask.py"
    script.write_text(SCRIPT)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith("ELASTIC_")}
    if elastic:
        env |= {contract.WORKER_ID: "h.1.0", contract.SCRATCH: str(scratch)}
        env |= {contract.RENDEZVOUS: "http://127.0.0.1:9", contract.TOKEN_FILE: "/nowhere"}
    done = subprocess.run(
        [sys.executable, str(script), *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**env, "PYTHONPATH": str(ROOT)},
    )
    assert list(scratch.iterdir()) == [] or args[1] != "knows"
    return done.stdout.splitlines()


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_they_know_the_present_place_of_their_worker_however_they_are_started(
    tmp_path: Path, method: str
) -> None:
    first, lasting, changed, new, after = run(tmp_path, method, "knows")
    assert (first, lasting) == ("1 3 1 3", "1 3 1 3")
    assert changed == "0 2 0 2", "a process that lasts longer than a world"
    assert new == "0 2 0 2"
    assert after.startswith("NotInitializedError"), "the worker has left its world"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_before_the_first_world_they_refuse_as_their_worker_does(
    tmp_path: Path, method: str
) -> None:
    (said,) = run(tmp_path, method, "early")
    assert said.startswith("NotInitializedError")
    assert "call elastic.init() first" in said


def test_without_elasticrun_a_process_of_a_worker_in_a_world_keeps_its_numbers(
    tmp_path: Path,
) -> None:
    assert run(tmp_path, "fork", "knows", elastic=False)[:2] == ["1 3 1 3", "1 3 1 3"]


def test_a_sampler_inside_a_data_set_is_refused_because_nobody_sees_what_is_trained(
    tmp_path: Path,
) -> None:
    (said,) = run(tmp_path, "fork", "nested")
    assert said.startswith("UsageError")
    assert "give it to the DataLoader as sampler=" in said


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_they_are_in_the_world_of_their_worker_and_do_not_join_the_job_themselves(
    tmp_path: Path, method: str
) -> None:
    initialised, trained = run(tmp_path, method, "joins")
    assert initialised == "0"
    assert trained == "1", "a script that trains in each of its processes"
