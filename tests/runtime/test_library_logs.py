"""Log lines of libraries: few, short, never with what a client has sent, and never in the way."""

from __future__ import annotations

import io
import logging
import os
import socket
import time
from urllib.parse import urlsplit

import pytest

from elastic_driver.runtime.library_logs import BURST, EACH_S, FewLines, logs_shown
from elastic_driver.runtime.reporter import Level, Reporter
from rendezvous.auth import make_token
from rendezvous.client import RendezvousClient
from rendezvous.server import RendezvousServer

TOKEN = make_token()


def malformed(url: str) -> bytes:
    """Send a request whose header no parser takes, with a token in it; return the answer."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=30.0) as connection:
        head = f"POST /v1/kv HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\x01\r\n\r\n"
        connection.sendall(head.encode())
        return connection.recv(65536)


def test_malformed_requests_fill_no_terminal_and_show_no_token() -> None:
    stream = io.StringIO()
    with logs_shown(Reporter(stream).logged), RendezvousServer(token=TOKEN) as server:
        for _ in range(5 * BURST):
            assert b" 400 " in malformed(server.url)
    lines = stream.getvalue().splitlines()
    assert 1 <= len(lines) <= BURST + 2
    assert "aiohttp.server: Error handling request from 127.0.0.1" in lines[0]
    assert lines[-1].endswith("more warnings of libraries were left out")
    assert TOKEN not in stream.getvalue()


def test_a_server_whose_terminal_nobody_reads_serves_on() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with open(writing, "wb", buffering=0) as stream:
        while stream.write(bytes(4096)):  # nobody reads, and the pipe is full
            pass
        os.set_blocking(writing, True)
        reporter = Reporter(open(writing, "w", closefd=False))  # noqa: SIM115
        with logs_shown(reporter.logged), RendezvousServer(token=TOKEN) as server:
            began = time.monotonic()
            for _ in range(2 * BURST):
                malformed(server.url)
            with RendezvousClient(server.url, TOKEN) as client:
                client.set("a", b"1")
            assert time.monotonic() - began < 20.0
        reporter.close()
    os.close(reading)


def test_quiet_shows_no_lines_of_libraries() -> None:
    stream = io.StringIO()
    with logs_shown(Reporter(stream, level=Level.QUIET).logged):
        logging.getLogger("aiohttp.server").error("Unhandled exception")
        logging.getLogger("nobody.knows").error("of some library")
        logging.getLogger("rendezvous.server").warning("held up for %.1f s", 1.0)
    assert stream.getvalue() == "elasticrun: held up for 1.0 s\n"
    assert logging.getLogger("aiohttp").handlers == []


@pytest.mark.parametrize(
    ("message", "arguments", "shown"),
    [
        ("Exception in callback f(b'secret')", (), "x: Exception in callback f"),
        ("%s sent %r after %d s", ("10.0.0.7", b"secret", 3), "x: 10.0.0.7 sent … after 3 s"),
        ("got b'secret'", (), "x: got b"),
        ("one\nsecret", (), "x: one"),
    ],
)
def test_values_in_messages_of_libraries_are_left_out(
    message: str, arguments: tuple[object, ...], shown: str
) -> None:
    lines: list[str] = []
    handler = FewLines(lambda line, _by_library: lines.append(line))
    handler.handle(logging.LogRecord("x", logging.ERROR, "", 0, message, arguments, None))
    assert lines == [shown]


def test_an_error_is_shown_with_its_type_and_its_place_only() -> None:
    lines: list[str] = []
    log = logging.getLogger("aiohttp.x")
    with logs_shown(lambda line, _by_library: lines.append(line)):
        try:
            raise ValueError("secret")
        except ValueError:
            log.exception("Unhandled exception")
    (line,) = lines
    assert line.startswith("aiohttp.x: Unhandled exception (ValueError at test_library_logs.py:")


def test_after_a_burst_there_is_a_line_now_and_then() -> None:
    lines: list[str] = []
    now = 0.0
    handler = FewLines(lambda line, _by_library: lines.append(line), clock=lambda: now)
    record = logging.LogRecord("rendezvous", logging.ERROR, "", 0, "again", (), None)
    for _ in range(BURST + 7):
        handler.handle(record)
    assert len(lines) == BURST
    now += EACH_S
    handler.handle(record)
    handler.handle(record)
    assert lines[BURST:] == ["7 more warnings of libraries were left out", "again"]
