"""The heads of plain HTTP requests, which the fast path reads itself. Pure.

A head is the request line and the headers. All other heads are aiohttp's.
"""

from collections.abc import Mapping

from msgspec import Struct

MAX_HEAD_BYTES = 8192  # as in aiohttp
MAX_BODY_BYTES = 256 * 1024  # larger ones are rare, and need not be quick
_NEEDED = ("authorization", "connection", "content-length", "x-request-id")
_IGNORED = ("host", "content-type", "accept", "accept-encoding", "user-agent")
_KNOWN = frozenset((*_NEEDED, *_IGNORED))


class PlainHead(Struct, frozen=True):
    """The parts of a plain POST's head that the fast path needs."""

    path: str
    authorization: str | None
    request_id: str | None
    length: int  # bytes of the body


def may_be_plain(start: bytes, lines: Mapping[bytes, str]) -> bool:
    """Return whether a request that begins like this may have one of these request lines."""
    return any(start.startswith(line) or line.startswith(start) for line in lines)


def read_head(head: bytes, lines: Mapping[bytes, str]) -> PlainHead | None:
    """Return a request's head (given without its final empty line), or None if it is not plain.

    A plain head has one of the request lines in `lines` (their values are paths), or begins with a
    line that ends in "/". It has only headers that our clients send; aiohttp handles all others.
    """
    if not head.isascii() or b"\0" in head:
        return None
    first, *rest = head.decode("ascii").split("\r\n")
    path = lines.get(f"{first}\r\n".encode())
    if path is None:
        folder, slash, name = first.removesuffix(" HTTP/1.1").rpartition("/")
        above = lines.get(f"{folder}{slash}".encode())
        path = above and above + name
    if path is None or not head.count(b"\r") == head.count(b"\n") == len(rest):
        return None
    headers: dict[str, str] = {}
    for line in rest:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or name not in _KNOWN or name in headers:
            return None
        headers[name] = value.strip(" \t")
    length = headers.get("content-length", "")
    if not length.isdigit() or len(length) > 9 or int(length) > MAX_BODY_BYTES:
        return None
    if headers.get("connection", "keep-alive").lower() != "keep-alive":
        return None
    request_id = headers.get("x-request-id") or None
    return PlainHead(path, headers.get("authorization"), request_id, int(length))
