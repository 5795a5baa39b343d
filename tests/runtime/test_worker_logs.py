"""The kept output of workers: over real HTTP, into real files, and back page by page."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic_driver import contract
from elastic_driver.runtime.api import job_access
from elastic_driver.runtime.output_routes import LEAST_WAIT_S, LogRoutes
from elastic_driver.runtime.worker_logs import (
    FILES,
    LogLine,
    LogPage,
    LogQuery,
    WorkerLogs,
    read_page,
)
from elastic_driver.token_roles import agent_token, worker_token
from elastic_driver.words.progress import LogsTaken, WorkerLine, WorkerLines
from rendezvous.auth import reader_token
from rendezvous.client import RendezvousClient
from rendezvous.errors import RequestError
from rendezvous.server import RendezvousServer
from tests.runtime.waiting import until

TOKEN = "secret"


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def logs(tmp_path: Path, told: list[str]) -> Iterator[WorkerLogs]:
    logs = WorkerLogs(tmp_path / "output", 64 << 20, told.append)
    yield logs
    logs.close()


@pytest.fixture
def server(logs: WorkerLogs) -> Iterator[RendezvousServer]:
    with RendezvousServer(
        token=TOKEN, access=job_access(), routes=LogRoutes(logs).add_to
    ) as server:
        yield server


def line(text: str, worker: str = "a.0.1", rank: int = 0, t: float = 1000.0) -> WorkerLine:
    return WorkerLine(t, worker, rank, 1, text)


def everything(folder: Path, **query: Any) -> list[LogLine]:
    """All wanted lines, read page by page."""
    found: list[LogLine] = []
    asked = LogQuery(**query)
    while True:
        page = read_page(folder, asked)
        found += page.lines
        asked = msgspec.structs.replace(asked, at=page.next)
        if not page.more:
            return found


def texts(folder: Path, **query: Any) -> list[str]:
    return [line.text for line in everything(folder, **query)]


def send(server: RendezvousServer, first: int, *lines: WorkerLine, token: str = TOKEN) -> float:
    body = msgspec.json.encode(WorkerLines("a", 1, first, lines))
    with RendezvousClient(server.url, token) as client:
        answer = client.post_json(contract.LOGS_PATH, body)
    return msgspec.json.decode(answer, type=LogsTaken).wait


def test_lines_are_found_by_rank_worker_host_and_time_in_their_order(logs: WorkerLogs) -> None:
    logs.add("a", [line("one"), line("two", "a.1.1", 1)])
    logs.add("b", [line("three", "b.0.1", 2, t=2000.0)])
    logs.add("a", [line("four", "a.1.2", 0, t=3000.0)], dropped=7)
    logs.close()
    folder = logs.folder
    left_out = "7 lines were left out here: there were too many at once"
    assert texts(folder) == ["one", "two", "three", left_out, "four"]
    assert texts(folder, rank=0) == ["one", "four"], "the rank has moved to another worker"
    assert texts(folder, worker="a.1.1") == ["two"]
    assert texts(folder, host="b") == ["three"]
    assert texts(folder, since=1500.0, rank=0) == ["four"]
    assert everything(folder)[1] == LogLine(1000.0, "a.1.1", 1, "a", "stdout", "two")
    file = folder / "00000001.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text().splitlines()[0])["rank"] == 0


def test_the_newest_lines_are_kept_and_the_folder_stays_bounded(tmp_path: Path) -> None:
    most = 256 * 1024
    logs = WorkerLogs(tmp_path / "output", most, lambda _sentence: None)
    old = None
    for number in range(3000):
        logs.add("a", [line(f"{number} {'x' * 200}")])
        if number == 10:
            assert logs._writer.flush(30.0)
            old = read_page(logs.folder, LogQuery()).next
        assert logs._writer.flush(30.0)
    logs.close()
    files = sorted(logs.folder.iterdir())
    assert len(files) == FILES
    assert sum(file.stat().st_size for file in files) <= most
    numbers = [int(text.split()[0]) for text in texts(logs.folder)]
    assert numbers == list(range(numbers[0], 3000))
    assert len(numbers) > 500
    assert texts(logs.folder, at=old)[0].startswith(f"{numbers[0]} "), "its file was removed"


def test_another_driver_goes_on_behind_the_lines_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "output"
    for text in ("one", "two"):
        logs = WorkerLogs(folder, 1 << 20, lambda _sentence: None)
        logs.add("a", [line(text)])
        logs.close()
    assert texts(folder) == ["one", "two"]
    torn = folder / "00000002.jsonl"
    torn.write_bytes(torn.read_bytes() + b'{"t":1,"wor\n')
    assert texts(folder) == ["one", "two"], "a line that a crash has torn is skipped"


def test_lines_wait_for_a_folder_that_cannot_be_written_which_is_said_once(tmp_path: Path) -> None:
    told: list[str] = []
    blocked = tmp_path / "output"
    blocked.write_text("a file")
    logs = WorkerLogs(blocked, 1 << 20, told.append)
    for number in range(3):
        logs.add("a", [line(str(number))])
        until(lambda: told, "the user is told")
    assert "the next 4 MiB wait until it can be written" in told[0]
    blocked.unlink()
    assert logs._writer.flush(30.0)
    logs.close()
    assert texts(blocked) == ["0", "1", "2"]
    assert len(told) == 1


def test_a_folder_that_can_never_be_written_holds_nobody_up_at_the_end(tmp_path: Path) -> None:
    told: list[str] = []
    blocked = tmp_path / "output"
    blocked.write_text("a file")
    logs = WorkerLogs(blocked, 1 << 20, told.append)
    logs.add("a", [line("lost")])
    logs.close()
    assert len(told) == 1
    assert blocked.read_text() == "a file"


def test_lines_arrive_once_and_their_sender_is_told_how_long_to_wait(
    server: RendezvousServer, logs: WorkerLogs
) -> None:
    assert send(server, 1, line("one"), line("two")) == LEAST_WAIT_S
    send(server, 2, line("two"), line("three"))
    send(server, 1, line("one"))
    assert logs._writer.flush(30.0)
    with RendezvousClient(server.url, reader_token(TOKEN)) as client:
        answer = client.get_bytes(f"{contract.LOGS_PATH}?rank=0")
        page = msgspec.json.decode(answer, type=LogPage)
        assert [found.text for found in page.lines] == ["one", "two", "three"]
        rest = client.get_bytes(f"{contract.LOGS_PATH}?at={page.next}")
        assert msgspec.json.decode(rest) == {"lines": [], "next": page.next, "more": False}
        for wrong in ("at=../x", "rank=-1", "since=soon"):
            with pytest.raises(RequestError) as refused:
                client.get_bytes(f"{contract.LOGS_PATH}?{wrong}")
            assert refused.value.status == 422


def test_many_hosts_together_send_a_bounded_number_of_bytes(server: RendezvousServer) -> None:
    big = [line("x" * 10_000)] * 100
    with RendezvousClient(server.url, TOKEN) as client:
        for host in range(20):
            lines = tuple(msgspec.structs.replace(each, worker=f"h{host}.0.1") for each in big)
            body = msgspec.json.encode(WorkerLines(f"h{host}", 1, 1, lines))
            answer = client.post_json(contract.LOGS_PATH, body)
    assert 4.0 < msgspec.json.decode(answer, type=LogsTaken).wait < 6.0, "20 MB at 4 MiB/s"


def test_an_agent_writes_for_its_own_workers_only_and_no_worker_reads(
    server: RendezvousServer,
) -> None:
    own, other = agent_token(TOKEN, "a"), agent_token(TOKEN, "b")
    send(server, 1, line("own"), token=own)
    strange = line("of another host", "b.0.1")
    for token, sent in ((other, line("x")), (own, strange), (reader_token(TOKEN), line("x"))):
        with pytest.raises(RequestError) as refused:
            send(server, 1, sent, token=token)
        assert refused.value.status == 403
    with (
        RendezvousClient(server.url, worker_token(own, "a.0.1")) as client,
        pytest.raises(RequestError) as refused,
    ):
        client.get_bytes(contract.LOGS_PATH)
    assert refused.value.status == 403
