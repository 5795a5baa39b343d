"""The open connections of one server: how many there may be, and how long each may take.

A connection without an authorized request so far is one of a few, and has little time. If too many
come, the oldest one of the peer with the most goes; if descriptors become scarce, one that rests
goes too, and if none does, one of the client with the most. A client whose connection was closed
connects again, and repeats the request if it had sent one.

Everything runs on the server's loop. Times are seconds.
"""

import asyncio
import hmac
from collections import Counter
from collections.abc import Hashable
from typing import TypeVar

from rendezvous.auth import Caller, Role, Tokens
from rendezvous.limits import Hits, Limits, reserve_of
from rendezvous.shares import Shares, open_to, share_of

SWEEP_S = 1.0
YOUNG_S = 0.2  # a connection has this long before it may be closed to make room for another one
IDLE_S = 600.0  # without a request; then the client has to connect again
_LOOKS = 64  # at connections, to find one that rests
K = TypeVar("K", bound=Hashable)
FEW = 8  # connections of one client, all of which it keeps while others have more


class Client:
    """The state of one connection; the protocols that serve it keep it up to date."""

    __slots__ = (
        *("_known", "begun", "busy", "caller", "has_head", "held", "moved", "patience"),
        *("peer", "stuck", "transport"),
    )

    def __init__(self, now: float, peer: str = "") -> None:
        self.peer = peer  # see `peers`
        self.patience = 0.0  # more time until its first request, for a handshake
        self.transport: asyncio.WriteTransport | None = None  # of the socket, once there is one
        self.caller: Caller | None = None  # the owner of its first authorized request
        self.moved = now  # when bytes last came or went
        self.begun = 0.0  # since when a request arrives that is not whole yet; 0: none does
        self.has_head = False  # the head of that request has arrived
        self.busy = False  # it waits for an answer
        self.stuck = False  # it has not taken all that was written
        self.held = 0  # bytes of the requests that have arrived and are not carried out
        self._known: tuple[bytes, Caller] | None = None  # the header last checked, and its owner

    def identify(self, tokens: Tokens, header: str | None) -> Caller | None:
        """Return the owner of a token; the proof of the last one is not calculated again."""
        given = (header or "").encode(errors="surrogatepass")
        if self._known is not None and hmac.compare_digest(self._known[0], given):
            return self._known[1]
        caller = tokens.identify(header)
        self._known = None if caller is None else (given, caller)
        return caller

    def abort(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()


class Connections:
    """All connections of one server; create it on a running loop.

    `files`: how many descriptors the process may have; `used`: how many it has now. `handshake`:
    the time that each connection has before its first request is awaited.
    """

    def __init__(
        self, limits: Limits, hits: Hits, files: int, used: int, handshake: float = 0.0
    ) -> None:
        self.limits, self.hits = limits, hits
        self.loop = asyncio.get_running_loop()
        self._highest = files - reserve_of(files, limits)  # the first descriptor not for clients
        self._most = max(1, self._highest - used)
        self._most_unproven = min(limits.unproven, max(1, self._most // 4))
        self._handshake = handshake
        self._unproven: dict[Client, float] = {}  # since when; the oldest first
        self._of_peer: dict[str, dict[Client, None]] = {}  # the same, by peer
        self._proven: dict[Client, None] = {}  # about in the order of their last requests
        self._of_caller: dict[Caller, dict[Client, None]] = {}  # the same, by client
        self._arriving = Shares(limits.arriving_bytes)
        self._leaving: dict[int, tuple[int, int]] = {}  # id of an answer → readers, bytes
        self._leaving_bytes = 0
        self._leaving_to: Counter[Caller | None] = Counter()  # bytes, each answer for each reader
        self._sweep = self.loop.call_later(SWEEP_S, self._end_late)

    def close(self) -> None:
        """Stop to look after connections."""
        self._sweep.cancel()

    # ---- how many ------------------------------------------------------------------------

    def opened(self, peer: str = "") -> Client:
        """Record a new connection of a peer (see `peers`)."""
        now = self.loop.time()
        client = Client(now, peer)
        client.patience = self._handshake
        self._unproven[client] = now
        self._of_peer.setdefault(peer, {})[client] = None
        return client

    def shakes_hands(self, client: Client, patience: float) -> None:
        """Record that a handshake has begun: the connection has this much more time."""
        client.patience = patience

    def closed(self, client: Client) -> None:
        """Record that a connection has ended; may be called again."""
        self._forget_unproven(client)
        if client in self._proven:
            del self._proven[client]
            self._release(client)
        self.hold(client, 0)

    def _forget_unproven(self, client: Client) -> None:
        if self._unproven.pop(client, None) is not None:
            _remove(self._of_peer, client.peer, client)

    def prove(self, client: Client, caller: Caller) -> bool:
        """Record an authorized request; return False if its caller has too many connections."""
        if client.caller is None:
            own = self._of_caller.setdefault(caller, {})
            if len(own) >= self.limits.of_one_caller and caller.role is not Role.DRIVER:
                self.hits.count("caller")
                return False
            own[client] = None
            self.hold(client, 0)  # as a stranger's; what follows is its own
            client.caller = caller
            self._forget_unproven(client)
            self._proven[client] = None
        return True

    def _release(self, client: Client) -> None:
        if client.caller is not None:
            _remove(self._of_caller, client.caller, client)

    def may_open(self) -> bool:
        """Return whether one more client may connect; close an older one for it if need be."""
        if len(self._unproven) < self._most_unproven:
            return True
        if self._oldest_unproven() is None:
            return False  # try again in a moment
        self.hits.count("unproven")
        return self._close_oldest_unproven()

    def has_room(self, descriptor: int) -> bool:
        """Return whether a connection with this descriptor leaves the driver's reserve alone.

        The system gives the lowest number that is free, so the number says how many are in use.
        """
        many = len(self._unproven) + len(self._proven)
        return many < self._most and descriptor < self._highest

    def make_room(self) -> bool:
        """Free a descriptor: close the connection that is needed least; False: there is none."""
        self.hits.count("files")
        return self._close_oldest_unproven() or self._close_resting() or self._close_of_greediest()

    def _oldest_unproven(self) -> Client | None:
        """Return the oldest unproven connection of the peer with the most, unless it is young.

        So a peer that connects without end closes its own connections. Handshakes have more time
        only while there is no other peer that waits.
        """
        most = max(self._of_peer.values(), key=len, default={})
        client = next(iter(most), None)
        if client is None:
            return None
        patience = client.patience if len(self._of_peer) == 1 else 0.0
        young = self.loop.time() - self._unproven[client] < YOUNG_S + patience
        return None if young else client

    def _close_oldest_unproven(self) -> bool:
        client = self._oldest_unproven()
        if client is not None:
            self._forget_unproven(client)
            client.abort()
        return client is not None

    def _close_of_greediest(self) -> bool:
        """Close a connection of the client with the most, if these are not few."""
        others = (own for caller, own in self._of_caller.items() if caller.role is not Role.DRIVER)
        most = max(others, key=len, default={})
        if len(most) <= FEW:
            return False
        client = next((each for each in most if not each.busy), next(iter(most)))
        self.closed(client)
        client.abort()
        return True

    def _close_resting(self) -> bool:
        """Close a connection that rests, if there is one among the next few."""
        now = self.loop.time()
        for _ in range(min(_LOOKS, len(self._proven))):
            client = next(iter(self._proven))
            if client.busy or now - client.moved < YOUNG_S:
                self._proven[client] = self._proven.pop(client)  # its turn comes again
            else:
                self.closed(client)
                client.abort()
                return True
        return False

    # ---- how much ------------------------------------------------------------------------

    def hold(self, client: Client, size: int) -> bool:
        """Record that so many bytes of a client's requests are kept; False: that is too much."""
        more = size - client.held
        if more > 0 and not self._arriving.take(client.caller, more):
            self.hits.count("arriving")
            return False
        if more < 0:
            self._arriving.give_back(client.caller, -more)
        client.held = size
        return True

    def begin_leaving(self, answer: bytes, caller: Caller | None) -> bool:
        """Record that a large answer is kept until one more client has taken it.

        `end_leaving` follows. False: it may not be kept, there are too many.
        """
        room = self.limits.leaving_bytes
        readers, size = self._leaving.get(id(answer), (0, len(answer)))
        new = 0 if readers else size  # others get the same bytes
        own, share = self._leaving_to[caller], share_of(caller, room)
        fits = not own or share == room or own + size <= share
        if not fits or self._leaving_bytes + new > open_to(caller, room):
            self.hits.count("leaving")
            return False
        self._leaving[id(answer)] = readers + 1, size
        self._leaving_bytes += new
        self._leaving_to[caller] += size
        return True

    def end_leaving(self, answer: bytes, caller: Caller | None) -> None:
        """Record that a client has taken an answer, or has gone."""
        readers, size = self._leaving.pop(id(answer))
        self._leaving_to[caller] -= size
        if not self._leaving_to[caller]:
            del self._leaving_to[caller]
        if readers > 1:
            self._leaving[id(answer)] = readers - 1, size
        else:
            self._leaving_bytes -= size

    # ---- how long ------------------------------------------------------------------------

    def _end_late(self) -> None:
        """Cut off clients that take too long, and close idle connections."""
        now = self.loop.time()
        for client, since in tuple(self._unproven.items()):
            if now - since > self.limits.unproven_s + client.patience:
                self._forget_unproven(client)
                self.hits.count("unproven_time")
                client.abort()
        for client in (*self._unproven, *self._proven):
            self._end_if_late(client, now)
        self._sweep = self.loop.call_later(SWEEP_S, self._end_late)

    def _end_if_late(self, client: Client, now: float) -> None:
        limits, still = self.limits, now - client.moved
        for_request = limits.body_s if client.has_head else limits.head_s
        if client.begun and now - client.begun > for_request:
            self.hits.count("request_time")
            client.abort()
        elif client.stuck and still > limits.stuck_s:
            self.hits.count("answer_time")
            client.abort()
        elif not client.busy and not client.stuck and still > IDLE_S:
            client.abort()


def _remove(table: dict[K, dict[Client, None]], key: K, client: Client) -> None:
    """Take a client out of a table of clients by key."""
    clients = table.get(key, {})
    clients.pop(client, None)
    if not clients:
        table.pop(key, None)
