"""Asks the driver for data shards, and tells it which of them are trained.

`worker.sharded` and scripts that train shards by themselves call it:

    clicks = elastic.ShardClient("clicks", records=10**9, shard_records=4096)
    while (granted := clicks.next()) is not None:
        train(records(granted.shard.start, granted.shard.stop))
        clicks.done(granted)

The first worker to ask opens the data set; all must describe it alike. While others hold the last
shards `next` waits, for they may come back. A driver that is away is waited for. In a process
that `elasticrun` did not start a ledger of its own serves, so that a script can be tried alone.
One client belongs to one thread. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from elastic_driver.errors import ClusterError, ElasticError, UsageError
from elastic_driver.policies.shards.ledger import open_ledger
from elastic_driver.policies.shards.messages import (
    Description,
    DoneAnswer,
    DoneRequest,
    End,
    ExtendRequest,
    Granted,
    NextAnswer,
    NextRequest,
    RangeDescription,
    Resumed,
    ResumeRequest,
    ShardCheckpoint,
    StreamDescription,
    Wait,
)
from elastic_driver.policies.shards.sources import Shard
from elastic_driver.worker import context
from elastic_driver.worker.worker_log import say
from rendezvous.auth import read_token_file
from rendezvous.client import RendezvousClient
from rendezvous.errors import UnreachableError

__all__ = ["IncompleteDataError", "ShardClient", "describe"]

SLICE_S = 2.0  # of a wait, so that the driver is not left with waits of the dead
MAX_HELD = 1024  # shards of a process alone
LONGEST_S = 24 * 3600.0  # no wait is for ever
_encode = msgspec.json.Encoder().encode
T = TypeVar("T")


class IncompleteDataError(ElasticError):
    """Everything else was trained, but these shards are in quarantine: `shards`, by name."""

    exit_code = 70

    def __init__(self, dataset: str, shards: tuple[str, ...]) -> None:
        super().__init__(
            f"the data set {dataset!r} is not complete: workers kept dying on "
            f"{', '.join(shards[:8])}{' …' if len(shards) > 8 else ''}; look at these records, "
            "or catch IncompleteDataError to go on without them"
        )
        self.dataset, self.shards = dataset, shards


class Desk(Protocol):
    """Where shards come from: the driver, or this process alone."""

    def next(self, worker: str, wait: float) -> NextAnswer: ...
    def done(self, worker: str, shard: Shard, token: int) -> DoneAnswer: ...
    def resume(self, worker: str, held: Mapping[int, int]) -> tuple[int, ...]: ...
    def extend(self, told: ExtendRequest) -> None: ...
    def checkpoint(self) -> ShardCheckpoint: ...
    def restore(self, saved: ShardCheckpoint) -> None: ...
    def close(self) -> None: ...


def describe(
    *,
    records: int | None = None,
    partitions: Mapping[str, int] | None = None,
    shard_records: int,
    epochs: int | None = 1,
    shuffle: bool = True,
    seed: int = 0,
    max_losses: int = 3,
) -> Description:
    """The description of a data set of `records`, or of a stream of `partitions` (→ offset).

    Raises `UsageError` unless exactly one of the two is given.
    """
    if (records is None) == (partitions is None):
        raise UsageError("give records=… for a data set, or partitions={name: offset} for a stream")
    if partitions is not None:
        return StreamDescription(dict(partitions), shard_records, max_losses)
    return RangeDescription(records or 0, shard_records, epochs, shuffle, seed, max_losses)


class ShardClient:
    """One worker's conversation with the driver about one data set.

    Args:
        name: of the data set, the same on every worker: letters, digits, '.', '_', '-'.
        worker: in whose name shards are held; this worker's own by default.
        timeout: seconds to wait for a driver that does not answer.
        description: `records`, `shard_records`, `epochs`, `shuffle`, `seed` of a data set, or
            `partitions` and `shard_records` of a stream; `max_losses`: so many workers may
            die training a shard before nobody gets it any more.
    """

    def __init__(
        self,
        name: str,
        *,
        worker: str | None = None,
        timeout: float = 600.0,
        shard_records: int,
        records: int | None = None,
        partitions: Mapping[str, int] | None = None,
        epochs: int | None = 1,
        shuffle: bool = True,
        seed: int = 0,
        max_losses: int = 3,
    ) -> None:
        dataset = describe(
            records=records,
            partitions=partitions,
            shard_records=shard_records,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
            max_losses=max_losses,
        )
        born = context.from_environment()
        self.name, self.description = name, dataset
        self._desk: Desk
        if born is None:
            self._desk, self._worker = _OwnDesk(dataset), worker or "alone"
        else:
            self._desk = _DriversDesk(born.endpoint, born.token_file, name, dataset, timeout)
            self._worker = worker or born.worker

    def next(self, timeout: float = LONGEST_S) -> Granted | None:
        """The next shard to train; None when every record was trained.

        Waits while others hold shards that may come back, or a stream has nothing new. Raises
        `IncompleteDataError` where all that is left is in quarantine, `ClusterError` after
        `timeout` seconds.
        """
        until = time.monotonic() + timeout
        while True:
            left = until - time.monotonic()
            answer = self.poll(min(SLICE_S, max(0.0, left)))
            if isinstance(answer, Granted):
                return answer
            if isinstance(answer, End):
                self.require_complete(answer)
                return None
            if left <= 0:
                raise ClusterError(
                    f"no shard of {self.name!r} within {timeout:g} s ({answer.reason}); "
                    "give next() a longer timeout, or see what the others do"
                )

    def poll(self, wait: float = 0.0) -> NextAnswer:
        """The driver's answer of the moment: `Granted`, `Wait` or `End`."""
        return self._desk.next(self._worker, wait)

    def require_complete(self, end: End) -> None:
        """Raise `IncompleteDataError` where shards are in quarantine."""
        if not end.complete:
            raise IncompleteDataError(self.name, end.quarantined)

    def done(self, granted: Granted) -> DoneAnswer:
        """This shard is trained; `ShardRefused` says that somebody else has it, or had."""
        return self._desk.done(self._worker, granted.shard, granted.token)

    def resume(self, held: Mapping[int, int]) -> tuple[int, ...]:
        """Name all we hold (token → records trained); the tokens that are not ours any more."""
        return self._desk.resume(self._worker, held)

    def extend(self, partition: str, end: int, *, closed: bool = False) -> None:
        """A stream's partition can be read up to offset `end`; `closed`: never further."""
        self._desk.extend(ExtendRequest(partition, end, closed))

    def checkpoint(self) -> ShardCheckpoint:
        """The progress, to be kept beside a model's checkpoint (`msgspec.json.encode` it)."""
        return self._desk.checkpoint()

    def restore(self, saved: ShardCheckpoint) -> None:
        """Go back to a checkpoint: what was not done when it was made is to do."""
        self._desk.restore(saved)

    def close(self) -> None:
        """Close the connection; a later call opens another."""
        self._desk.close()

    def __enter__(self) -> ShardClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _DriversDesk:
    """The driver's ledger, over HTTP. A data set is opened by asking, so any call may do it."""

    def __init__(
        self, endpoint: str, token_file: str, name: str, dataset: Description, timeout: float
    ) -> None:
        self._client = RendezvousClient(endpoint, read_token_file(token_file))
        self._path, self._dataset, self._timeout = f"/v1/shards/{name}", dataset, timeout

    def next(self, worker: str, wait: float) -> NextAnswer:
        body = _encode(NextRequest(worker, self._dataset, wait))
        answer: NextAnswer = msgspec.json.decode(
            self._post("next", body), type=Granted | Wait | End
        )
        return answer

    def done(self, worker: str, shard: Shard, token: int) -> DoneAnswer:
        body = _encode(DoneRequest(worker, shard, token))
        verdict: DoneAnswer = msgspec.json.decode(self._post("done", body), type=DoneAnswer)
        return verdict

    def resume(self, worker: str, held: Mapping[int, int]) -> tuple[int, ...]:
        body = _encode(ResumeRequest(worker, self._dataset, dict(held)))
        return msgspec.json.decode(self._post("resume", body), type=Resumed).lost

    def extend(self, told: ExtendRequest) -> None:
        self.resume("opening", {})
        self._post("extend", _encode(told))

    def checkpoint(self) -> ShardCheckpoint:
        self.resume("opening", {})
        path = f"{self._path}/checkpoint"
        found = self._patiently(partial(self._client.get_json, path))
        return msgspec.convert(found, ShardCheckpoint)

    def restore(self, saved: ShardCheckpoint) -> None:
        path = f"{self._path}/checkpoint"
        self._patiently(partial(self._client.put_json, path, _encode(saved)))

    def close(self) -> None:
        self._client.close()

    def _post(self, what: str, body: bytes) -> bytes:
        return self._patiently(partial(self._client.post_json, f"{self._path}:{what}", body))

    def _patiently(self, call: Callable[[], T]) -> T:
        """The call's answer, asked for again while the driver is away, within the timeout."""
        until = time.monotonic() + self._timeout
        silent = False
        while True:
            try:
                return call()
            except UnreachableError as error:
                if time.monotonic() >= until:
                    raise
                if not silent:
                    say(f"waiting for shards, and the driver does not answer ({error})")
                silent = True


