"""Carries out this rank's operations beside the training thread.

Any thread submits; requests that come within a moment travel together. One thread receives from
the coordinator (on rank 0: one from each rank), and one carries out what was agreed
(`transfer_thread`). Nothing polls: threads wait for a message, or for a call. A broken world fails
everything that is pending. Times are seconds.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from elastic_driver.horovod.engine.coordination import Channel, Office
from elastic_driver.horovod.engine.negotiation import NegotiationLimits
from elastic_driver.horovod.engine.operation import (
    DuplicateNameError,
    EngineWorld,
    HorovodInternalError,
    Operation,
    SetPlace,
    first_line,
)
from elastic_driver.horovod.engine.operation_log import Timeline
from elastic_driver.horovod.engine.requests import (
    Agreement,
    Broken,
    Farewell,
    Key,
    Leave,
    Ready,
    Received,
    Request,
    Sent,
    decode_from_coordinator,
    decode_to_coordinator,
    encode,
    is_repeated,
)
from elastic_driver.horovod.engine.transfer_thread import TransferThread
from elastic_driver.worker.world.gloo import note_loss

GATHER_S = 0.002  # that requests wait for the next one, unless someone waits for them
LONGEST_GATHER_S = 0.01
LINGER_S = 2.0  # the longest wait for the other ranks to leave, too
READY_TO_END_S = 0.2  # for threads to end, once all ranks have left
ALL_LEFT = "all ranks called hvd.shutdown()"
END_S = 5.0  # the longest wait for threads to end, after the connections were ended


class Engine:
    """The operations of this process in one world."""

    def __init__(
        self, world: EngineWorld, limits: NegotiationLimits, say: Callable[[str], None]
    ) -> None:
        """Connect to the other ranks and start the threads; a collective of all ranks.

        Args:
            world: the world, in which this process stays as long as this engine.
            limits: those of rank 0 count.
            say: prints a warning.
        """
        self.world = world
        self._limits = limits
        self._say = say
        everyone = tuple(range(world.size))
        self.sets = {0: SetPlace(everyone, world.rank, world.connect(everyone))}
        self._lock = threading.Lock()  # guards the next eight
        self._finished = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)
        self._pending: dict[Key, Operation] = {}
        self._unsent: list[Request] = []
        self._unsent_bytes = 0
        self._closing = False
        self._wake_at: float | None = None  # to look for stalls
        self.broken: str | None = None
        self._joins = 0
        self._unnamed: dict[tuple[str, int], int] = {}
        self._sending = threading.Lock()  # keeps requests in order
        self._sent: Sent[Request] = Sent()
        self._transfers = TransferThread(self._take, self._place, self._finish, self.fail)
        self._channel = Channel(self.sets[0].group) if world.size > 1 else None
        self._office: Office | None = None
        if world.rank == 0:
            self._office = Office(self._channel, self._enqueue, world.size, limits)
        self._received: dict[int, Received[Agreement]] = {}
        self._threads = [self._thread("hvd-send", self._send_gathered)]
        self._threads.append(self._thread("hvd-transfer", self._transfers.run))
        if self._office is None:
            self._threads.append(self._thread("hvd-receive", self._receive))
        else:
            for rank in range(1, world.size):
                self._threads.append(self._thread(f"hvd-receive-{rank}", self._listen, rank))
        for thread in self._threads:
            thread.start()

    # ---- calls ---------------------------------------------------------------------------

    def submit(self, operation: Operation, *, gather: bool = True) -> None:
        """Begin an operation.

        Args:
            operation: with a name that is not pending.
            gather: whether it may wait a moment for others; False if someone waits for it.

        Raises `DuplicateNameError`, and `HorovodInternalError` in a world that is broken.
        """
        request = operation.request
        key = request.key
        with self._lock:
            if self.broken is not None:
                error = HorovodInternalError(f"the world is broken: {self.broken}")
                note_loss(error)
                raise error
            if key in self._pending:
                raise DuplicateNameError(
                    f"{request.kind} {request.name!r} is pending already; "
                    "synchronize() it first, or use another name"
                )
            self._pending[key] = operation
            self._unsent.append(request)
            self._unsent_bytes += request.nbytes
            gather = gather and self._unsent_bytes < self._limits.fusion_bytes
            if gather and len(self._unsent) == 1:
                self._work.notify()
        if not gather:
            self.flush()

    def wait(self, operation: Operation) -> Any:
        """Return the result of an operation once it is done; raises its error."""
        if not operation.done:
            self.flush()
            with self._lock:
                while not operation.done:
                    self._finished.wait()
        if operation.error is not None:
            if self.broken is not None:
                note_loss(operation.error)
            raise operation.error
        return operation.result

    def flush(self) -> None:
        """Send all requests that wait for others."""
        with self._sending:
            with self._lock:
                requests, self._unsent, self._unsent_bytes = self._unsent, [], 0
            if not requests:
                return
            try:
                self._post(requests)
            except Exception as error:
                self.fail(f"rank 0 cannot be reached: {first_line(error)}")

    def add_set(self, number: int, ranks: Sequence[int]) -> None:
        """Connect the ranks of a new process set; all ranks of the world call this."""
        index = list(ranks).index(self.world.rank) if self.world.rank in ranks else -1
        group = self.world.connect(ranks) if len(ranks) > 1 else None
        self.sets[number] = SetPlace(tuple(ranks), index, group)

    def remove_set(self, number: int) -> None:
        """Drop a process set; what is pending in it fails."""
        del self.sets[number]
        with self._lock:
            ended = [op for op in self._pending.values() if op.request.process_set == number]
            for operation in ended:
                del self._pending[operation.request.key]
                text = f"process set {number} was removed"
                operation.error = HorovodInternalError(text)
                operation.done = True
            self._finished.notify_all()

    def close(self) -> None:
        """End in good order with the other ranks, or alone where they do not end in time."""
        self.flush()
        if self.broken is None:
            try:
                self._leave()
            except Exception as error:
                self.fail(first_line(error))
            with self._lock:
                self._finished.wait_for(lambda: self.broken is not None, LINGER_S)
            self._join(READY_TO_END_S)
        self.fail("hvd.shutdown() was called")
        if any(thread.is_alive() for thread in self._threads):
            self.world.disconnect()
            self._join(END_S)
        self.stop_timeline()
        self.sets.clear()
        self._channel = self._office = None

    def fail(self, reason: str) -> None:
        """Fail everything that is pending, and whatever is submitted later; any thread."""
        with self._lock:
            if self.broken is not None:
                return
            self.broken = reason
            pending, self._pending = self._pending, {}
            for operation in pending.values():
                text = f"{operation.request.kind} {operation.request.name!r}: {reason}"
                operation.error = HorovodInternalError(text)
                operation.done = True
            self._finished.notify_all()
            self._work.notify_all()
        self._transfers.stop()
        office = self._office
        if office is not None and not self._closing:
            office.tell_broken(reason)

    def start_timeline(self, timeline: Timeline) -> None:
        """Write a timeline from now on, in place of the present one; on rank 0."""
        self.stop_timeline()
        self._transfers.timeline = timeline
        if self._office is not None:
            self._office.timeline = timeline

    def stop_timeline(self) -> None:
        """End the timeline, if there is one."""
        timeline, self._transfers.timeline = self._transfers.timeline, None
        if self._office is not None:
            self._office.timeline = None
        if timeline is not None:
            timeline.close()

    def next_name(self, kind: str, process_set: int) -> str:
        """Return an automatic name; the same on all ranks that call in the same order."""
        key = kind, process_set
        number = self._unnamed[key] = self._unnamed.get(key, 0) + 1
        return f"{kind}.noname.{self._joins}.{number}"

    def count_names_anew(self) -> None:
        """Count automatic names from 1 again: ranks that had joined have not counted."""
        self._unnamed.clear()
        self._joins += 1

    # ---- sending -------------------------------------------------------------------------

    def _post(self, requests: Sequence[Request]) -> None:
        if self._office is not None:
            self._office.ready(0, requests)
            self._watch(self._office)
            return
        shorts = self._sent.shorten(requests, repeated=is_repeated)
        assert self._channel is not None  # noqa: S101 - more than one rank
        self._channel.send(0, encode(Ready(shorts)))

    def _leave(self) -> None:
        self._closing = True
        if self._office is not None:
            self._let_go(self._office, 0)
        elif self._channel is not None:
            with self._sending:
                self._channel.send(0, encode(Leave()))

    def _watch(self, office: Office) -> None:
        """Wake the sending thread in time for the next stall, on rank 0."""
        if self._wake_at is None and (deadline := office.deadline()) is not None:
            with self._lock:
                self._wake_at = deadline
                self._work.notify()

    def _send_gathered(self) -> None:
        """Send requests a moment after the first of them; on rank 0, look for stalls, too."""
        while True:
            with self._lock:
                while not self._unsent and self.broken is None:
                    left = None if self._wake_at is None else self._wake_at - time.monotonic()
                    if left is not None and left <= 0:
                        break
                    self._work.wait(left)
                self._gather()
                if self.broken is not None:
                    return
            self.flush()
            if self._office is not None and self._wake_at is not None:
                self._look_for_stalls(self._office, self._wake_at)

    def _gather(self) -> None:
        """Wait while requests come one after the other; the lock is held."""
        until, count = time.monotonic() + LONGEST_GATHER_S, 0
        while len(self._unsent) > count and self.broken is None and time.monotonic() < until:
            count = len(self._unsent)
            self._work.wait(GATHER_S)

    def _look_for_stalls(self, office: Office, wake_at: float) -> None:
        now = time.monotonic()
        if now >= wake_at:
            for warning in office.stalled(now):
                self._say(warning)
            self._wake_at = None
            self._watch(office)

    # ---- receiving -----------------------------------------------------------------------

    def _receive(self) -> None:
        """Receive from the coordinator, on the other ranks."""
        channel = self._channel
        assert channel is not None  # noqa: S101 - more than one rank
        try:
            while True:
                message = decode_from_coordinator(channel.receive(0))
                if isinstance(message, Farewell):
                    break
                if isinstance(message, Broken):
                    self.fail(message.reason)
                    return
                received = self._received.setdefault(message.process_set, Received())
                for batch in message.batches:
                    self._transfers.put(message.process_set, [received.expand(a) for a in batch])
        except Exception as error:
            self.fail(f"the connection to rank 0 has ended: {first_line(error)}")
            return
        self.fail(ALL_LEFT)

    def _listen(self, rank: int) -> None:
        """Receive from another rank, on rank 0."""
        channel, office = self._channel, self._office
        assert channel is not None  # noqa: S101 - more than one rank
        assert office is not None  # noqa: S101 - on rank 0
        received: Received[Request] = Received()
        try:
            while True:
                message = decode_to_coordinator(channel.receive(rank))
                if isinstance(message, Leave):
                    break
                office.ready(rank, [received.expand(short) for short in message.requests])
                self._watch(office)
        except Exception as error:
            self.fail(f"the connection to rank {rank} has ended: {first_line(error)}")
            return
        self._let_go(office, rank)

    def _let_go(self, office: Office, rank: int) -> None:
        if office.leave(rank):
            self.fail(ALL_LEFT)

    def _enqueue(self, process_set: int, batches: list[list[Agreement]]) -> None:
        """Take what the coordinator has ordered, on rank 0."""
        for batch in batches:
            self._transfers.put(process_set, batch)

    # ---- transfers -----------------------------------------------------------------------

    def _take(self, batch: Sequence[Agreement]) -> list[Operation | None]:
        """Return this rank's operations of a batch, which are not pending any more."""
        with self._lock:
            return [self._pending.pop(agreement.key, None) for agreement in batch]

    def _place(self, process_set: int) -> SetPlace:
        return self.sets.get(process_set, self.sets[0])

    def _finish(self, operations: Sequence[Operation]) -> None:
        with self._lock:
            for operation in operations:
                operation.done = True
            self._finished.notify_all()

    def _thread(self, name: str, work: Callable[..., None], *args: int) -> threading.Thread:
        return threading.Thread(target=work, name=name, args=args, daemon=True)

    def _join(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
