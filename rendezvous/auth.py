"""The tokens of a server: one for each who takes part, all derived from the driver's token.

The driver, who starts the server, makes its own token, which may do everything. The others say the
role and the subject of their owner and carry a proof, `reader::<hmac>`: an HMAC-SHA256 that nobody
can make without the token it is derived from, and that does not give that token away. The owner of
a token may so make tokens of a role below its own (`Role.key`). The server checks them all with the
driver's token alone (`Tokens`). So a driver that takes the place of another one knows the tokens
that the driver before it has given out. `rendezvous.access` says what each role may do.

A token is kept in a file that only its owner may read, whose path others are told, and clients send
it with every request as `Authorization: Bearer <token>`. It never goes into an argument list, an
environment variable or a log. The second line of the file tells clients how they know the server's
certificate (`rendezvous.tls`); without one the server speaks plain HTTP.

A *mutual proof* of a shared secret comes before anything else is said with one who has no token
yet. A node sends a nonce. The server answers with a nonce of its own and one proof for each secret
that it takes. The node compares them, and answers with its own proof only if the server has proved
a secret that the node knows, too. This is the three-pass mutual authentication of ISO/IEC 9798-4.
A proof is HMAC-SHA256, with the secret as its key, over the role of its speaker, both nonces and
the fingerprint of the server's certificate as the speaker sees it. So neither side shows the
secret; a recorded proof is worth nothing, as the next nonces differ; and a program in the middle,
which has another certificate, cannot pass proofs on (RFC 5929 calls this channel binding). The
secret has to be too long to be guessed: whoever speaks with the server can test guesses.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar, NamedTuple

from rendezvous.errors import TokenError
from rendezvous.limits import Limits
from rendezvous.own_files import open_own, write_own

AUTHORIZATION = "Authorization"
MAX_FINGERPRINT_CHARS = 60_000  # the text of a site's CA
MAX_FILE_BYTES = 64 * 1024
_MAX_TOKEN_CHARS = 1024


@dataclass(frozen=True, eq=False)
class Role:
    """The part that the owner of a token has; each is one object.

    A server knows the three below, and those that its table of rights brings. `value` is the name
    that stands in tokens. `key(driver_token, subject)` returns the token or secret from which those
    of this role are derived: by default the driver's token itself. The clients of a `crowd` leave
    an eighth of the store to all others.
    """

    value: str
    key: Callable[[str, str], str] = lambda driver_token, _subject: driver_token
    has_subject: bool = False  # a token without the name of its owner is none
    crowd: bool = False

    DRIVER: ClassVar["Role"]  # who has started the server: it may do everything
    OPERATOR: ClassVar["Role"]  # people and programs that steer
    READER: ClassVar["Role"]  # people and programs that only look


Role.DRIVER = Role("driver")
Role.OPERATOR, Role.READER = Role("operator"), Role("reader")


class Caller(NamedTuple):
    """The owner of a token: its role, and its name.

    What a name says depends on the role. A session of a browser has a number, "page 3".
    """

    role: Role
    subject: str = ""

    def own_id(self, request_id: str) -> str:
        """Return the id of a request among those of all callers; "" for a request without one."""
        return request_id and f"{self.role.value}/{self.subject} {request_id}"


DRIVER = Caller(Role.DRIVER)


# ---- tokens ------------------------------------------------------------------------------


def make_token() -> str:
    """Return a new random token of 256 bits, made of characters that fit into a header."""
    return secrets.token_urlsafe(32)


def operator_token(driver_token: str) -> str:
    """Return the token of people and programs that steer."""
    return derived_token(driver_token, Role.OPERATOR)


def reader_token(driver_token: str) -> str:
    """Return the token of people and programs that only look."""
    return derived_token(driver_token, Role.READER)


def derived_token(key: str, role: Role, subject: str = "") -> str:
    """Return the token of a role and the name of its owner; `key`: what it is derived from."""
    stated = f"{role.value}:{subject}"
    return f"{stated}:{hmac.digest(key.encode(), stated.encode(), 'sha256').hex()}"


class Tokens:
    """The tokens that a server takes: the driver's, those derived from it, and `others`.

    `others` are secrets with the role that each gives; `roles`: the roles beside operator and
    reader.
    """

    def __init__(
        self,
        driver_token: str,
        others: Mapping[str, Role] | None = None,
        roles: Iterable[Role] = (),
    ) -> None:
        self._driver_token = driver_token
        self._derived = {role.value: role for role in (Role.OPERATOR, Role.READER, *roles)}
        whole = {driver_token: Role.DRIVER, **(others or {})}
        self._whole = tuple((token.encode(), Caller(role)) for token, role in whole.items())

    def identify(self, header: str | None) -> Caller | None:
        """Return the owner of the token in an Authorization header; None: it is not known.

        Tokens are compared in constant time, so that the time taken tells nothing.
        """
        scheme, _, given = (header or "").partition(" ")
        token = given.strip()
        if scheme.lower() != "bearer" or not token.isascii() or len(token) > _MAX_TOKEN_CHARS:
            return None
        found = token.encode()
        known = [owner for whole, owner in self._whole if hmac.compare_digest(found, whole)]
        if known:
            return known[0]
        name, _, rest = token.partition(":")
        subject = rest.rpartition(":")[0]
        role = self._derived.get(name)
        if role is None or (role.has_subject and not subject):
            return None
        key = role.key(self._driver_token, subject)
        genuine = hmac.compare_digest(found, derived_token(key, role, subject).encode())
        return Caller(role, subject) if genuine else None


def bearer(token: str) -> str:
    """Return the value of the Authorization header for this token."""
    return f"Bearer {token}"


# ---- files -------------------------------------------------------------------------------


class Credentials(NamedTuple):
    """A token, and the knowledge of the server's certificate."""

    token: str
    fingerprint: str = ""  # how it knows the server's certificate; "": plain HTTP

    @property
    def text(self) -> str:
        """The lines of a token file."""
        return "".join(f"{line}\n" for line in self if line)


