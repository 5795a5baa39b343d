"""Reads the head of a plain HTTP request: one that every client of ours sends, and nothing else.

Pure. What is unusual in any way (another method or path, an unknown or repeated header, chunks,
HTTP/1.0, white space in odd places, a body that is large) is not read here and not refused either:
`shortcut` gives it to the general server, bytes as they came, which knows what to do.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

MAX_HEAD_BYTES = 8192  # as in aiohttp
MAX_BODY_BYTES = 256 * 1024  # larger ones are rare, and need not be quick
END = b"\r\n\r\n"

_LENGTH, _TOKEN, _ID, _CONNECTION = (
    b"content-length",
    b"authorization",
    b"x-request-id",
    b"connection",
)
_UNHEEDED = (b"host", b"content-type", b"accept", b"accept-encoding", b"user-agent")
_KNOWN = frozenset((_LENGTH, _TOKEN, _ID, _CONNECTION, *_UNHEEDED))
_FORBIDDEN = frozenset(b"\r\n\0")


class Head(Struct, frozen=True):
    """What matters of a plain POST: its path, the Authorization header, its id, the body's size."""

    path: str
    authorization: str | None
    request_id: str | None
    length: int  # bytes


def may_be_plain(start: bytes, lines: Mapping[bytes, str]) -> bool:
    """Whether what begins like this may become one of these request lines."""
    return any(start.startswith(line) or line.startswith(start) for line in lines)


def read_head(head: bytes, lines: Mapping[bytes, str]) -> Head | None:
    """The head without its final empty line; None where it is not plain.

    `lines` are the request lines that are meant, with their paths.
    """
    first, *rest = head.split(b"\r\n")
    path = lines.get(first + b"\r\n")
    if path is None or not head.isascii():
        return None
    found: dict[bytes, bytes] = {}
    for line in rest:
        name, colon, value = line.partition(b":")
        name = name.lower()
        if not colon or name not in _KNOWN or name in found or not _FORBIDDEN.isdisjoint(value):
            return None
        found[name] = value.strip(b" \t")
    length = found.get(_LENGTH, b"")
    if not length.isdigit() or len(length) > 9 or int(length) > MAX_BODY_BYTES:
        return None
    if found.get(_CONNECTION, b"keep-alive").lower() != b"keep-alive":
        return None
    return Head(path, _text(found.get(_TOKEN)), _text(found.get(_ID)) or None, int(length))


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("ascii")
