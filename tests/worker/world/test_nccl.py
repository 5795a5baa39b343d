"""What is asked of torch's NCCL backend, as far as that can be seen without a GPU."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from elastic_driver.errors import UsageError
from elastic_driver.worker import torch_seams
from elastic_driver.worker.world import device as device_half
from elastic_driver.worker.world import nccl
from elastic_driver.worker.world.device import DeviceHalf


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
    for name in (*nccl._VARIABLES, *nccl._DEFAULTS, *nccl._CONFLICTING):
        monkeypatch.setenv(name, "")  # so that what is set in a test is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    return nccl.Nccl(0)


def test_torch_is_told_to_leave_errors_to_us(device: nccl.Nccl) -> None:
    assert {name: os.environ[name] for name in nccl._VARIABLES} == nccl._VARIABLES


def test_nvlink_sharp_is_off_unless_the_user_wants_it(
    device: nccl.Nccl, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    nccl.Nccl(0)
    assert os.environ["NCCL_NVLS_ENABLE"] == "2"
    assert "NCCL_NVLS_ENABLE=2, which is not our default of 0: the loss" in capfd.readouterr().err


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


def having(monkeypatch: pytest.MonkeyPatch, *aborts: Callable[[], None]) -> None:
    """Have torch know a group for each of these, and one without an NCCL half."""
    halves = [Half(cast(Backend, SimpleNamespace(abort=abort))) for abort in aborts]
    names = {half: str(number) for number, half in enumerate([*halves, Half(None)])}
    monkeypatch.setattr(torch_seams, "groups", names)


def test_no_abort_waits_for_another_to_begin(
    device: nccl.Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = threading.Barrier(3)  # an abort waits until the device is idle: until all have begun
    having(monkeypatch, *[lambda: void(meeting.wait(10))] * 3)
    device.abort()
    having(monkeypatch)
    device.abort()


def void(_: object) -> None: ...


def fails() -> None:
    raise RuntimeError("NCCL timeout")


def test_an_abort_that_fails_leaves_the_others_aborted(
    device: nccl.Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    having(monkeypatch, lambda: done.append(1), fails, lambda: done.append(3))
    with pytest.raises(RuntimeError, match="NCCL timeout"):
        device.abort()
    assert sorted(done) == [1, 3]


def test_an_abort_that_never_ends_is_not_waited_for(
    device: nccl.Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(device_half, "CUT_OFF_S", 0.05)
    having(monkeypatch, lambda: void(never.wait()), lambda: None)
    with pytest.raises(TimeoutError, match=r"1 of 2 communicators were not aborted within 0.05 s"):
        device.abort()
    never.set()


class Cuda:
    """`torch.cuda` as far as a wait needs it; writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.capturing = False
        self.done = False
        self.kept = self.free = 0

    def set_device(self, device: torch.device) -> None: ...

    def memory_reserved(self, _: torch.device) -> int:
        return self.kept

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        return self.free, 2**36

    def empty_cache(self) -> None:
        self.calls.append("emptied")

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self, device: torch.device) -> str:
        return f"the stream of {device}"

    def Event(self, *, blocking: bool) -> Any:
        return SimpleNamespace(
            record=lambda stream: self.calls.append((blocking, stream)),
            query=lambda: self.done,
            synchronize=lambda: self.calls.append("slept"),
        )

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(f"all of {device}")


def test_a_long_wait_for_the_stream_sleeps_and_a_capture_is_left_alone(device: nccl.Nccl) -> None:
    cuda = device._module = Cuda()
    recorded = True, "the stream of cuda:0"
    device.settle()
    assert cuda.calls == [recorded, "slept"]
    cuda.done = True
    device.settle()
    assert cuda.calls == [recorded, "slept", recorded]
    cuda.capturing = True
    device.settle()
    assert len(cuda.calls) == 3


def test_before_a_roll_back_all_streams_are_waited_for(device: nccl.Nccl) -> None:
    cuda = device._module = Cuda()
    half = DeviceHalf(device)
    half.cut_off("a.0.1 was killed")
    half.wait_until_cut_off()
    assert cuda.calls == ["all of cuda:0"]


def test_the_first_collectives_are_carried_out_by_the_thread_that_connects(
    device: nccl.Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    half = Half(Backend("nccl", calls))
    monkeypatch.setattr(c10d, "_get_default_group", lambda: half)
    monkeypatch.setattr(nccl.torch, "zeros", lambda size, device: size)
    cuda = device._module = Cuda()
    device.connect()
    assert calls[0] == "nccl.eager_connect_single_device"
    assert set(calls[1:]) == {"nccl.allreduce", "nccl.broadcast"}
    assert cuda.calls[-1] == "all of cuda:0"


@pytest.mark.parametrize("error", ["", "ncclRemoteError: connection refused"])
def test_what_connects_after_its_round_was_given_up_is_aborted(
    device: nccl.Nccl, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    calls: list[str] = []
    backend = Backend("late", calls)
    half = DeviceHalf(device)

    def connect(_: object) -> None:  # meanwhile the round ends, and nothing is there to abort
        half.cut_off("a.0.1 was killed")
        half.wait_until_cut_off()
        calls.append("connected")
        if error:
            raise RuntimeError(error)

    backend.__dict__["eager_connect_single_device"] = connect
    monkeypatch.setattr(c10d, "_get_default_group", lambda: Half(backend))
    monkeypatch.setattr(device, "_use_first", lambda _: None)
    device._module = Cuda()
    with pytest.raises(RuntimeError, match=error) if error else contextlib.nullcontext():
        half.connect()
    assert calls == ["connected", "late.abort"]


def test_room_is_made_for_a_communicator_where_torch_keeps_the_memory(device: nccl.Nccl) -> None:
    cuda = device._module = Cuda()
    for kept, free, emptied in ((0, 0, 0), (2**30, 2**34, 0), (2**30, 2**20, 1)):
        cuda.kept, cuda.free, cuda.calls = kept, free, []
        device.begin()
        assert cuda.calls.count("emptied") == emptied


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
