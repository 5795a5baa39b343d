"""The six numbers, and what is said before there are any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from elastic_driver import contract
from elastic_driver.errors import UsageError
from elastic_driver.words.world import SlotInfo
from elastic_driver.worker import current
from elastic_driver.worker.sampler import ElasticSampler


@pytest.fixture(autouse=True)
def nowhere() -> Iterator[None]:
    current.forget()
    yield
    current.forget()


def test_before_a_world_a_question_says_what_to_call() -> None:
    assert not current.is_initialized()
    for ask in (current.rank, current.size, current.slot, current.round_id):
        with pytest.raises(current.NotInitializedError, match=r"elastic\.init\(\)"):
            ask()


def test_in_a_world_each_number_is_its_own() -> None:
    current.enter(SlotInfo("h", 7, 1, 2, 3, 4, 5, 6, 0, 1), 9)
    assert current.is_initialized()
    assert (current.rank(), current.local_rank(), current.cross_rank()) == (1, 2, 3)
    assert (current.size(), current.local_size(), current.cross_size()) == (4, 5, 6)
    assert (current.slot(), current.round_id()) == (7, 9)


def test_under_elasticrun_nobody_is_rank_0_of_1_by_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert current.rank_and_size() == (0, 1), "a process that elasticrun did not start"
    monkeypatch.setenv(contract.WORKER_ID, "h.0.0")
    with pytest.raises(UsageError, match=r"call elastic\.init\(\) first"):
        current.rank_and_size()
    current.enter(SlotInfo("h", 7, 1, 2, 3, 4, 5, 6, 0, 1), 9)
    assert current.rank_and_size() == (1, 4)


def test_a_sampler_and_its_loader_have_no_length_before_the_world_has_a_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = ElasticSampler(range(40))
    loader: DataLoader[int] = DataLoader(range(40), 5, sampler=sampler)  # type: ignore[arg-type]
    assert len(loader) == 8
    monkeypatch.setenv(contract.WORKER_ID, "h.0.0")
    for ask in (lambda: len(sampler), lambda: len(loader), lambda: list(loader)):
        with pytest.raises(UsageError, match=r"call elastic\.init\(\) first"):
            ask()
    current.enter(SlotInfo("h", 0, 0, 0, 0, 4, 4, 1, 0, 1), 1)
    assert (len(sampler), len(loader)) == (10, 2)


def test_what_a_worker_tells_its_processes_is_gone_when_it_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(contract.WORKER_ID, "h.0.0")
    monkeypatch.setenv(contract.SCRATCH, str(tmp_path))
    current.enter(SlotInfo("h", 0, 0, 0, 0, 4, 4, 1, 0, 1), 1)
    (told,) = tmp_path.iterdir()
    told.unlink()
    told.mkdir()  # nothing can be put in its place
    current.enter(SlotInfo("h", 0, 0, 0, 0, 2, 2, 1, 0, 1), 2)
    assert current.rank_and_size() == (0, 2)
    assert "processes that this worker starts do not know its rank" in capsys.readouterr().err
