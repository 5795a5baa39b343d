"""Sessions of browsers: two secrets in place of a token, and codes that may be used once.

A session begins with a token or with a code, and has the role of an operator or a reader, never
more. One secret is in the browser's cookie. Cookies know no ports: a browser sends it to every
server of the same host name, other users' too. So the other secret, the *key*, is known to the page
alone, which keeps it for its own origin and sends it in a header (`HEADER`) with each request. A
request without both has no session, whatever it asks for; other sites and other servers' pages can
send no such header.

Tabs of a browser share the cookie and have a key each. The server keeps only digests. Sessions are
in memory: the next driver of a job knows none of them. Only the server's thread uses this. Times
are monotonic seconds.
"""

import hashlib
import hmac
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
    peer: str  # who has asked for it (`peers`)
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

        `peer`: who has connected (`peers`).
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
