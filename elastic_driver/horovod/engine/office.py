"""The coordinator on rank 0, with the messages to the other ranks."""

import threading
import time
from collections.abc import Callable, Sequence

from elastic_driver.horovod.engine import messages
from elastic_driver.horovod.engine.channel import Channel
from elastic_driver.horovod.engine.messages import (
    Agreement,
    Broken,
    Farewell,
    Orders,
    Request,
    Sent,
)
from elastic_driver.horovod.engine.negotiation import Coordinator, NegotiationLimits, Ordered
from elastic_driver.horovod.engine.timeline import Timeline


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
        data = messages.encode(message)
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
            shorts = [sent.shorten(batch, repeated=messages.is_repeated) for batch in batches]
            data = messages.encode(Orders(process_set, shorts))
            for rank in others:
                self._channel.send(rank, data)
        if 0 in ranks:
            self._own(process_set, batches)
