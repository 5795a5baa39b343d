"""A mutual proof of a shared secret, which comes before anything else is said. Pure.

A node sends a nonce. The server answers with a nonce of its own and one proof for each secret that
it takes. The node compares them, and answers with its own proof only if the server has proved a
secret that the node knows, too. This is the three-pass mutual authentication of ISO/IEC 9798-4.

A proof is HMAC-SHA256, with the secret as its key, over the role of its speaker, both nonces and
the fingerprint of the server's certificate as the speaker sees it. So neither side shows the
secret; a recorded proof is worth nothing, as the next nonces differ; and a program in the middle,
which has another certificate, cannot pass proofs on (RFC 5929 calls this channel binding).

The secret has to be too long to be guessed: whoever speaks with the server can test guesses.
Times are seconds.
"""

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from rendezvous.limits import Limits

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
