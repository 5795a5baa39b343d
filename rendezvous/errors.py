"""What can go wrong at the rendezvous, named by what the caller can do about it.

Clients and server raise these and nothing else on purpose. Each message says what happened,
to whom, and what to try. `exit_code` is what a command that gives up over it should return
(sysexits.h: 75, the same command may succeed later; 64, the command is wrong; 70, a bug).

The base of all the project's errors lives here too, because imports point this way;
`elastic_driver.errors` gives it out again and builds on it.
"""

from __future__ import annotations


class ElasticError(Exception):
    """Base of everything this project raises on purpose; a command shows it as one line."""

    exit_code: int = 70


class RendezvousError(ElasticError):
    """The rendezvous cannot be reached, refused us, or answered too late; base of the rest."""

    exit_code: int = 75


class AddressError(RendezvousError):
    """The server cannot listen where it was told to."""


class TokenError(RendezvousError):
    """A token file is missing, empty, or readable by others."""

    exit_code = 64


class UnreachableError(RendezvousError):
    """No answer within the deadline: nobody listens, the link is cut, or the server is too slow."""


class UnauthorizedError(RendezvousError):
    """The server does not know this token: it serves another job, or the token file is old."""


class RequestError(RendezvousError):
    """The server answered, and the answer is no (`status` 4xx or 5xx, `code` for programs)."""

    def __init__(self, status: int, code: str, message: str, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.status, self.code, self.message, self.hint = status, code, message, hint


class RefusedError(RendezvousError):
    """The store refused an operation; nothing changed. `code` as in `wire.Refused`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class SealedError(RefusedError):
    """The keys belong to something that is over (a closed round); look for its successor."""


class AbortedError(RendezvousError):
    """Another thread called `abort()` on this client; it stays unusable."""


class WokenError(RendezvousError):
    """The descriptor that may end a call's wait has become readable; the call may be repeated."""


class StoppedError(RendezvousError):
    """The server was stopped, or was not started, when it was asked for something."""
