"""Sessions of browsers: a cookie in place of a token, and codes that may be used once.

A session begins with a token or with a code, and has the role of an operator or a reader, never
more. Its secret is in the browser's cookie; the server keeps only a digest of it. A request by
cookie that changes something needs a header too (`HEADER`), which other sites cannot send. Sessions
are in memory: the next driver of a job knows none of them. Only the server's thread uses this.
Times are monotonic seconds.
"""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from rendezvous.auth import Caller, Role

HEADER = "X-Elastic"  # its value does not matter
MOST_SESSIONS = 256  # of each role; the oldest is forgotten
MOST_CODES = 64
CODE_S = 300.0  # until a code is void
SESSION_S = 12 * 3600.0  # from the login
_MAX_SECRET_CHARS = 64
_SAFE = ("GET", "HEAD")
# The role of a session, by that of the token with which it began; others have none.
_ROLES = {Role.DRIVER: Role.OPERATOR, Role.OPERATOR: Role.OPERATOR, Role.READER: Role.READER}


class _Session(NamedTuple):
    """A session or a code."""

    caller: Caller
    until: float


_Known: TypeAlias = OrderedDict[bytes, _Session]


class Sessions:
    """The sessions and codes of one server."""

    def __init__(self) -> None:
        # Cookies know no ports: two drivers of one machine need two names.
        self.cookie = f"elastic_{secrets.token_hex(4)}"
        # By digest, the oldest use first. Readers push out no operator, and the other way round.
        roles = set(_ROLES.values())
        self._sessions: dict[Role, _Known] = {role: OrderedDict() for role in roles}
        self._codes: dict[Role, _Known] = {role: OrderedDict() for role in roles}

    def begin(self, caller: Caller, now: float) -> tuple[str, Caller] | None:
        """Return the secret of a new session and its caller; None: this role has no sessions."""
        owner = _owner(caller)
        if owner is None:
            return None
        secret = secrets.token_urlsafe(32)
        _keep(self._sessions[owner.role], secret, _Session(owner, now + SESSION_S), MOST_SESSIONS)
        return secret, owner

    def make_code(self, caller: Caller, now: float) -> str | None:
        """Return a code with which one session may begin; None: this role has no sessions."""
        owner = _owner(caller)
        if owner is None:
            return None
        code = secrets.token_urlsafe(16)
        _keep(self._codes[owner.role], code, _Session(owner, now + CODE_S), MOST_CODES)
        return code

    def redeem(self, code: str, now: float) -> Caller | None:
        """Return the caller of a code, once; None: there is no such code any more."""
        digest = _digest(code)
        found = [codes.pop(digest) for codes in self._codes.values() if digest in codes]
        return found[0].caller if found and now < found[0].until else None

    def caller(self, cookies: Mapping[str, str], now: float) -> Caller | None:
        """Return the caller of a request's session; None: it has none."""
        secret = cookies.get(self.cookie, "")
        if not 0 < len(secret) <= _MAX_SECRET_CHARS:
            return None
        digest = _digest(secret)
        for known in self._sessions.values():
            if (found := known.get(digest)) is None:
                continue
            if now < found.until:
                known.move_to_end(digest)
                return found.caller
            del known[digest]
        return None

    def end(self, cookies: Mapping[str, str]) -> None:
        """Forget a request's session."""
        for known in self._sessions.values():
            known.pop(_digest(cookies.get(self.cookie, "")), None)


def may_act(method: str, headers: Mapping[str, str]) -> bool:
    """Return whether a request by cookie is from our page, or changes nothing."""
    return method in _SAFE or HEADER in headers


def _owner(caller: Caller) -> Caller | None:
    role = _ROLES.get(caller.role)
    return None if role is None else Caller(role, "")


def _keep(known: _Known, secret: str, session: _Session, most: int) -> None:
    known[_digest(secret)] = session
    while len(known) > most:
        known.popitem(last=False)


def _digest(secret: str) -> bytes:
    """Return what is kept of a secret: finding it takes the same time, however much is right."""
    return hashlib.sha256(secret.encode(errors="replace")).digest()
