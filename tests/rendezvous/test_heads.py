"""Which requests are plain enough for the short way."""

from __future__ import annotations

import pytest

from rendezvous.fast_path import MAX_BODY_BYTES, PlainHead, may_be_plain, read_head

LINES = {b"POST /v1/kv:batch HTTP/1.1\r\n": "/v1/kv:batch"}
PLAIN = b"POST /v1/kv:batch HTTP/1.1\r\nHost: a:1\r\nAuthorization: Bearer t\r\nContent-Length: 12"


def test_what_our_clients_send_is_plain() -> None:
    assert read_head(PLAIN, LINES) == PlainHead("/v1/kv:batch", "Bearer t", None, 12)
    more = PLAIN + b"\r\nx-REQUEST-id: 7f \r\nAccept-Encoding: identity\r\nConnection: Keep-Alive"
    assert read_head(more, LINES) == PlainHead("/v1/kv:batch", "Bearer t", "7f", 12)


def test_a_line_that_ends_in_a_slash_stands_for_all_paths_directly_below() -> None:
    lines = {b"POST /v1/shards/": "/v1/shards/"}

    def path(target: str) -> str | None:
        found = read_head(PLAIN.replace(b"/v1/kv:batch", target.encode()), lines)
        return found and found.path

    assert path("/v1/shards/d:next") == "/v1/shards/d:next"
    assert path("/v1/shards/d/checkpoint") is None
    assert path("/v1/shard/d") is None
    assert read_head(PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"), lines) is None
    assert may_be_plain(b"POST /v1/sh", lines)
    assert may_be_plain(b"POST /v1/shards/d:next HT", lines)
    assert not may_be_plain(b"POST /v1/kv", lines)


@pytest.mark.parametrize(
    "head",
    [
        PLAIN.replace(b"POST", b"GET"),
        PLAIN.replace(b"/v1/kv:batch", b"/v1/kv:batch?a=1"),
        PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"),
        PLAIN.replace(b"12", b"-1"),
        PLAIN.replace(b"12", b"1_0"),
        PLAIN.replace(b"12", b"+1"),
        PLAIN.replace(b"12", str(MAX_BODY_BYTES + 1).encode()),
        PLAIN.replace(b"12", b"9" * 5000),
        PLAIN.replace(b"\r\nContent-Length: 12", b""),
        PLAIN + b"\r\nContent-Length: 12",
        PLAIN + b"\r\nTransfer-Encoding: chunked",
        PLAIN + b"\r\nExpect: 100-continue",
        PLAIN + b"\r\nConnection: close",
        PLAIN + b"\r\nContent-Encoding: deflate",
        PLAIN + b"\r\nUser-Agent: a\nTransfer-Encoding: chunked",
        PLAIN + b"\r\nUser-Agent: a\rb",
        PLAIN + b"\r\nUser-Agent: \xff",
        PLAIN + b"\r\nUser-Agent : a",
        PLAIN + b"\r\n folded",
        PLAIN + b"\r\nnothing",
        b"",
    ],
)
def test_whatever_is_unusual_is_left_to_the_general_server(head: bytes) -> None:
    assert read_head(head, LINES) is None


def test_a_beginning_shows_whether_it_can_become_plain() -> None:
    for plain in (b"", b"P", PLAIN[:30], PLAIN):
        assert may_be_plain(plain, LINES)
    for other in (b"G", b"POST /v1/kv:batcH", b"POST /v1/status HTTP/1.1\r\n", b"\x16\x03\x01"):
        assert not may_be_plain(other, LINES)
