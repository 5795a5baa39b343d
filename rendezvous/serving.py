"""What a `RendezvousServer` is given beside its address and its rights: three groups of values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rendezvous.service import OnChanges
from rendezvous.tls import ServerCertificate
from rendezvous.wire import Operation


def _ignore(_said: object) -> None:
    pass


def _nothing_first(_url: str) -> Sequence[Operation]:
    return ()


@dataclass(frozen=True)
class ServerTls:
    """How a server speaks TLS: not at all without a certificate.

    `known_by` is what its clients are told of the certificate (default: its fingerprint, see
    `tls`). With `also_plain` and an address of loopback, plain requests are answered at the same
    port, too.
    """

    certificate: ServerCertificate | None = None
    known_by: str = ""
    also_plain: bool = False


@dataclass(frozen=True)
class Callbacks:
    """What a server calls on its thread; none of these may block.

    `on_lease_expired(key)` and `on_client_left(key)`: see `StoreService`. `on_failed` is called if
    an error ends the server that was not expected.
    """

    on_lease_expired: Callable[[str], None] | None = None
    on_client_left: Callable[[str], None] | None = None
    on_failed: Callable[[Exception], None] = _ignore


@dataclass(frozen=True)
class Succession:
    """What a server takes over from the one before it, and keeps for the one after it.

    `first_revision`: see `KVStore`. `first(url)` returns operations that are carried out before
    any client's. `on_changes` and `passing`: see `StoreService`; `on_changes` is called on the
    server's thread and must not block.
    """

    first_revision: int = 0
    first: Callable[[str], Sequence[Operation]] = _nothing_first
    on_changes: OnChanges | None = None
    passing: tuple[str, ...] = ()
