"""Requests that tokens do not allow: counted, slowed for each peer, and reported once.

A peer is an address, and on this machine a user (`peers`). Its first few requests without a good
token are answered at once, each later one after a longer pause, and few may wait at the same time:
the connections of the others are cut off. Requests with a good token are never slowed, whatever
else comes from their peer. Only the server's thread uses this. Times are seconds.
"""

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass

from rendezvous.auth import Caller

log = logging.getLogger(__name__)

FREE = 5  # requests without a good token that are answered at once
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0  # shorter than clients wait: one with the token of an old run hears so
MOST_PAUSED = 16  # requests of one peer that wait for their answer
FORGET_S = 600.0  # a peer of which nothing bad is heard for so long is new
MOST_PEERS = 4096
MOST_CALLERS = 4096  # whose first forbidden request is reported
OF_CONNECTION = 3  # requests without a good token, before a connection is closed


@dataclass
class _Peer:
    """The requests of one address that had no good token."""

    last: float  # monotonic
    count: int = 0
    paused: int = 0


class Refusals:
    """The requests that a server has refused because of their tokens."""

    def __init__(self) -> None:
        self._counts = Counter({"unauthorized": 0, "forbidden": 0})
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # the least recent first
        self._callers: set[Caller] = set()

    def snapshot(self) -> dict[str, int]:
        """Return how many requests were refused, by the code of the answer; for any thread."""
        return dict(self._counts)

    def forbidden(self, caller: Caller, sentence: str) -> None:
        """Record a request to which its token gives no right."""
        self._counts["forbidden"] += 1
        if caller not in self._callers and len(self._callers) < MOST_CALLERS:
            self._callers.add(caller)
            who = f"{caller.role.value} {caller.subject}".strip()
            log.warning("a request of %s was refused: %s (told once)", who, sentence)

    def unauthorized(self, address: str, now: float) -> float | None:
        """Record a request without a good token; return the pause before its answer.

        None: cut its connection off. After a pause, `answered` has to be called.
        """
        self._counts["unauthorized"] += 1
        peer = self._peer(address, now)
        peer.count, peer.last = peer.count + 1, now
        if peer.count == 1:
            log.warning(
                "a request from %s had no token of this job, and was refused (told once); is it "
                "a program of an earlier run?",
                address,
            )
        if peer.count <= FREE:
            return 0.0
        if peer.paused >= MOST_PAUSED:
            return None
        peer.paused += 1
        return min(FIRST_PAUSE_S * 2.0 ** min(peer.count - FREE - 1, 16), LONGEST_PAUSE_S)

    def answered(self, address: str) -> None:
        """Record that a request was answered after its pause, or that its client has gone."""
        if (peer := self._peers.get(address)) is not None:
            peer.paused = max(0, peer.paused - 1)

    def _peer(self, address: str, now: float) -> _Peer:
        peer = self._peers.get(address)
        if peer is None or (now - peer.last > FORGET_S and not peer.paused):
            peer = self._peers[address] = _Peer(now)
        self._peers.move_to_end(address)
        while len(self._peers) > MOST_PEERS:
            self._peers.popitem(last=False)
        return peer
