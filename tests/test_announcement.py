"""The line that tells an agent of a new driver: only the holder of the token can write it."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest

from elastic_driver.announcement import MAX_LINE, Announcement, announce, announcement, verified

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
    told = announce("127.0.0.1", port, run_id="run", term=2, url="http://h:1", token="token")
    assert asyncio.run(told) is False
