"""A node's place in a job: it renews its lease, reads its orders, and reports to the driver.

The drivers of a job follow one another, and each has a *term* (`job/driver`). When one dies, the
node keeps its place for `driver_timeout`: to a driver with a higher term it says who it is, and
delivers the reports that nobody has taken. A driver with a lower term was replaced; it is ignored.
Times are seconds.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from elastic_driver import contract
from elastic_driver.words import joining as messages
from elastic_driver.words.joining import Joined, NodeOrder, NodeReport
from elastic_driver.words.orders import JobSpec, Reader, decode
from launcher.agent.driver_link import term_in
from rendezvous import errors
from rendezvous.client import RendezvousClient
from rendezvous.wire import MAX_WAIT_S, Entries, Entry, Get, Result, Set, Watch, Written, expect

SPEC_S = 2.0  # for the job's specification, which is there already
REPORT_S = 3.0  # for one attempt to deliver a report, if another driver may come
STRANGER_PAUSE_S = 0.2  # before the next question to a driver that was replaced
_NOTHING = Entry(b"", 0)
_decode_order = msgspec.json.Decoder(NodeOrder).decode
_decode_joined = msgspec.json.Decoder(Joined).decode


def send_report(
    client: RendezvousClient,
    report: NodeReport,
    deadline: float | None = None,
    wake: int | None = None,
) -> Joined:
    """Send a report to the driver; return its answer. Raises RendezvousError, DecodeError.

    Raises WokenError if `wake` becomes readable before.
    """
    body = msgspec.json.encode(report)
    return _decode_joined(client.post_json(messages.NODES_PATH, body, deadline, wake))


class Membership:
    """The place of a node that has joined; every method but `leave` may raise RendezvousError.

    Then the place is lost: the driver has given this node up, or no other one came in time.
    """

    def __init__(
        self,
        client: RendezvousClient,
        joined: Joined,
        offer: NodeReport,
        say: Callable[[str], None],
    ) -> None:
        self._client, self.joined, self._offer = client, joined, offer
        self.order = NodeOrder()  # the newest
        spec, driver = Get((contract.JOB_SPEC,), wait=SPEC_S), Get((contract.JOB_DRIVER,))
        found, drivers = (expect(result, Entries) for result in client.batch(spec, driver))
        self._reader = Reader(say)
        value = found.entries.get(contract.JOB_SPEC, _NOTHING).value
        as_spec: Callable[[bytes], JobSpec] = partial(decode, JobSpec)
        job = self._reader.read(as_spec, contract.JOB_SPEC, value) if value else None
        if job is None:
            raise errors.RendezvousError("it has no job")
        self.spec = job
        self._term = term_in(drivers, self._reader)
        self._reports: list[NodeReport] = []  # that no driver has taken
        self._seen = self._seen_driver = 0  # revisions

    @property
    def waits(self) -> bool:
        """True if this place outlives the driver."""
        return self.spec.driver_timeout > 0

    def await_order(self, wake: int) -> NodeOrder:
        """Renew the lease and wait for an order; return the newest one.

        It may be the one before: the wait has a bound, and ends if `wake` becomes readable.
        """
        self._deliver()
        patience, node = self._client.timeout, (self.joined.name, self._offer.session)
        key = messages.node_order(*node)
        lease = Set(messages.node_lease(*node), lease=self.joined.heartbeat_timeout)
        known = {key: self._seen, contract.JOB_DRIVER: self._seen_driver}
        watch = Watch(known, wait=min(MAX_WAIT_S, patience / 3))
        asked = lease, watch, Get((contract.JOB_DRIVER,)), Get((key,))
        try:
            results = self._client.batch(*asked, deadline=self._deadline, wake=wake)
            self._take_in(results, key, wake)
        except errors.WokenError:
            self._check_silence()
        return self.order

    def _take_in(self, results: Sequence[Result], key: str, wake: int) -> None:
        """Take the newest order under a key, or the same place with a driver of a higher term."""
        expect(results[0], Written)
        driver, found = expect(results[2], Entries), expect(results[3], Entries)
        term = term_in(driver, self._reader, self._term)
        if term < self._term:
            time.sleep(STRANGER_PAUSE_S)
        elif term > self._term:
            self._return_to(term, wake)
        else:
            self._seen_driver = driver.entries[contract.JOB_DRIVER].revision if term else 0
            if (entry := found.entries.get(key)) is not None:
                self._seen = entry.revision
                self.order = self._reader.read(_decode_order, key, entry.value) or self.order

    def report_end(self, incarnation: int, reason: str) -> None:
        """Report that an agent has ended; to the next driver, if this one is away."""
        self._reports.append(replace(self._offer, ended=incarnation, reason=reason))
        self._deliver()

    def leave(self, reason: str, deadline: float) -> None:
        """Tell the driver that this node leaves, if it answers in time."""
        with contextlib.suppress(errors.RendezvousError):
            send_report(self._client, replace(self._offer, leaves=True, reason=reason), deadline)

    @property
    def _deadline(self) -> float:
        return max(self._client.timeout, self.spec.driver_timeout)

    def _check_silence(self) -> None:
        since = self._client.silent_since
        if since is not None and (silence := time.monotonic() - since) > self._deadline:
            raise errors.UnreachableError(self._client.url, silence, "it is gone")

    def _deliver(self) -> None:
        while self._reports and not (self.waits and self._client.silent_since is not None):
            try:
                send_report(self._client, self._reports[0], REPORT_S if self.waits else None)
            except errors.UnreachableError:
                if not self.waits:
                    raise
                return
            except errors.RequestError as error:
                if not self.waits or error.code != messages.NOT_JOINED:
                    raise
                return  # another driver, to which this node has not said yet who it is
            del self._reports[0]

    def _return_to(self, term: int, wake: int) -> None:
        """Take the same place with a driver of a higher term, which may die meanwhile, too."""
        back = replace(self._offer, joined_as=self.joined.name)
        answer = send_report(self._client, back, self._deadline, wake)
        if answer.name != self.joined.name:
            raise errors.RendezvousError(f"this node has another name there, {answer.name}")
        self._term, self._seen, self._seen_driver = term, 0, 0
        self._deliver()
