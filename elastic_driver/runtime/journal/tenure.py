"""The key in etcd that says which driver has a run; at most one does.

The key hangs on a lease that a thread renews. When the driver's host loses power, the lease ends
and the key is gone: then a standby may take it, with the next term, `--driver-lease` seconds after
the last renewal at the latest.
Each write of a journal is guarded by the key, so a driver that has lost it writes nothing more, and
what is not written does not act.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from elastic_driver.errors import ClusterError, TakenOverError
from elastic_driver.runtime.journal import etcd
from elastic_driver.runtime.journal.etcd import EtcdClient, EtcdError, KeyValue
from rendezvous.wire import UNREADABLE

log = logging.getLogger(__name__)

LEASE_S = 5  # whole seconds, until another driver has the run
LEAST_S = 2  # etcd takes no shorter lease, with its default heartbeats
SWEEP_S = 1  # for etcd to delete the key of a lease that is over (0.5 s), and a standby to take it


@dataclass(frozen=True)
class RunKeys:
    """The keys of one run in etcd."""

    run_id: str

    @property
    def prefix(self) -> str:
        """The prefix of all keys of the run."""
        return f"/elastic/{self.run_id}/"

    @property
    def about(self) -> str:
        """The key of `mirror.About`: the run that the journal belongs to."""
        return f"{self.prefix}about"

    @property
    def driver(self) -> str:
        """The key that the driver has, on its lease: `DriverKey`."""
        return f"{self.prefix}driver"

    @property
    def token(self) -> str:
        """The key of the job's secret."""
        return f"{self.prefix}token"

    @property
    def tls(self) -> str:
        """The key of the run's own certificate and its key (PEM), if it has them."""
        return f"{self.prefix}tls"

    @property
    def end(self) -> str:
        """The key of `mirror.Ended`: the job is over."""
        return f"{self.prefix}end"

    @property
    def terms(self) -> str:
        """The prefix of the drivers that the run has had."""
        return f"{self.prefix}terms/"

    @property
    def events(self) -> str:
        """The prefix of the events, in batches."""
        return f"{self.prefix}events/"

    @property
    def snapshots(self) -> str:
        """The prefix of the snapshots."""
        return f"{self.prefix}snapshots/"

    @property
    def users(self) -> str:
        """The prefix of the keys that users have written to the driver's store."""
        return f"{self.prefix}users/"

    def term(self, number: int) -> str:
        """Return the key of a term."""
        return f"{self.terms}{number:010d}"

    def events_after(self, n: int) -> str:
        """Return the first possible key of a batch whose last event comes after event `n`."""
        return f"{self.events}{n + 1:020d}/"

    def snapshots_after(self, n: int) -> str:
        """Return the first possible key of a snapshot after a later event than `n`."""
        return f"{self.snapshots}{n + 1:020d}/"


class DriverKey(Struct, frozen=True):
    """The value of the key `driver`, and of the key of its term."""

    term: int
    host: str
    pid: int
    n: int = 0  # the number of the last event before this driver
    at: float = 0.0  # machine time of its beginning
    unix: float = 0.0  # the same in unix seconds
    unix_offset: float = 0.0  # unix seconds minus machine time
    url: str = ""  # the address of its rendezvous, once it is open
    seen: str = ""  # the same as the hosts of etcd see it; "": unknown

    def __str__(self) -> str:
        return f"driver {self.term} (host {self.host}, process {self.pid})"


def encode_key(found: DriverKey) -> bytes:
    """Return the value of the key."""
    return msgspec.json.encode(found)


def decode_key(found: KeyValue) -> DriverKey:
    """Return the driver of a key; raises EtcdError for something else."""
    try:
        return msgspec.json.decode(found.value, type=DriverKey)
    except UNREADABLE as error:
        raise EtcdError(f"the key {found.key.decode()} in etcd is not of this version") from error


