"""Orders the streams of a device: that of the script's thread, and that of the thread that moves.

A tensor may still be computed when it is given to Horovod. The stream that moves it has to wait
for that, and the stream that uses the result for the move. On one stream both cost nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch


def mark(tensors: Sequence[torch.Tensor]) -> Any:
    """Return an event of all that the calling thread's stream has to do so far.

    It is that of the device of the first tensor; None for the CPU.
    """
    if not tensors or tensors[0].device.type == "cpu":
        return None
    device = tensors[0].device
    return torch.get_device_module(device.type).current_stream(device).record_event()


def follow(event: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Let the calling thread's stream wait for an event of `mark`, on the tensors' device."""
    if event is not None:
        device = tensors[0].device
        torch.get_device_module(device.type).current_stream(device).wait_event(event)
