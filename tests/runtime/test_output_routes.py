"""Lines that agents send reach the driver's stdout and stderr: over real HTTP, to real pipes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import msgspec
import pytest

from elastic_driver import contract
from elastic_driver.runtime.api import job_access
from elastic_driver.runtime.output_routes import AgentsOutput
from elastic_driver.words.progress import OutputLine, OutputLines
from rendezvous.client import RendezvousClient
from rendezvous.errors import RequestError
from rendezvous.server import RendezvousServer

TOKEN = "secret"


@contextlib.contextmanager
def pipe_as(fd: int) -> Iterator[int]:
    """Put a pipe in the place of our stdout or stderr; yield the end to read."""
    read, write = os.pipe()
    own = os.dup(fd)
    os.dup2(write, fd)
    try:
        yield read
    finally:
        os.dup2(own, fd)
        for each in (read, write, own):
            os.close(each)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def server(told: list[str]) -> Iterator[RendezvousServer]:
    routes = AgentsOutput(told.append, stall=0.2).add_to
    with RendezvousServer(token=TOKEN, access=job_access(), routes=routes) as server:
        yield server


def send(
    server: RendezvousServer, first: int, *lines: str, host: str = "a", stream: int = 1
) -> None:
    sent = tuple(OutputLine(1 if stream == 1 else 2, line) for line in lines)
    body = msgspec.json.encode(OutputLines(host, 1, first, sent))
    with RendezvousClient(server.url, TOKEN) as client:
        client.post_json(contract.OUTPUT_PATH, body)


def test_lines_are_written_when_the_answer_comes_each_to_its_stream(
    server: RendezvousServer, capfd: pytest.CaptureFixture[str]
) -> None:
    send(server, 1, "one", "zwölf")
    send(server, 3, "an error", stream=2)
    assert capfd.readouterr() == ("one\nzwölf\n", "an error\n")


def test_lines_that_come_again_are_not_written_again(
    server: RendezvousServer, capfd: pytest.CaptureFixture[str]
) -> None:
    send(server, 1, "one", "two")
    send(server, 2, "two", "three")
    send(server, 1, "one")
    send(server, 4, "four")
    send(server, 1, "another host's", host="b")
    assert capfd.readouterr().out.split("\n") == [
        "one",
        "two",
        "three",
        "four",
        "another host's",
        "",
    ]


def test_the_first_lines_of_an_agent_may_have_any_number(
    server: RendezvousServer, capfd: pytest.CaptureFixture[str]
) -> None:
    send(server, 7, "seven", "eight")
    send(server, 11, "eleven")  # the agent has dropped nine and ten
    assert capfd.readouterr().out == "seven\neight\neleven\n"


def test_a_terminal_that_nothing_reads_delays_the_answer_and_not_the_server(
    server: RendezvousServer, told: list[str]
) -> None:
    line = "x" * 1000
    with pipe_as(1):
        began = time.monotonic()
        send(server, 1, *[line] * 100)  # more than a pipe holds
        assert time.monotonic() - began >= 0.2
        with RendezvousClient(server.url, TOKEN, 5.0) as client:
            assert client.get("any/key") is None
        send(server, 101, *[line] * 300)
        send(server, 401, *[line] * 300)
        assert "nothing has read our stdout" in told[0]


def test_a_request_of_the_wrong_form_is_refused(server: RendezvousServer) -> None:
    body = b'{"host":"a","incarnation":1,"first":1,"lines":[[3,"to nowhere"]]}'
    with RendezvousClient(server.url, TOKEN) as client, pytest.raises(RequestError) as refused:
        client.post_json(contract.OUTPUT_PATH, body)
    assert refused.value.status == 422