class Tenure:
    """The key `driver` of a run in the hands of this process, from `take` to `stop`."""

    def __init__(self, client: EtcdClient, run_id: str, own: DriverKey, lease_s: int) -> None:
        """Take nothing yet. `lease_s`: seconds until a standby has the run of a dead driver."""
        self.keys, self.own = RunKeys(run_id), own
        self._client = client.clone()  # of whoever holds `_lock`
        self._lease_s = max(LEAST_S, lease_s - SWEEP_S)  # of etcd
        self._lock = threading.Lock()
        self._lease = self._created = self._term_created = 0  # guarded by `_lock`
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, *fresh: etcd.Operation) -> None:
        """Become the driver with the next term; raises `TakenOverError` if another one has it.

        `fresh` are operations for a run that begins anew: they are carried out with it.
        """
        with self._lock:
            self._grant()
            term = self.keys.term(self.own.term)
            value = encode_key(self.own)
            answer = self._client.transact(
                [etcd.is_missing(self.keys.driver), *([] if fresh else [etcd.is_missing(term)])],
                [*fresh, etcd.put(term, value), etcd.put(self.keys.driver, value, self._lease)],
                [etcd.find(self.keys.driver), etcd.find(term)],
            )
            if answer.succeeded:
                self._created = self._term_created = answer.revision
                return
            self._check_is_ours(answer)
            # An earlier attempt without an answer has done it: both keys are of that revision.
            self._term_created = self._created

    def guard(self) -> etcd.Compare:
        """Return what a transaction compares, so that it is carried out by the driver alone."""
        with self._lock:
            return etcd.was_created(self.keys.driver, self._created)

    def regain(self) -> None:
        """Take the key again after the lease was lost, if nobody else has done so.

        Raises `TakenOverError` if another driver has the run, EtcdError if etcd does not answer.
        """
        term = self.keys.term(self.own.term)
        later = self.keys.term(self.own.term + 1)
        with self._lock:
            (found, *_) = self._client.range(self.keys.driver) or (None,)
            if found is not None and found.create_revision == self._created:
                return
            self._grant()
            answer = self._client.transact(
                [
                    etcd.is_missing(self.keys.driver),
                    etcd.was_created(term, self._term_created),
                    etcd.is_missing(later),
                ],
                [etcd.put(self.keys.driver, encode_key(self.own), self._lease)],
                [etcd.find(self.keys.driver), etcd.find(later)],
            )
            if answer.succeeded:
                self._created = answer.revision
            else:
                self._check_is_ours(answer)

    def say(self, **changed: Any) -> list[etcd.Operation]:
        """Return the operations that change what others read of this driver, such as its URL."""
        self.own = msgspec.structs.replace(self.own, **changed)
        value = encode_key(self.own)
        with self._lock:
            mine = etcd.put(self.keys.driver, value, self._lease)
        return [etcd.put(self.keys.term(self.own.term), value), mine]

    # ---- the lease -----------------------------------------------------------------------

    def start(self, on_taken_over: Callable[[TakenOverError], None]) -> None:
        """Keep the key from now on; `on_taken_over` is called once, by a thread, if it is lost."""
        client = self._client.clone(timeout=self._lease_s / 2)
        self._thread = threading.Thread(
            target=self._keep, args=(client, on_taken_over), name="etcd-lease", daemon=True
        )
        self._thread.start()

    def stop(self, *, release: bool) -> None:
        """Renew the lease no more; `release` also ends it, so that the key is gone at once.

        Idempotent.
        """
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._lease_s)
        with self._lock:
            if release and self._lease:
                lease, self._lease = self._lease, 0
                self._client.revoke(lease)
            self._client.close()

    def _keep(self, client: EtcdClient, on_taken_over: Callable[[TakenOverError], None]) -> None:
        with client:
            while not self._stopping.wait(self._lease_s / 3):
                try:
                    with self._lock:
                        lease = self._lease
                    if not client.keep_alive(lease):
                        self.regain()
                except TakenOverError as error:
                    on_taken_over(error)
                    return
                except ClusterError:
                    pass  # etcd does not answer: the writer says so, and this thread asks again
                except Exception:
                    log.exception("the lease in etcd could not be renewed; it is tried again")

    def _grant(self) -> None:
        """Get a lease; the caller holds `_lock`."""
        self._lease = self._client.grant(self._lease_s)

    def _check_is_ours(self, answer: etcd.TxnAnswer) -> None:
        """Note the key that an attempt without an answer has made; raise if it is another's."""
        (found,) = answer.found(0) or (None,)
        if found is not None and found.lease == self._lease:
            self._created = found.create_revision
            return
        (other,) = answer.found(0) or answer.found(1) or (None,)
        who = "another driver" if other is None else str(decode_key(other))
        raise TakenOverError(f"{who} goes on with this run; driver {self.own.term} ends")


def new_key(term: int, n: int, at: float) -> DriverKey:
    """Return the key of this process as the driver of a term, which goes on after event `n`."""
    now = time.time()
    return DriverKey(term, os.uname().nodename, os.getpid(), n, at, now, now - at)