def parse_credentials(text: str) -> Credentials:
    """Return the credentials in the lines of a token file."""
    token, _, rest = text.strip().partition("\n")
    return Credentials(token.strip(), rest.strip())


def write_token_file(path: str | os.PathLike[str], token: str, fingerprint: str = "") -> Path:
    """Write the token to `path` as `write_private` does; return the path.

    `fingerprint`: see `Credentials`.
    """
    return write_private(path, Credentials(token, fingerprint).text or "\n")


def write_private(path: str | os.PathLike[str], text: str) -> Path:
    """Write ASCII to `path` with mode 0600, as a whole or not at all; return the path.

    Raises TokenError if the file cannot be written.
    """
    try:
        return write_own(path, text.encode("ascii"))
    except OSError as error:
        raise TokenError(
            f"cannot write the token file {path}: {error.strerror}; choose a directory "
            "this user may write to"
        ) from error


def read_token_file(path: str | os.PathLike[str]) -> str:
    """Return the token in `path`; raises as `read_credentials` does."""
    return read_credentials(path).token


def read_credentials(path: str | os.PathLike[str]) -> Credentials:
    """Return the token in `path`, and how the server's certificate is known.

    Raises TokenError if the file is missing or empty, belongs to another user, or may be read
    or written by group or others: a token that others know protects nothing.
    """
    try:
        with open(open_own(path, os.O_RDONLY), encoding="ascii") as file:
            status = os.fstat(file.fileno())
            found = parse_credentials(file.read(MAX_FILE_BYTES))
    except OSError as error:
        raise TokenError(
            f"cannot read the token file {path}: {error.strerror}; is the job still running, "
            "and is this the user who started it?"
        ) from error
    except UnicodeDecodeError:
        raise TokenError(f"the token file {path} holds no token; start the job again") from None
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise TokenError(
            f"the token file {path} has mode {mode:04o}, so others may know the token; "
            f"start the job again, or, if no other user could read it, chmod 600 {path}"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise TokenError(f"the token file {path} belongs to user {status.st_uid}; use your own")
    if not found.token:
        raise TokenError(f"the token file {path} is empty; start the job again")
    return found


# ---- the proof of a shared secret --------------------------------------------------------

_PURPOSE = "elastic-driver: proof of a joining node, version 1"


class Speaker(Enum):
    """The side that makes a proof; the other one cannot send it back as its own."""

    NODE = "node"
    SERVER = "server"


class Handshake(NamedTuple):
    """Everything that one exchange is bound to."""

    node_nonce: str
    server_nonce: str
    fingerprint: str = ""  # of the server's certificate; "": the connection has none

    def prove(self, secret: str, speaker: Speaker) -> str:
        """Return the proof that this side knows the secret."""
        message = "\n".join((_PURPOSE, speaker.value, *self)).encode()
        return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()

    def proved(
        self, candidates: Iterable[str], speaker: Speaker, proofs: Sequence[str]
    ) -> str | None:
        """Return the secret that one of these proofs proves; None: it is none of the candidates.

        All are compared, each in constant time.
        """
        found = None
        for secret in candidates:
            right = self.prove(secret, speaker).encode()
            matches = [hmac.compare_digest(right, p.encode()) for p in proofs]
            if any(matches) and found is None:
                found = secret
        return found


def make_nonce() -> str:
    """Return 256 random bits in 64 hexadecimal digits."""
    return secrets.token_hex(32)


class OpenHello(NamedTuple):
    """A hello that the server has answered and that waits for its proof."""

    handshake: Handshake
    peer: str  # the address of the node, and its user if it is on this machine
    until: float


class OpenHellos:
    """The hellos that wait for a proof; each is good for one proof and a few seconds.

    They are bounded (`Limits`). A new one replaces the oldest one of its peer, or of the peer with
    the most, so that a program that only says hello does not keep others out.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: OrderedDict[str, OpenHello] = OrderedDict()  # by the server's nonce
        self._of_peer: dict[str, OrderedDict[str, None]] = {}  # their nonces, by peer

    def __len__(self) -> int:
        return len(self._open)

    def add(self, handshake: Handshake, peer: str, now: float) -> list[OpenHello]:
        """Record a hello; return those that have waited too long, or had to give way."""
        gone = self.expire(now)
        own = self._of_peer.get(peer, ())
        if len(own) >= self._limits.hellos_of_peer:
            gone.append(self._remove(next(iter(own))))
        elif len(self._open) >= self._limits.hellos:
            most = max(self._of_peer.values(), key=len)
            gone.append(self._remove(next(iter(most))))
        self._open[handshake.server_nonce] = OpenHello(handshake, peer, now + self._limits.hello_s)
        self._of_peer.setdefault(peer, OrderedDict())[handshake.server_nonce] = None
        return gone

    def take(self, server_nonce: str, now: float) -> OpenHello | None:
        """Return the hello with this nonce, and forget it; None: there is none, or it is too old.

        A proof is tried once: after a wrong one the node has to say hello again.
        """
        if server_nonce not in self._open:
            return None
        hello = self._remove(server_nonce)
        return hello if now < hello.until else None

    def expire(self, now: float) -> list[OpenHello]:
        """Forget the hellos that have waited too long; return them."""
        gone = []
        while self._open and now >= next(iter(self._open.values())).until:
            gone.append(self._remove(next(iter(self._open))))
        return gone

    def _remove(self, server_nonce: str) -> OpenHello:
        hello = self._open.pop(server_nonce)
        own = self._of_peer[hello.peer]
        del own[server_nonce]
        if not own:
            del self._of_peer[hello.peer]
        return hello