class _OwnDesk:
    """A ledger of this process's own, where there is no driver."""

    def __init__(self, dataset: Description) -> None:
        self._dataset = dataset
        self._ledger, self._stream = open_ledger(dataset, lease=LONGEST_S, max_held=MAX_HELD)

    def next(self, worker: str, wait: float) -> NextAnswer:
        answer = self._ledger.next(worker, time.monotonic())
        if isinstance(answer, Wait):
            time.sleep(wait)  # nobody else is here to change anything but another thread
        return answer

    def done(self, worker: str, shard: Shard, token: int) -> DoneAnswer:
        return self._ledger.done(worker, shard, token, time.monotonic())

    def resume(self, worker: str, held: Mapping[int, int]) -> tuple[int, ...]:
        return tuple(self._ledger.resume(worker, held, time.monotonic()))

    def extend(self, told: ExtendRequest) -> None:
        if self._stream is None:
            raise UsageError("this data set has a length and does not grow")
        self._stream.extend(told.partition, told.end)
        if told.closed:
            self._stream.close(told.partition)

    def checkpoint(self) -> ShardCheckpoint:
        return ShardCheckpoint(self._dataset, self._ledger.checkpoint())

    def restore(self, saved: ShardCheckpoint) -> None:
        self._ledger.restore(saved.state)

    def close(self) -> None:
        """There is nothing to close."""
