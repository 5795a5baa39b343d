"""The errors of the rendezvous, named by what the caller can do about them.

Clients and server raise only these on purpose. Each message says what happened, to which process,
and what to try. `exit_code` is the status of a command that ends with the error (sysexits.h: 75,
the same command may succeed later; 64, the command is wrong; 70, a bug).

The base of all the project's errors is here too, because imports point this way;
`elastic_driver.errors` exports it again.
"""


class ElasticError(Exception):
    """Base of all errors that this project raises on purpose; a command shows one line of it."""

    exit_code: int = 70


class RendezvousError(ElasticError):
    """The rendezvous cannot be reached, refused a call, or answered too late; base of the rest."""

    exit_code: int = 75


class AddressError(RendezvousError):
    """The server cannot listen on the address or port it was given."""


class TokenError(RendezvousError):
    """A token file is missing, empty, or readable by others."""

    exit_code = 64


class CertificateError(RendezvousError):
    """A certificate, its key or a CA's cannot be used, or clients would refuse it."""

    exit_code = 64


class UnreachableError(RendezvousError):
    """There was no answer before the deadline; `cause` is the problem of the last attempt."""

    def __init__(self, url: str, waited: float, cause: object) -> None:
        self.cause = cause or type(cause).__name__
        super().__init__(
            f"no answer from the rendezvous at {url} within {waited:.1f} s ({self.cause}); is the "
            "driver still running, and can this host reach that address and port?"
        )


class UnauthorizedError(RendezvousError):
    """The server does not know this token: it serves another job, or the token file is old."""


class RequestError(RendezvousError):
    """The server refused a request: `status` (4xx or 5xx), `code` for programs, and a text."""

    def __init__(self, url: str, status: int, code: str, message: str, hint: str = "") -> None:
        advice = f"; {hint}" if hint else ""
        super().__init__(f"the rendezvous at {url} answered {status} {code}: {message}{advice}")
        self.status, self.code, self.message, self.hint = status, code, message, hint


class RefusedError(RendezvousError):
    """The store refused an operation; nothing changed. `code` is that of `wire.StoreRefusal`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class SealedError(RefusedError):
    """The keys belong to a closed round; wait for the next one."""


class AbortedError(RendezvousError):
    """`abort()` was called on this client; it can no longer be used."""


class WokenError(RendezvousError):
    """The descriptor that may end a call's wait became readable; the call may be repeated."""


class StoppedError(RendezvousError):
    """The server is stopped, or was never started."""
