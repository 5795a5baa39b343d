"""The line that tells an agent of a new driver: only the holder of the token can write it."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest

from elastic_driver.reachability import (
    MAX_LINE,
    Announcement,
    Presence,
    announce,
    announcement,
    verified,
)
from launcher.agent.lifetime import MOST
from tests.support.idle import probe_port_beside_idle

AGENT = Presence("token", "a", 1)
LINE = announcement("run", 3, "http://10.0.0.2:29400", "token")


def test_a_line_names_the_new_driver() -> None:
    found = verified(LINE.rstrip(), "run", "token")
    assert found is not None
    assert (found.term, found.url) == (3, "http://10.0.0.2:29400")
    assert b"token" not in LINE
    assert len(LINE) < MAX_LINE


@pytest.mark.parametrize(
    "change",
    [{"term": 4}, {"url": "http://10.0.0.9:29400"}, {"run_id": "other"}, {"mac": ""}, {"mac": "é"}],
)
def test_a_line_that_was_changed_is_refused(change: dict[str, object]) -> None:
    forged = msgspec.structs.replace(msgspec.json.decode(LINE, type=Announcement), **change)
    for run_id in ("run", "other"):
        assert verified(msgspec.json.encode(forged), run_id, "token") is None


@pytest.mark.parametrize("line", [b"", b"{}", b"[1]", b"\xff", b'{"term": 1e99}', LINE[:-9]])
def test_a_line_that_is_no_message_is_refused(line: bytes) -> None:
    assert verified(line, "run", "token") is None


def test_another_job_s_token_is_refused() -> None:
    assert verified(LINE, "run", "another token") is None


def test_nobody_there_is_no_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    told = announce("127.0.0.1", port, AGENT, run_id="run", term=2, url="http://h:1")
    assert asyncio.run(told) is False


@pytest.mark.parametrize("says", [b"+", b"+\n" * 99, b""])
def test_a_stranger_at_the_port_of_an_agent_is_told_nothing(says: bytes) -> None:
    """It might say that the agent has heard, and an earlier version believed it."""
    heard: list[bytes] = []

    async def strange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        heard.append(await reader.readline())
        heard.append(await reader.read(1) if says == b"+\n" * 99 else b"")
        writer.close()

    async def scene() -> bool:
        async with await asyncio.start_server(strange, "127.0.0.1", 0) as stranger:
            port = stranger.sockets[0].getsockname()[1]
            return await announce("127.0.0.1", port, AGENT, run_id="r", term=2, url="http://h:1")

    assert asyncio.run(scene()) is False
    question, *more = heard
    assert question.startswith(b"?")
    assert b"".join(more) == b""


def test_an_agent_hears_a_driver_beside_connections_that_say_nothing() -> None:
    heard: list[bytes] = []

    async def scene() -> bool:
        async with probe_port_beside_idle(AGENT.answer, heard.append, MOST) as port:
            return await announce("127.0.0.1", port, AGENT, run_id="run", term=3, url="http://h:1")

    assert asyncio.run(scene()) is True
    (line,) = heard
    assert verified(line, "run", AGENT.token) is not None
