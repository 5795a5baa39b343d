"""The worker's client for data shards that the driver hands out.

`features.shards.worker.dataset` uses it, and scripts that train shards by themselves:

    clicks = elastic.ShardClient("clicks", records=10**9, shard_records=4096)
    while (granted := clicks.next()) is not None:
        train(records(granted.shard.start, granted.shard.stop))
        clicks.done(granted)

The first worker that asks opens the data set; all workers must describe it alike. While other
workers hold the last shards, `next` waits, since these shards may come back. It also waits for a
driver that does not answer. A process that `elasticrun` did not start hands out the shards itself,
so that a script can be tried alone. Each client belongs to one thread. Times are seconds.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from elastic_driver.errors import ClusterError, ElasticError, UsageError
from elastic_driver.features.shards import messages
from elastic_driver.features.shards.machine import DataSets
from elastic_driver.kernel.machine import Reply
from elastic_driver.kernel.services import Rejection
from elastic_driver.worker import context
from elastic_driver.worker.current import say
from rendezvous.client import RendezvousClient, new_request_id
from rendezvous.errors import RequestError, UnreachableError

__all__ = ["IncompleteDataError", "ShardClient"]

SLICE_S = 2.0  # the longest wait of one request, so that the driver keeps no waits of dead workers
TRY_S = 3.0  # for one attempt to reach the driver, besides the wait of the request
LONGEST_S = 24 * 3600.0  # the default limit of `next`


class IncompleteDataError(ElasticError):
    """All other records were trained, but these shards are in quarantine: `shards`, by name."""

    exit_code = 70

    def __init__(self, dataset: str, shards: tuple[str, ...]) -> None:
        super().__init__(
            f"the data set {dataset!r} is not complete: workers kept dying on "
            f"{', '.join(shards[:8])}{' …' if len(shards) > 8 else ''}; look at these records, "
            "or catch IncompleteDataError to go on without them"
        )
        self.dataset, self.shards = dataset, shards


class ShardClient(AbstractContextManager["ShardClient"]):
    """One worker's client for the shards of one data set.

    A data set has `records`, a stream has `partitions` that grow; give exactly one of the two.

    Args:
        name: of the data set, the same on every worker: letters, digits, '.', '_', '-'.
        worker: the name in which shards are held; this worker's own by default. In a job the driver
            takes no other name but "world", for shards that all members train together.
        timeout: seconds to wait for a driver that does not answer; at least `--driver-timeout`.
        shard_records: records of one shard.
        records: length of the data set.
        partitions: first offset of each partition of a stream, by name.
        epochs: how often the data set is trained; None is for ever.
        shuffle: give the shards of an epoch in a random order.
        seed: of that order.
        max_losses: a shard goes into quarantine when so many workers have died training it.

    Raises `UsageError` unless exactly one of `records` and `partitions` is given.
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
        if (records is None) == (partitions is None):
            raise UsageError(
                "give records=… for a data set, or partitions={name: offset} for a stream"
            )
        self.dataset: messages.Description
        if partitions is not None:
            self.dataset = messages.StreamDescription(dict(partitions), shard_records, max_losses)
        else:
            sizes = records or 0, shard_records, epochs
            self.dataset = messages.RangeDescription(*sizes, shuffle, seed, max_losses)
        self.name, self._timeout = name, timeout
        self._driver: RendezvousClient | None = None
        self.while_away: Callable[[], None] = lambda: None  # called while the driver is away
        self._own = DataSets()  # of this process, where there is no driver
        self._lock = threading.Lock()  # guards them
        found = context.from_environment()
        self._worker = worker or ("alone" if found is None else found.worker)
        if found is None:
            self._open()  # raises for a description that makes no sense
        else:
            self._driver = found.client()
            self._timeout = max(timeout, found.driver_timeout)

    def next(self, timeout: float = LONGEST_S) -> messages.Granted | None:
        """Return the next shard to train; None when every record was trained.

        Waits while others hold shards that may come back, or a stream has no new records. Raises
        `IncompleteDataError` where all that is left is in quarantine, `ClusterError` after
        `timeout` seconds.
        """
        until = time.monotonic() + timeout
        while True:
            left = until - time.monotonic()
            answer = self.poll(min(SLICE_S, max(0.0, left)))
            if isinstance(answer, messages.Granted):
                return answer
            if isinstance(answer, messages.End):
                self.require_complete(answer)
                return None
            if left <= 0:
                raise ClusterError(
                    f"no shard of {self.name!r} within {timeout:g} s ({answer.reason}); "
                    "give next() a longer timeout, or see what the others do"
                )

    def poll(self, wait: float = 0.0) -> messages.NextAnswer:
        """Return `Granted`, `Wait` or `End`, after waiting up to `wait` seconds for a shard."""
        request = messages.NextRequest(self._worker, self.dataset, wait, request=new_request_id())
        answer: messages.NextAnswer = self._ask("next", request, messages.NextAnswer)
        return answer

    def require_complete(self, end: messages.End) -> None:
        """Raise `IncompleteDataError` where shards are in quarantine."""
        if not end.complete:
            raise IncompleteDataError(self.name, end.quarantined)

    def done(self, granted: messages.Granted) -> messages.DoneAnswer:
        """Report a shard as trained; `ShardRefused` says that it belongs to another worker now."""
        request = messages.DoneRequest(self._worker, granted.shard, granted.token)
        answer: messages.DoneAnswer = self._ask("done", request, messages.DoneAnswer)
        return answer

    def resume(self, held: Mapping[int, int]) -> tuple[int, ...]:
        """Report all held shards (token → records trained); return the tokens that are not ours."""
        request = messages.ResumeRequest(self._worker, self.dataset, dict(held))
        resumed: messages.Resumed = self._ask("resume", request, messages.Resumed)
        return resumed.lost

    def agree(
        self, held: Sequence[messages.Claim], state: messages.LedgerState | None, *, follows: bool
    ) -> messages.Agreed:
        """Tell the driver what the model of the world was trained with (see `AgreeRequest`).

        Returns what the world holds from now on.
        """
        request = messages.AgreeRequest(
            self._worker, self.dataset, tuple(held), state, follows, request=new_request_id()
        )
        agreed: messages.Agreed = self._ask("agree", request, messages.Agreed)
        return agreed

    def look(self, timeout: float) -> messages.ShardCheckpoint | None:
        """Return the driver's account; None where it has none, or gives none in `timeout` seconds.

        Any thread may call this.
        """
        found = context.from_environment()
        try:
            if found is None:
                known: messages.ShardCheckpoint = self._ask_own(messages.ReadCheckpoint())
                return known
            with found.client(timeout) as driver:
                answer = driver.get_bytes(f"/v1/shards/{self.name}/checkpoint", timeout)
        except (UnreachableError, RequestError, UsageError):
            return None
        return msgspec.json.decode(answer, type=messages.ShardCheckpoint)

    def extend(self, partition: str, end: int, *, closed: bool = False) -> None:
        """Let a stream's partition be read up to offset `end`; `closed`: never further."""
        self._open()
        self._ask("extend", messages.ExtendRequest(partition, end, closed), None)

    def checkpoint(self) -> messages.ShardCheckpoint:
        """Return the progress, to be kept beside a model's checkpoint (`msgspec.json.encode`)."""
        self._open()
        found: messages.ShardCheckpoint
        found = self._ask("", messages.ReadCheckpoint(), messages.ShardCheckpoint)
        return found

    def restore(self, saved: messages.ShardCheckpoint) -> None:
        """Go back to a checkpoint: shards that were not done then are handed out again."""
        self._ask("", saved, None)

    def close(self) -> None:
        """Close the connection; a later call opens another."""
        if self._driver is not None:
            self._driver.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- requests ------------------------------------------------------------------------

    def _open(self) -> None:
        """Open the data set, for requests that do not describe it."""
        opening = messages.ResumeRequest(messages.OPENING, self.dataset, {})
        self._ask("resume", opening, messages.Resumed)

    def _ask(self, action: str, request: Any, kind: Any) -> Any:
        """Return the answer to a request, of this kind; wait for a driver that is away."""
        if self._driver is None:
            return self._ask_own(request)
        began, told = time.monotonic(), False
        attempt = TRY_S + (request.wait if isinstance(request, messages.NextRequest) else 0.0)
        while True:
            try:
                return self._send(self._driver, action, request, kind, attempt)
            except UnreachableError as error:
                self.while_away()
                waited = time.monotonic() - began
                if waited >= self._driver.timeout and not told:
                    told = True
                    say(f"waiting for shards, and the driver does not answer ({error})")
                if waited >= self._timeout:
                    raise

    def _send(
        self, driver: RendezvousClient, action: str, request: Any, kind: Any, deadline: float
    ) -> Any:
        path = f"/v1/shards/{self.name}"
        if isinstance(request, messages.ReadCheckpoint):
            answer = driver.get_bytes(f"{path}/checkpoint", deadline)
        elif isinstance(request, messages.ShardCheckpoint):
            driver.put_json(f"{path}/checkpoint", msgspec.json.encode(request), deadline)
            answer = b""
        else:
            answer = driver.post_json(f"{path}:{action}", msgspec.json.encode(request), deadline)
        return msgspec.json.decode(answer, type=kind) if answer else None

    def _ask_own(self, request: Any) -> Any:
        """Return the answer of this process's own data sets; raise `UsageError` for a rejection."""
        wait = 0.0
        if isinstance(request, messages.NextRequest):
            request, wait = msgspec.structs.replace(request, wait=0.0), request.wait
        with self._lock:
            event = messages.ShardRequest(0, self.name, request)
            decisions = self._own.handle(event, time.monotonic())
        replies = [found for found in decisions if isinstance(found, Reply)]
        (answer,) = [found.document for found in replies if found.ticket == event.ticket]
        if isinstance(answer, Rejection):
            raise UsageError("; ".join(filter(None, (answer.message, answer.hint))))
        if isinstance(answer, messages.Wait):
            time.sleep(wait)  # only another thread can change anything meanwhile
        return answer
