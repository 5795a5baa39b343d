"""The process that stays for further tasks: its children, and how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from aiohttp import web

from elastic_driver import contract
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.features.checks.messages import (
    TASK_SETTINGS,
    Assignment,
    TaskEnded,
    TaskResult,
    TaskSettings,
    assignment_key,
    go_key,
    result_key,
)
from elastic_driver.features.checks.worker.task_process import in_child
from elastic_driver.words.wire_events import WorkerReady
from rendezvous.auth import write_token_file
from rendezvous.client import RendezvousClient
from rendezvous.server import RendezvousServer
from rendezvous.wire import Set
from tests.support.job import eventually

TOKEN = "t" * 32
LIMIT_S = 60.0
WORKER = "a.0.1"


def test_a_child_works_and_ends_without_its_parent_noticing() -> None:
    assert in_child(lambda: None) == 0


def test_a_child_that_fails_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    assert in_child(lambda: {}["missing"]) == 1
    assert "KeyError: 'missing'" in capfd.readouterr().err


def test_a_child_that_is_killed_is_told_by_its_signal() -> None:
    assert in_child(lambda: os.kill(os.getpid(), signal.SIGKILL)) == -signal.SIGKILL


@pytest.fixture
def ended() -> list[int]:
    """Tasks whose end was posted."""
    return []


@pytest.fixture
def server(ended: list[int]) -> Iterator[RendezvousServer]:
    async def post(request: web.Request) -> web.Response:
        event = msgspec.json.decode(await request.read(), type=WorkerReady | TaskEnded)
        if isinstance(event, TaskEnded):
            ended.append(event.task)
        return web.json_response({})

    def routes(app: web.Application) -> None:
        app.router.add_post(EVENTS_PATH, post)

    server = RendezvousServer(token=TOKEN, routes=routes).start()
    yield server
    server.stop()


def assign(server: RendezvousServer, number: int, task: int) -> None:
    """Give the worker its next task."""
    given = Assignment(task=task, rank=0, size=1, node=0)
    server.apply([Set(assignment_key(WORKER, number), msgspec.json.encode(given))])


@pytest.mark.slow
def test_one_process_does_several_tasks_and_ends_like_the_child_that_fails(
    server: RendezvousServer, ended: list[int], tmp_path: Path
) -> None:
    write_token_file(tmp_path / "token", TOKEN)
    small = TaskSettings(matrix=16, products=1, timeout=LIMIT_S)
    env = {
        **os.environ,
        contract.WORKER_ID: WORKER,
        contract.RENDEZVOUS: server.url,
        contract.TOKEN_FILE: str(tmp_path / "token"),
        contract.ROUND: "1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "LOCAL_RANK": "0",
    }
    command = [sys.executable, "-m", "elastic_driver.features.checks.worker.task_process"]
    with RendezvousClient(server.url, TOKEN) as client, contextlib.ExitStack() as stack:
        server.apply([Set(TASK_SETTINGS, msgspec.json.encode(small))])
        server.apply([Set(go_key(task), b"") for task in (1, 2)])
        process = stack.enter_context(subprocess.Popen(command, env=env))
        stack.callback(process.kill)
        eventually(lambda: ended == [1], within=LIMIT_S, what="the first task has ended")
        assign(server, 1, task=2)
        eventually(lambda: ended == [1, 2], within=LIMIT_S, what="the second task has ended")
        for task in (1, 2):
            entry = client.get(result_key(task, WORKER))
            assert entry is not None
            assert msgspec.json.decode(entry.value, type=TaskResult).compute > 0
        parent = psutil.Process(process.pid)
        eventually(lambda: not parent.children(), within=LIMIT_S, what="its process has ended")
        assign(server, 2, task=3)  # nobody lets it begin
        (child,) = eventually(parent.children, within=LIMIT_S, what="it has a process")
        child.kill()
        assert process.wait(LIMIT_S) == -signal.SIGKILL
