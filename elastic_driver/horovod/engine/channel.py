"""Messages between two ranks, over the process group that also carries the tensors.

Gloo needs the length of a message on both sides, and ends the process where they differ. So each
message begins with a frame of fixed length; what does not fit follows in a second one.

The coordinator receives from each rank on a thread of its own: a receive from any rank
(`recv_anysource`) does not end when one of them dies.
"""

import threading
from collections import deque
from datetime import timedelta
from typing import Any

import torch

FRAME = 1024  # bytes; holds the numbers of about 400 operations
LONGEST = 2**28  # bytes; a message beyond is refused
_TAG, _REST_TAG = 1, 2
_HEADER = 4
_FOREVER = timedelta(days=365)  # a rank may compute for hours between two operations
_UNFINISHED = 32  # sends to one rank, before the next one waits for the oldest


class Channel:
    """Sends and receives messages; one thread receives from a rank at a time, any thread sends."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._sends: dict[int, deque[Any]] = {}

    def send(self, rank: int, data: bytes) -> None:
        """Send a message; waits only where the rank is many messages behind."""
        inside = data[: FRAME - _HEADER]
        frame = bytearray(FRAME)
        frame[:_HEADER] = len(data).to_bytes(_HEADER, "little")
        frame[_HEADER : _HEADER + len(inside)] = inside
        with self._lock:
            self._post(rank, frame, _TAG)
            if len(data) > len(inside):
                self._post(rank, bytearray(data[len(inside) :]), _REST_TAG)

    def receive(self, rank: int) -> bytes:
        """Return the next message of a rank; raises RuntimeError where the connection ends."""
        frame = self._read(rank, FRAME, _TAG)
        length = int.from_bytes(frame[:_HEADER], "little")
        if length > LONGEST:
            raise RuntimeError(f"a message of {length} bytes came from rank {rank}")
        inside = frame[_HEADER : _HEADER + length]
        if length == len(inside):
            return inside
        return inside + self._read(rank, length - len(inside), _REST_TAG)

    def _read(self, rank: int, length: int, tag: int) -> bytes:
        data = bytearray(length)
        self._group.recv([torch.frombuffer(data, dtype=torch.uint8)], rank, tag).wait(_FOREVER)
        return bytes(data)

    def _post(self, rank: int, data: bytearray, tag: int) -> None:
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        sends = self._sends.setdefault(rank, deque())
        sends.append(self._group.send([tensor], rank, tag))
        while len(sends) > _UNFINISHED:
            sends.popleft().wait(_FOREVER)
