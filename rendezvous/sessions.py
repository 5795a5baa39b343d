"""Requests without a good token: those of a browser's session, and those that are refused.

A session has two secrets in place of a token, and begins with a token or with a code, which may be
used once. It has the role of an operator or a reader, never more. One secret is in the browser's
cookie. Cookies know no ports: a browser sends it to every server of the same host name, other
users' too. So the other secret, the *key*, is known to the page alone, which keeps it for its own
origin and sends it in a header (`HEADER`) with each request. A request without both has no session,
whatever it asks for; other sites and other servers' pages can send no such header. Tabs of a
browser share the cookie and have a key each. The server keeps only digests. Sessions are in memory:
the next driver of a job knows none of them.

Requests that tokens do not allow are counted, slowed for each peer, and reported once (`Refusals`).
A peer is an address, and on this machine a user (`fairness.Peers`). Its first few requests without
a good token are answered at once, each later one after a longer pause, and few may wait at the same
time: the connections of the others are cut off. Requests with a good token are never slowed,
whatever else comes from their peer.

Only the server's thread uses this. Times are monotonic seconds.
"""

import hashlib
import hmac
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, TypeAlias

from rendezvous.auth import Caller, Role

HEADER = "X-Elastic"  # its value is the key; any value shows that a login is sent by our page
# Of each role; a quarter of one peer, whose oldest is forgotten, else that of the peer with most.
MOST_SESSIONS = 1024
MOST_CODES = 256
CODE_S = 300.0  # until a code is void
SESSION_S = 12 * 3600.0  # from the login
_MAX_SECRET_CHARS = 64
# The role of a session, by that of the token with which it began; others have none.
_ROLES = {Role.DRIVER: Role.OPERATOR, Role.OPERATOR: Role.OPERATOR, Role.READER: Role.READER}


@dataclass(eq=False)
class Session:
    """A session, or a code, which has no browser yet.

    `cuts` are called when it ends: each breaks off a request that is being answered.
    """

    caller: Caller
    until: float
    peer: str  # who has asked for it (`fairness.Peers`)
    browser: bytes = b""  # digest of the cookie
    cuts: set[Callable[[], object]] = field(default_factory=set)


class Begun(NamedTuple):
    """What a login gives: the values of cookie and header, and the caller that they stand for."""

    cookie: str
    key: str
    caller: Caller


_Known: TypeAlias = OrderedDict[bytes, Session]


class Sessions:
    """The sessions and codes of one server."""

    def __init__(self) -> None:
        # Two drivers of one machine need two names.
        self.cookie = f"elastic_{secrets.token_hex(4)}"
        # By digest of the key, the oldest use first. Readers push out no operator, nor the other
        # way round.
        roles = set(_ROLES.values())
        self._sessions: dict[Role, _Known] = {role: OrderedDict() for role in roles}
        self._codes: dict[Role, _Known] = {role: OrderedDict() for role in roles}
        self._numbers = count(1)

    def begin(
        self, caller: Caller, cookies: Mapping[str, str], now: float, peer: str = ""
    ) -> Begun | None:
        """Return a new session of a browser with these cookies; None: this role has none.

        `peer`: who has connected (`fairness.Peers`).
        """
        role = _ROLES.get(caller.role)
        if role is None:
            return None
        cookie = cookies.get(self.cookie, "")
        if not any(now < known.until for known in self._of_browser(_digest(cookie))):
            cookie = secrets.token_urlsafe(32)
        key = secrets.token_urlsafe(32)
        owner = Caller(role, f"page {next(self._numbers)}")  # a client of its own
        session = Session(owner, now + SESSION_S, peer, _digest(cookie))
        _keep(self._sessions[role], key, session, MOST_SESSIONS)
        return Begun(cookie, key, owner)

    def make_code(self, caller: Caller, now: float, peer: str = "") -> str | None:
        """Return a code with which one session may begin; None: this role has no sessions.

        `peer`: as for `begin`.
        """
        role = _ROLES.get(caller.role)
        if role is None:
            return None
        code = secrets.token_urlsafe(16)
        session = Session(Caller(role), now + CODE_S, peer)
        _keep(self._codes[role], code, session, MOST_CODES)
        return code

    def redeem(self, code: str, now: float) -> Caller | None:
        """Return the caller of a code, once; None: there is no such code any more."""
        digest = _digest(code)
        found = [codes.pop(digest) for codes in self._codes.values() if digest in codes]
        return found[0].caller if found and now < found[0].until else None

    def find(self, cookies: Mapping[str, str], key: str, now: float) -> Session | None:
        """Return the session of a request with these cookies and this key; None: it has none."""
        cookie = cookies.get(self.cookie, "")
        if not (0 < len(key) <= _MAX_SECRET_CHARS and 0 < len(cookie) <= _MAX_SECRET_CHARS):
            return None
        digest, browser = _digest(key), _digest(cookie)
        for known in self._sessions.values():
            found = known.get(digest)
            if found is None or not hmac.compare_digest(found.browser, browser):
                continue
            if now < found.until:
                known.move_to_end(digest)
                return found
            _cut(known.pop(digest))
        return None

    def end(self, session: Session) -> None:
        """Forget a session and the others of its browser, and break off their requests."""
        for known in self._sessions.values():
            for digest in [key for key, each in known.items() if each.browser == session.browser]:
                _cut(known.pop(digest))

    def _of_browser(self, browser: bytes) -> list[Session]:
        every = (each for known in self._sessions.values() for each in known.values())
        return [each for each in every if hmac.compare_digest(each.browser, browser)]


def _keep(known: _Known, secret: str, session: Session, most: int) -> None:
    known[_digest(secret)] = session
    peers = Counter(each.peer for each in known.values())
    if peers[session.peer] <= most // 4:
        if len(known) <= most:
            return
        session = next(each for each in known.values() if each.peer == peers.most_common(1)[0][0])
    oldest = next(key for key, each in known.items() if each.peer == session.peer)
    _cut(known.pop(oldest))


def _cut(session: Session) -> None:
    """Break off the requests of a session that is over."""
    for cut in tuple(session.cuts):
        cut()


def _digest(secret: str) -> bytes:
    """Return what is kept of a secret: finding it takes the same time, however much is right."""
    return hashlib.sha256(secret.encode(errors="replace")).digest()


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
