"""What the blocking and the asynchronous client share: how a call is put, repeated and read.

Pure but for the choice of request ids and the jitter between attempts. A call has one
deadline. Until then it is repeated, under the same request id, whenever the connection breaks
or the server says that it is stopping; any other answer is final.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn
from urllib.parse import SplitResult, urlsplit

import msgspec

from rendezvous.errors import (
    RefusedError,
    RendezvousError,
    RequestError,
    SealedError,
    UnauthorizedError,
    UnreachableError,
)
from rendezvous.wire import (
    Batch,
    BatchReply,
    ErrorDetail,
    Get,
    Operation,
    Refused,
    Result,
    Watch,
    decode_error,
    decode_reply,
)

REQUEST_ID_HEADER = "X-Request-Id"
DEFAULT_TIMEOUT_S = 10.0
FIRST_DELAY_S, LONGEST_DELAY_S = 0.02, 1.0
STOPPING = 503  # the one status that is worth a repeat: a successor may take over


def parse_url(url: str) -> SplitResult:
    """The parts of `http://host:port`; raises ValueError for anything else."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.port is None:
        raise ValueError(f"{url!r} is no rendezvous address; it looks like http://10.0.0.1:29400")
    return parts


def new_request_id() -> str:
    """An id no other request has."""
    return secrets.token_hex(12)


def put_batch(operations: Iterable[Operation]) -> bytes:
    """The body of a batch request."""
    return msgspec.json.encode(Batch(tuple(operations), new_request_id()))


def time_for(operations: Sequence[Operation], timeout: float) -> float:
    """Seconds in which the server must have answered: its waits, one after another, and ours."""
    return timeout + sum(o.wait for o in operations if isinstance(o, Get | Watch))


def delays() -> Iterator[float]:
    """Seconds to pause before each next attempt: doubling, up to a second, with jitter.

    The jitter keeps thousands of clients of a restarted server from arriving in step.
    """
    longest = FIRST_DELAY_S
    while True:
        yield longest * random.uniform(0.5, 1.0)
        longest = min(2 * longest, LONGEST_DELAY_S)


def read_results(body: bytes) -> tuple[Result, ...]:
    """The results in a batch's answer."""
    try:
        reply: BatchReply = decode_reply(body)
    except msgspec.DecodeError as error:
        raise RendezvousError(f"the rendezvous answered what is no reply: {error}") from error
    return reply.results


def raise_for(status: int, body: bytes, url: str) -> None:
    """Raise the error that an answer stands for; return where it is a success."""
    if status < 400:
        return
    try:
        detail = decode_error(body).error
    except msgspec.DecodeError:
        detail = ErrorDetail("http_error", f"status {status}", "does elasticrun listen there?")
    if status == 401:
        raise UnauthorizedError(
            f"the rendezvous at {url} refused our token: {detail.message}; it may serve another "
            "job now, see that the token file is this job's"
        )
    message = f"the rendezvous at {url} answered {status} {detail.code}: {detail.message}"
    raise RequestError(status, detail.code, message, detail.hint)


def unreachable(url: str, waited: float, cause: object) -> UnreachableError:
    """The error for a call whose deadline passed without an answer."""
    return UnreachableError(
        f"no answer from the rendezvous at {url} within {waited:.1f} s ({cause}); is the driver "
        "still running, and can this host reach that address and port?"
    )


def raise_refused(result: Refused) -> NoReturn:
    """Raise what the store's refusal stands for."""
    if result.code == "sealed":
        raise SealedError(result.code, result.message)
    raise RefusedError(result.code, result.message)
