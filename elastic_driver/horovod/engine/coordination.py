"""The coordinator on rank 0 (`Office`), and its messages to and from the ranks (`Channel`).

Messages travel over the process group that also carries the tensors. Gloo needs the length of a
message on both sides, and ends the process where they differ. So each message begins with a frame
of fixed length; what does not fit follows in a second one.

The coordinator receives from each rank on a thread of its own: a receive from any rank
(`recv_anysource`) does not end when one of them dies.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from elastic_driver.horovod.engine.negotiation import Coordinator, NegotiationLimits, Ordered
from elastic_driver.horovod.engine.operation_log import Timeline
from elastic_driver.horovod.engine.requests import (
    Agreement,
    Broken,
    Farewell,
    Orders,
    Request,
    Sent,
    encode,
    is_repeated,
)

FRAME = 1024  # bytes; holds the numbers of about 400 operations
LONGEST = 2**28  # bytes; a message beyond is refused
_TAG, _REST_TAG = 1, 2
_HEADER_BYTES = 4
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
        inside = data[: FRAME - _HEADER_BYTES]
        frame = bytearray(FRAME)
        frame[:_HEADER_BYTES] = len(data).to_bytes(_HEADER_BYTES, "little")
        frame[_HEADER_BYTES : _HEADER_BYTES + len(inside)] = inside
        with self._lock:
            self._post(rank, frame, _TAG)
            if len(data) > len(inside):
                self._post(rank, bytearray(data[len(inside) :]), _REST_TAG)

    def receive(self, rank: int) -> bytes:
        """Return the next message of a rank; raises RuntimeError where the connection ends."""
        frame = self._read(rank, FRAME, _TAG)
        length = int.from_bytes(frame[:_HEADER_BYTES], "little")
        if length > LONGEST:
            raise RuntimeError(f"a message of {length} bytes came from rank {rank}")
        inside = frame[_HEADER_BYTES : _HEADER_BYTES + length]
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


class Office:
    """Asks the coordinator, and sends its orders to their ranks; thread-safe."""

    def __init__(
        self,
        channel: Channel | None,
        own: Callable[[int, list[list[Agreement]]], None],
        size: int,
        limits: NegotiationLimits,
    ) -> None:
        """Open the office; `own` takes the orders for rank 0."""
        self._channel = channel
        self._own = own
        self._size = size
        self._coordinator = Coordinator(size, limits)
        self._sent: dict[int, Sent[Agreement]] = {}  # by process set
        self._lock = threading.Lock()
        self.timeline: Timeline | None = None

    def ready(self, rank: int, requests: Sequence[Request]) -> None:
        """Take requests of a rank, and send out what can be carried out now."""
        with self._lock:
            if self.timeline is not None:
                for request in requests:
                    self.timeline.requested(rank, request)
            self._send(self._coordinator.ready(rank, requests, time.monotonic()))

    def leave(self, rank: int) -> bool:
        """Let a rank leave; after the last one say farewell, and return True."""
        with self._lock:
            self._send(self._coordinator.leave(rank))
            if self._coordinator.all_left:
                self._tell(Farewell())
            return self._coordinator.all_left

    def deadline(self) -> float | None:
        """Return when `stalled` has to be called next, in monotonic seconds."""
        with self._lock:
            return self._coordinator.deadline()

    def stalled(self, now: float) -> list[str]:
        """Return warnings, and fail what has waited too long."""
        with self._lock:
            warnings, failed = self._coordinator.stalled(now)
            self._send(failed)
        return warnings

    def tell_broken(self, reason: str) -> None:
        """Tell the other ranks that the world is broken, as far as they can be reached."""
        with self._lock:
            self._tell(Broken(reason[:1000]))

    def _tell(self, message: Farewell | Broken) -> None:
        data = encode(message)
        for rank in range(1, self._size):
            try:
                if self._channel is not None:
                    self._channel.send(rank, data)
            except RuntimeError:  # it is gone
                continue

    def _send(self, ordered: Sequence[Ordered]) -> None:
        """Send batches to their ranks; those that go to the same ranks are one message."""
        if self.timeline is not None and ordered:
            self.timeline.cycle()
            for one in ordered:
                for agreement in one.batch:
                    self.timeline.agreed(agreement)
        start = 0
        for end in range(1, len(ordered) + 1):
            first = ordered[start]
            if end < len(ordered) and (
                ordered[end].ranks == first.ranks
                and ordered[end].batch[0].process_set == first.batch[0].process_set
            ):
                continue
            self._send_alike(first.ranks, [one.batch for one in ordered[start:end]])
            start = end

    def _send_alike(self, ranks: Sequence[int], batches: list[list[Agreement]]) -> None:
        process_set = batches[0][0].process_set
        others = [rank for rank in ranks if rank != 0]
        if others and self._channel is not None:
            sent = self._sent.setdefault(process_set, Sent())
            shorts = [sent.shorten(batch, repeated=is_repeated) for batch in batches]
            data = encode(Orders(process_set, shorts))
            for rank in others:
                self._channel.send(rank, data)
        if 0 in ranks:
            self._own(process_set, batches)
