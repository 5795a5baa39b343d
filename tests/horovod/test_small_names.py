"""Smaller parts of Horovod: loaders, helpers, timelines, process sets; in a world of one."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import elastic_driver.horovod.torch as hvd
from elastic_driver.horovod.common import util
from elastic_driver.horovod.common.process_sets import get_process_set_ids_and_ranks
from elastic_driver.horovod.data import AsyncDataLoaderMixin, BaseDataLoader


@pytest.mark.usefixtures("world")
def test_a_timeline_that_is_started_twice_on_one_path_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    for name in ("first", "second"):
        hvd.start_timeline(str(path))
        for _ in range(20):
            hvd.allreduce(torch.ones(3), name=name)
    hvd.stop_timeline()
    events = json.loads(path.read_text())
    shown = {each["args"]["name"] for each in events if each.get("args", {}).get("name")}
    assert shown == {"allreduce.second"}


@pytest.mark.usefixtures("world")
def test_process_sets_are_listed() -> None:
    assert get_process_set_ids_and_ranks() == {0: [0]}
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0]}


def test_variables_are_set_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_A", "before")
    monkeypatch.delenv("HVD_B", raising=False)
    with util.env(HVD_A="1", HVD_B="2", HVD_C=None):
        assert (os.environ["HVD_A"], os.environ["HVD_B"]) == ("1", "2")
    assert os.environ["HVD_A"] == "before"
    assert "HVD_B" not in os.environ


class Numbers(BaseDataLoader):
    def __init__(self, count: int, bad: int = -1) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        for number in range(self.count):
            if number == self.bad:
                raise ValueError("a bad batch")
            yield number

    def _process_batch(self, batch: int) -> int:
        return 10 * batch


class Ahead(AsyncDataLoaderMixin, Numbers):
    pass


def loaders() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "hvd-loader"]


@pytest.mark.parametrize("size", [0, 1, 64])
def test_a_loader_that_loads_ahead_gives_the_same_batches_in_each_pass(size: int) -> None:
    loader = Ahead(async_loader_queue_size=size, count=5)
    for _ in range(3):
        assert list(loader) == list(Numbers(5)) == [0, 10, 20, 30, 40]
    loader.close_async_loader()
    assert loaders() == []


def test_a_loop_that_is_left_early_ends_its_thread_and_an_error_comes_through() -> None:
    loader = Ahead(async_loader_queue_size=1, count=100)
    assert next(iter(loader)) == 0
    loader.close_async_loader()
    assert loaders() == []
    bad = Ahead(count=5, bad=2)
    seen: list[int] = []
    with pytest.raises(ValueError, match="a bad batch"):
        seen.extend(bad)
    assert seen == [0, 10]
