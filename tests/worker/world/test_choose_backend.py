"""Which backend a script gets, and what it is told where it cannot have it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elastic_driver.errors import UsageError
from elastic_driver.worker.world import groups, nccl
from elastic_driver.worker.world.device import Accelerator


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, built: bool = True) -> None:
    """Pretend that torch was built with NCCL, and sees so many GPUs."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *(*nccl._VARIABLES, *nccl._DEFAULTS, *nccl._CONFLICTING),
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.setenv(name, "")  # so that what is set in a test is taken back
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", ["gloo", "GLOO", "cpu:gloo", "cpu:gloo,cuda:gloo"])
def test_gloo_is_gloo_whatever_there_is(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    gpus(monkeypatch, 8)
    assert groups.choose_backend(name, 0) == groups.BackendChoice()


@pytest.mark.parametrize("name", ["nccl", "cuda:nccl", "cpu:gloo,cuda:nccl", "cuda:nccl, cpu:gloo"])
def test_nccl_takes_the_device_of_the_slot(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    gpus(monkeypatch, 8)
    choice = groups.choose_backend(name, 3)
    assert isinstance(choice.device, nccl.Nccl)
    assert str(choice.device._device) == "cuda:3"
    assert not choice.by_vote
    assert choice.early


def test_nothing_asked_for_is_a_vote_where_torch_has_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    choice = groups.choose_backend(None, 1)
    assert choice.device is not None
    assert choice.by_vote
    assert choice.early
    assert groups.choose_backend(None, 2) == groups.BackendChoice(None, by_vote=True)
    gpus(monkeypatch, 0)
    assert groups.choose_backend(None, 0) == groups.BackendChoice(None, by_vote=True)
    gpus(monkeypatch, 0, built=False)
    assert groups.choose_backend(None, 0) == groups.BackendChoice(None, by_vote=False), (
        "no vote, no cost"
    )


def test_who_sees_one_device_was_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    assert groups.device_of(5, "cuda") == 0
    gpus(monkeypatch, 4)
    assert groups.device_of(5, "cuda") is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert groups.device_of(5, "cuda") == 2, "the script has chosen"


def test_nccl_without_a_gpu_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        UsageError,
        match=r"a GPU for each worker.* slot 1 has none \(CUDA_VISIBLE_DEVICES=\); .*gloo",
    ):
        groups.choose_backend("nccl", 1)
    gpus(monkeypatch, 0, built=False)
    with pytest.raises(UsageError, match="needs a torch that is built with NCCL"):
        groups.choose_backend("nccl", 1)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'mpi' is not supported; use one of gloo, nccl"):
        groups.choose_backend("mpi", 0)


class FakeModule:
    """What torch has for each type of device, for a machine with two of them."""

    def __init__(self) -> None:
        self.chosen: list[torch.device] = []

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return False

    def device_count(self) -> int:
        return 2

    def set_device(self, device: torch.device) -> None:
        self.chosen.append(device)


@pytest.fixture
def xpus(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    module = FakeModule()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda _kind: module)
    monkeypatch.setattr(dist, "is_xccl_available", lambda: True)
    return module


@pytest.mark.parametrize("name", [None, "xccl", "xpu:xccl", "cpu:gloo,xpu:xccl"])
def test_another_accelerator_uses_its_own_collectives(xpus: FakeModule, name: str | None) -> None:
    choice = groups.choose_backend(name, 1)
    assert choice.by_vote == (name is None)
    assert type(choice.device) is Accelerator
    assert choice.device.backends == "xpu:xccl"
    choice.device.begin()
    assert xpus.chosen == [torch.device("xpu", 1)]
    other = groups.choose_backend(name, 0).device
    assert other is not None
    assert other.identity() != choice.device.identity()


def test_another_accelerator_has_no_nccl(xpus: FakeModule) -> None:
    with pytest.raises(UsageError, match="use one of gloo, xccl, or cpu:gloo,xpu:xccl"):
        groups.choose_backend("nccl", 0)
    with pytest.raises(UsageError, match="slot 2 has none"):
        groups.choose_backend("xccl", 2)
    assert groups.choose_backend("cpu:gloo,xpu:gloo", 0) == groups.BackendChoice()


def test_a_plug_in_without_collectives_trains_over_gloo(
    xpus: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("vulkan"))
    assert groups.choose_backend(None, 0) == groups.BackendChoice()


def test_only_nccls_own_file_calls_cuda_by_name() -> None:
    package = Path(groups.__file__).parents[2]
    naming = re.compile(r"torch\.cuda|[\"']cuda|is_cuda")
    files = {
        str(f.relative_to(package)) for f in package.rglob("*.py") if naming.search(f.read_text())
    }
    of_horovods_api = {"horovod/common/util.py", "horovod/torch/mpi_ops.py"}  # `cuda_built`, …
    assert files - of_horovods_api == {"worker/world/nccl.py"}
