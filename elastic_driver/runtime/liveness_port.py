"""A port at which others can connect as long as this process lives, by which the Brain knows it.

Nothing is said there. The kernel accepts connections for a process that is stopped, too, and
refuses them once it has ended, however it ended.
"""

import contextlib
import socket
from collections.abc import Sequence

_WAITING = 16  # connections that nobody has hung up yet


class LivenessPort:
    """The port, at the address by which this machine reaches another one.

    `address` is HOST:PORT with a numeric host, "" until `open` has succeeded.
    """

    def __init__(self, towards: str, port: int, ports: Sequence[int] = (0,)) -> None:
        """Open nothing.

        `towards`, `port`: the other machine's name or address, and any port. `ports`: those to
        listen at, of which the first free one is taken; 0: any.
        """
        self._towards, self._port, self._ports = towards, port, ports
        self._listener: socket.socket | None = None
        self.address = ""

    def open(self) -> None:
        """Open the port, if that was not possible before; asks a name server."""
        if self._listener is not None:
            return
        with contextlib.suppress(OSError):  # there is no way to it now
            family, kind, _, _, target = socket.getaddrinfo(
                self._towards, self._port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as unsent:  # nothing is sent by `connect`
                unsent.connect(target)
                own = unsent.getsockname()[0]
            self._listener = self._listen(own, family)
            self._listener.setblocking(False)
            host = f"[{own}]" if ":" in own else own
            self.address = f"{host}:{self._listener.getsockname()[1]}"

    def _listen(self, own: str, family: int) -> socket.socket:
        """Return a socket that listens at the first free port; OSError if none is free."""
        for port in self._ports:
            with contextlib.suppress(OSError):  # another program listens there
                return socket.create_server((own, port), family=family, backlog=_WAITING)
        raise OSError("no port is free")

    def hang_up(self) -> None:
        """Close the connections of those who have looked."""
        with contextlib.suppress(OSError):  # no more of them
            while self._listener is not None:
                self._listener.accept()[0].close()

    def close(self) -> None:
        """Close the port."""
        if self._listener is not None:
            self._listener.close()
            self._listener, self.address = None, ""
