"""Carries out batches in the order of the coordinator, on a thread of its own.

While one batch moves, the next one is prepared.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from elastic_driver.horovod.engine import streams
from elastic_driver.horovod.engine.operation import (
    HorovodInternalError,
    Operation,
    SetPlace,
    first_line,
)
from elastic_driver.horovod.engine.operation_log import Timeline
from elastic_driver.horovod.engine.requests import Agreement
from elastic_driver.horovod.engine.transfer import Finish, Transfers

AT_ONCE = 3  # batches that move or are prepared; gloo moves two at a time


@dataclass(frozen=True)
class _UnderWay:
    """A batch whose tensors move."""

    batch: list[Agreement]
    operations: list[Operation]  # those of this rank
    finish: Finish
    timeline: Timeline | None


class TransferThread:
    """The queue of one engine's batches, and the work of its thread."""

    def __init__(
        self,
        take: Callable[[Sequence[Agreement]], list[Operation | None]],
        place: Callable[[int], SetPlace],
        finish: Callable[[Sequence[Operation]], None],
        fail: Callable[[str], None],
    ) -> None:
        """Wait for `put`.

        Args:
            take: returns this rank's operations of a batch, which nobody else can fail then.
            place: returns the process set with a number.
            finish: marks operations as done.
            fail: fails everything that is pending.
        """
        self._take = take
        self._place = place
        self._mark_done = finish
        self.fail = fail
        self._queue: SimpleQueue[tuple[int, list[Agreement]] | None] = SimpleQueue()
        self.timeline: Timeline | None = None

    def put(self, process_set: int, batch: list[Agreement]) -> None:
        """Add a batch; any thread."""
        self._queue.put((process_set, batch))

    def stop(self) -> None:
        """End the thread after the batches that were added before; any thread."""
        self._queue.put(None)

    def run(self) -> None:
        """Carry out batches until `stop`, or until a transfer fails."""
        transfers = Transfers()
        torch.set_grad_enabled(False)  # on this thread
        under_way: deque[_UnderWay] = deque()
        try:
            while True:
                if under_way and (len(under_way) == AT_ONCE or self._queue.empty()):
                    self._complete(under_way.popleft())
                elif (ordered := self._queue.get()) is None:
                    break
                elif (started := self._start(transfers, *ordered)) is not None:
                    under_way.append(started)
        except Exception as error:
            self.fail(f"a peer is lost or cannot be reached: {first_line(error)}")
        for left in under_way:  # nothing may write into a tensor whose operation has failed
            with contextlib.suppress(Exception):
                self._complete(left)

    def _start(
        self, transfers: Transfers, process_set: int, batch: list[Agreement]
    ) -> _UnderWay | None:
        """Begin a batch; return None if there is nothing to wait for."""
        operations = self._take(batch)
        here = [operation for operation in operations if operation is not None]
        if batch[0].error:
            for operation in here:
                operation.error = HorovodInternalError(batch[0].error)
        elif here or batch[0].absent:
            timeline = self.timeline
            if timeline is not None:
                timeline.began(batch)
            items = list(zip(batch, operations, strict=True))
            with self._failing(here):
                for operation in here:
                    streams.follow(operation.given, operation.tensors)
                finish = transfers.start(items, self._place(process_set))
            return _UnderWay(batch, here, finish, timeline)
        self._finish(here)
        return None

    def _finish(self, operations: Sequence[Operation]) -> None:
        """Let autograd, and states that look for changes, know what was written; mark as done.

        torch counts changes of a tensor by its own operations, but not those by a process group.
        """
        written = [tensor for operation in operations for tensor in operation.outputs]
        if written:
            torch.autograd.graph.increment_version(written)
        for operation in operations:
            if operation.given is not None:
                operation.written = streams.mark(operation.tensors)
        self._mark_done(operations)

    def _complete(self, started: _UnderWay) -> None:
        """Wait for the transfer of a batch."""
        with self._failing(started.operations):
            started.finish()
        if started.timeline is not None:
            started.timeline.ended(started.batch)
        self._finish(started.operations)

    @contextlib.contextmanager
    def _failing(self, operations: Sequence[Operation]) -> Iterator[None]:
        """Let an error inside fail these operations, too."""
        try:
            yield
        except Exception as error:
            for operation in operations:
                what = f"{operation.request.kind} {operation.request.name!r}"
                operation.error = HorovodInternalError(f"{what}: {first_line(error)}")
            self._finish(operations)
            raise
