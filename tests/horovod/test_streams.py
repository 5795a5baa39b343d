"""The stream that moves a tensor waits for the script's, and the script's for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import elastic_driver.horovod.torch as hvd
from elastic_driver.horovod.engine import streams
from elastic_driver.worker import current


class Stream:
    """A device's stream of one thread; it writes down what it is asked for."""

    said: list[tuple[str, str, str]] = []  # noqa: RUF012 - of all streams of a test

    def record_event(self) -> str:
        event = f"event {len(self.said)}"
        self.said.append((threading.current_thread().name, "record", event))
        return event

    def wait_event(self, event: str) -> None:
        self.said.append((threading.current_thread().name, "wait", event))


class Module:
    """`torch.cuda` as far as streams need it, on a machine without a device."""

    def is_available(self) -> bool:
        return False

    def current_stream(self, device: torch.device) -> Stream:
        assert device.type == "meta"
        return Stream()


class OnDevice(torch.Tensor):
    """A tensor of the processor that says to be elsewhere."""

    @property
    def device(self) -> Any:  # type: ignore[override]
        return torch.device("meta")


def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: Module())
    monkeypatch.setattr(Stream, "said", [])
    hvd.init()
    try:
        operation_of = streams.mark
        monkeypatch.setattr(
            streams, "mark", lambda tensors: operation_of([*map(on_device, tensors)])
        )
        waits = streams.follow
        monkeypatch.setattr(
            streams, "follow", lambda event, tensors: waits(event, [*map(on_device, tensors)])
        )
        assert hvd.allreduce(torch.ones(3)).tolist() == [1, 1, 1]
    finally:
        hvd.shutdown()
        current.forget()
    me = threading.current_thread().name
    assert Stream.said == [
        (me, "record", "event 0"),
        ("hvd-transfer", "wait", "event 0"),
        ("hvd-transfer", "record", "event 2"),
        (me, "wait", "event 2"),
    ]


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


def test_the_processor_has_no_streams() -> None:
    assert streams.mark([torch.ones(1)]) is None
    assert streams.mark([]) is None
    streams.follow(None, [])
