"""Which backend a script gets, and what it is told where it cannot have it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from elastic_driver.errors import UsageError
from elastic_driver.worker.world import nccl


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, built: bool = True) -> None:
    """Pretend that torch was built with NCCL, and sees so many GPUs."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*nccl._VARIABLES, *nccl._CONFLICTING, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that what is set in a test is taken back
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", ["gloo", "GLOO", "cpu:gloo", "cpu:gloo,cuda:gloo"])
def test_gloo_is_gloo_whatever_there_is(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    gpus(monkeypatch, 8)
    assert nccl.choose_backend(name, 0) == nccl.BackendChoice()


@pytest.mark.parametrize("name", ["nccl", "cuda:nccl", "cpu:gloo,cuda:nccl", "cuda:nccl, cpu:gloo"])
def test_nccl_takes_the_device_of_the_slot(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    gpus(monkeypatch, 8)
    choice = nccl.choose_backend(name, 3)
    assert isinstance(choice.device, nccl.Nccl)
    assert str(choice.device._device) == "cuda:3"
    assert not choice.by_vote


def test_nothing_asked_for_is_a_vote_where_torch_has_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    choice = nccl.choose_backend(None, 1)
    assert choice.device is not None
    assert choice.by_vote
    assert nccl.choose_backend(None, 2) == nccl.BackendChoice(None, by_vote=True)
    gpus(monkeypatch, 0)
    assert nccl.choose_backend(None, 0) == nccl.BackendChoice(None, by_vote=True)
    gpus(monkeypatch, 0, built=False)
    assert nccl.choose_backend(None, 0) == nccl.BackendChoice(None, by_vote=False), (
        "no vote, no cost"
    )


def test_who_sees_one_device_was_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    assert nccl.device_of(5) == 0
    gpus(monkeypatch, 4)
    assert nccl.device_of(5) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert nccl.device_of(5) == 2, "the script has chosen"


def test_nccl_without_a_gpu_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        UsageError,
        match=r"a GPU for each worker.* slot 1 has none \(CUDA_VISIBLE_DEVICES=\); .*gloo",
    ):
        nccl.choose_backend("nccl", 1)
    gpus(monkeypatch, 0, built=False)
    with pytest.raises(UsageError, match="needs a torch that is built with NCCL"):
        nccl.choose_backend("nccl", 1)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'mpi' is not supported; use one of gloo, nccl"):
        nccl.choose_backend("mpi", 0)
