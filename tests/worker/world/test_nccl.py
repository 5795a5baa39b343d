"""What is asked of torch's NCCL backend, as far as that can be seen without a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from elastic_driver.errors import UsageError
from elastic_driver.worker.world import nccl


class Backend:
    """Writes down what is asked of it."""

    def __init__(self, name: str, calls: list[str], error: str = "") -> None:
        self.name, self.calls, self.error = name, calls, error

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> None:
            self.calls.append(f"{self.name}.{name}")
            if self.error:
                raise RuntimeError(self.error)

        return call


class Half:
    """A process group with, or without, an NCCL half."""

    def __init__(self, backend: Backend | None) -> None:
        self.backend = backend
        self._device_types = [torch.device("cpu")]
        if backend is not None:
            self._device_types.append(torch.device("cuda"))

    def _get_backend(self, device: torch.device) -> Backend:
        assert device.type == "cuda"
        assert self.backend is not None
        return self.backend


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> nccl.Nccl:
    for name in (*nccl._VARIABLES, *nccl._CONFLICTING):
        monkeypatch.setenv(name, "")  # so that what is set in a test is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    return nccl.Nccl(0)


def test_torch_is_told_to_leave_errors_to_us(device: nccl.Nccl) -> None:
    assert {name: os.environ[name] for name in nccl._VARIABLES} == nccl._VARIABLES


def test_what_would_end_the_process_is_overruled_or_named(
    device: nccl.Nccl, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "detail")
    nccl.Nccl(0)
    said = capfd.readouterr().err
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING=3 is for jobs that end with a lost peer" in said
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch end this worker" in said
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_all_groups_are_aborted_as_one_newest_first_and_closed_again(
    device: nccl.Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    default, part = Half(Backend("default", calls)), Half(Backend("part", calls))
    names = {default: "0", part: "1", Half(None): "2"}
    monkeypatch.setattr(c10d, "_pg_names", names)
    device.abort()
    assert calls == ["part._group_start", "part.abort", "default.abort", "part._group_end"]
    monkeypatch.setattr(c10d, "_pg_names", {})
    device.abort()


def test_a_group_that_fails_to_abort_leaves_nothing_open(
    device: nccl.Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    backend = Backend("default", calls)
    monkeypatch.setattr(c10d, "_pg_names", {Half(backend): "0"})
    backend._group_start = lambda: calls.append("start")  # type: ignore[method-assign]
    backend._group_end = lambda: calls.append("end")  # type: ignore[method-assign]
    backend.error = "NCCL timeout"
    with pytest.raises(RuntimeError, match="NCCL timeout"):
        device.abort()
    assert calls == ["start", "default.abort", "end"]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("NCCL error in: x.cpp\nncclInvalidUsage: ...\nDuplicate GPU detected", UsageError),
        ("NCCL error in: x.cpp\nncclRemoteError: ...\nsocketPollConnect: refused", RuntimeError),
    ],
)
def test_only_what_no_other_round_would_mend_is_a_mistake(
    device: nccl.Nccl, monkeypatch: pytest.MonkeyPatch, said: str, kind: type[Exception]
) -> None:
    half = Half(Backend("default", [], said))
    monkeypatch.setattr(c10d, "_get_default_group", lambda: half)
    with pytest.raises(kind) as caught:
        device.connect()
    assert type(caught.value) is kind
    if kind is UsageError:
        assert "NCCL refuses cuda:0 of this worker: Duplicate GPU detected" in str(caught.value)
