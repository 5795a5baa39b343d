"""Which job is meant: by name, by address, or the only one; and what is said where none is."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.runtime.journal import etcd as etcd_client
from elastic_driver.runtime.journal.etcd import EtcdClient
from elastic_driver.runtime.journal.follower import Ended
from elastic_driver.runtime.journal.journal_file import Batch, Head, SqliteStore
from elastic_driver.runtime.journal.tenure import DriverKey, RunKeys, encode_key
from elastic_driver.runtime.run_dir import Endpoint, RunLock
from launcher.ctl_commands.find import Target, Where, file_of_run, find, run_folder
from rendezvous.auth import Role, operator_token, reader_token, write_token_file
from rendezvous.errors import TokenError
from rendezvous.server import RendezvousServer, ServerTls
from rendezvous.tls import certificate_in, make_certificate
from tests.support.etcd import EtcdCluster, why_not
from tests.support.ports import free_ports


@pytest.fixture
def listener() -> Iterator[str]:
    """The address of something that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def greeting() -> Iterator[str]:
    """The address of a program that answers in plain whatever it hears."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                with server.accept()[0] as accepted:
                    accepted.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.fixture
def nobody() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def dead_pid() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def make_run(state_dir: Path, run_id: str, url: str, pid: int | None = None) -> Path:
    folder = state_dir / run_id
    folder.mkdir()
    endpoint = Endpoint(run_id=run_id, url=url, pid=os.getpid() if pid is None else pid, started=1)
    (folder / "endpoint.json").write_bytes(msgspec.json.encode(endpoint))
    write_token_file(folder / "token", f"token-of-{run_id}")
    return folder


def test_the_only_job_that_runs_is_found(
    tmp_path: Path, listener: str, nobody: str, dead_pid: int
) -> None:
    make_run(tmp_path, "old", nobody, dead_pid)
    make_run(tmp_path, "new", listener)
    (tmp_path / "over").mkdir()
    (tmp_path / "file").write_text("not a run")
    assert find(Where(tmp_path)) == Target("new", listener, reader_token("token-of-new"))


@pytest.mark.parametrize(
    ("role", "derived"), [(Role.READER, reader_token), (Role.OPERATOR, operator_token)]
)
def test_the_least_token_that_does_is_used_and_never_the_drivers(
    tmp_path: Path, listener: str, role: Role, derived: Callable[[str], str]
) -> None:
    folder = make_run(tmp_path, "here", listener)
    wheres = [
        Where(tmp_path, role=role),
        Where(tmp_path, run_id="here", role=role),
        Where(tmp_path, endpoint=listener, role=role),
    ]
    for where in wheres:  # an older driver has written its own alone
        assert find(where).token == derived("token-of-here")
    write_token_file(folder / f"token-{role.value}", "the-least", "sha256:ab")
    for where in wheres:
        assert find(where)[2:] == ("the-least", "sha256:ab")
    given = write_token_file(tmp_path / "mine", "given")
    for where in wheres:
        assert find(replace(where, token_file=given)).token == "given"


@pytest.mark.parametrize("unfinished", [True, False])
@pytest.mark.parametrize("speaks", ["TLS", "HTTP", "nothing"])
def test_another_program_at_the_port_of_a_driver_that_has_died_is_no_driver(
    tmp_path: Path, listener: str, dead_pid: int, unfinished: bool, speaks: str
) -> None:
    with contextlib.ExitStack() as stack:
        url = listener
        if speaks == "TLS":
            other = certificate_in(tmp_path)
            make_certificate(other)
            url = stack.enter_context(
                RendezvousServer(token="t", tls=ServerTls(certificate=other))
            ).url
        elif speaks == "HTTP":
            url = stack.enter_context(greeting())
        folder = make_run(tmp_path, "big", url.replace("https", "http"), dead_pid)
        write_token_file(folder / "token", "secret", "sha256:ab")
        for name in ("lock", "journal.db") if unfinished else ():
            (folder / name).write_text("")
        there = (
            rf"\(process {dead_pid}, http://127.0.0.1:[0-9]+, where another program listens now\)"
        )
        said = "has died; go on with the job" if unfinished else "ended without cleaning up"
        with pytest.raises(ClusterError, match=f"its driver {there} {said}") as error:
            find(Where(tmp_path, run_id="big"))
        assert "\n" not in str(error.value)
        with pytest.raises(ClusterError, match="no job of this user is running"):
            find(Where(tmp_path))


def test_a_program_that_resets_a_connection_before_the_handshake_is_no_driver(
    tmp_path: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = socket.create_connection

    def connected_and_reset(*args: Any) -> socket.socket:
        connection = connect(*args)
        with server.accept()[0] as accepted:
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        poll = select.poll()
        poll.register(connection, 0)
        assert poll.poll(20_000), "the reset has arrived"
        return connection

    monkeypatch.setattr(socket, "create_connection", connected_and_reset)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        folder = make_run(tmp_path, "big", url, dead_pid)
        write_token_file(folder / "token", "secret", "sha256:ab")
        with pytest.raises(ClusterError, match="where another program listens now"):
            find(Where(tmp_path, run_id="big"))


def test_of_several_jobs_one_has_to_be_chosen_and_they_are_listed(
    tmp_path: Path, listener: str
) -> None:
    for name in ("a", "b"):
        make_run(tmp_path, name, listener)
    with pytest.raises(UsageError, match=r"2 jobs are running.*--run-id:\n  a .*\n  b ") as error:
        find(Where(tmp_path))
    assert error.value.exit_code == 64
    assert find(Where(tmp_path, run_id="b")).token == reader_token("token-of-b")


def test_where_no_job_runs_that_is_said_with_what_was_left_behind(
    tmp_path: Path, nobody: str, dead_pid: int
) -> None:
    make_run(tmp_path, "old", nobody, dead_pid)
    with pytest.raises(ClusterError, match="no job of this user is running") as error:
        find(Where(tmp_path))
    assert error.value.exit_code == 75
    assert f"run old is over: its driver (process {dead_pid}" in str(error.value)
    with pytest.raises(ClusterError, match="no job of this user is running"):
        find(Where(tmp_path / "missing"))


def test_a_run_whose_driver_died_is_told_from_one_that_does_not_answer(
    tmp_path: Path, nobody: str, dead_pid: int
) -> None:
    folder = make_run(tmp_path, "dead", nobody, dead_pid)
    make_run(tmp_path, "mute", nobody)
    with pytest.raises(ClusterError, match="ended without cleaning up") as error:
        find(Where(tmp_path, run_id="dead"))
    assert f"{folder}/endpoint.json may be removed" in str(error.value)
    with pytest.raises(ClusterError, match=f"does not answer at {nobody}"):
        find(Where(tmp_path, run_id="mute"))


def test_a_run_whose_driver_died_before_its_end_can_go_on(
    tmp_path: Path, nobody: str, dead_pid: int
) -> None:
    folder = make_run(tmp_path, "big", nobody, dead_pid)
    for name in ("lock", "journal.db"):
        (folder / name).write_text("")
    with pytest.raises(ClusterError, match=f"has died; .*--state-dir {tmp_path} --run-id big"):
        find(Where(tmp_path, run_id="big"))


@pytest.mark.parametrize(("hosts", "ended"), [(["localhost"], True), (["localhost", "n1"], False)])
def test_a_run_of_which_nobody_is_left_is_begun_again_from_its_checkpoint(
    tmp_path: Path, nobody: str, dead_pid: int, hosts: list[str], ended: bool
) -> None:
    folder = make_run(tmp_path, "big", nobody, dead_pid)
    for name in ("lock", "journal.db"):
        (folder / name).write_text("")
    started = ({"n": 1, "t": 1.0, "event": "agent_started", "host": host} for host in hosts)
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in started))
    with pytest.raises(ClusterError, match="has no driver") as error:
        find(Where(tmp_path, run_id="big"))
    assert ("its agents and workers have ended since; begin again" in str(error.value)) is ended
    assert ("go on with the job: elasticrun --resume" in str(error.value)) is not ended


def test_a_driver_that_starts_to_go_on_with_a_run_is_not_called_dead(
    tmp_path: Path, nobody: str, dead_pid: int
) -> None:
    folder = make_run(tmp_path, "big", nobody, dead_pid)
    (folder / "journal.db").write_text("")
    lock = RunLock(folder / "lock", "big")
    lock.acquire("")
    starts = rf"another driver of run big \(process {os.getpid()}\) is starting; try again soon"
    try:
        with pytest.raises(ClusterError, match=starts):
            find(Where(tmp_path, run_id="big"))
        (folder / "endpoint.json").unlink()
        with pytest.raises(ClusterError, match=starts):
            find(Where(tmp_path, run_id="big"))
    finally:
        lock.release(remove=False)


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_a_driver_that_has_taken_over_elsewhere_is_found_in_etcd(
    tmp_path: Path, listener: str, nobody: str, dead_pid: int
) -> None:
    folder = make_run(tmp_path, "big", nobody, dead_pid)
    (folder / "lock").write_text("")
    (tmp_path / "etcd").mkdir()
    with EtcdCluster(tmp_path / "etcd", free_ports(2), (("127.0.0.1", ()),)) as etcd:
        argv = ("--run-id", "big", "--journal", etcd.url, "--", "true")
        first = SqliteStore(folder / "journal.db")
        first.open(Head("big", argv, "/home"))
        first.write([Batch(1, states=[(0, 0.0, "memory", b"")])])
        first.free()
        for where in (
            Where(tmp_path, run_id="big"),  # the folder of the driver that has died
            Where(tmp_path / "no", run_id="big", journal=etcd.url),  # another host
        ):
            with pytest.raises(ClusterError, match="run big has no driver now, says etcd://"):
                find(where)
        keys = RunKeys("big")
        with EtcdClient(etcd.access) as client:
            new = DriverKey(2, os.uname().nodename, 1, url=listener, seen="http://192.0.2.1:1")
            put = etcd_client.put
            client.transact((), [put(keys.driver, encode_key(new)), put(keys.token, b"secret")])
            target = Target("big", listener, reader_token("secret"))
            assert find(Where(tmp_path, run_id="big")) == find(Where(tmp_path)) == target
            assert find(Where(tmp_path / "no", run_id="big", journal=etcd.url)) == target
            put_other = put(keys.driver, encode_key(msgspec.structs.replace(new, host="other")))
            client.transact((), [put_other])
            assert find(Where(tmp_path, run_id="big")).url == "http://192.0.2.1:1"
            ended = Ended(0, "every worker has succeeded", 1.0)
            client.transact((), [put(keys.end, msgspec.json.encode(ended))])
            with pytest.raises(ClusterError, match=r"run big is over, .*every worker has"):
                find(Where(tmp_path, run_id="big"))
    with pytest.raises(UsageError, match="--journal needs --run-id"):
        find(Where(tmp_path, journal=etcd.url))


def test_a_run_that_is_over_says_which_command_tells_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "over"
    folder.mkdir()
    (folder / "events.jsonl").write_text("")
    with pytest.raises(ClusterError, match=rf"run over is over; .* elasticctl report {folder}$"):
        find(Where(tmp_path, run_id="over"))


@pytest.mark.parametrize("run_id", ["missing", "../a", "/etc", ".."])
def test_a_name_that_is_no_run_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(UsageError, match="there is no run"):
        find(Where(tmp_path / "state", run_id=run_id))


def test_an_endpoint_needs_a_token_unless_its_run_is_here(tmp_path: Path, listener: str) -> None:
    with pytest.raises(UsageError, match="--token-file"):
        find(Where(tmp_path, endpoint=listener))
    token = write_token_file(tmp_path / "mine", "secret")
    assert find(Where(tmp_path, endpoint=listener, token_file=token)).token == "secret"
    make_run(tmp_path, "here", listener)
    assert find(Where(tmp_path, endpoint=f"{listener}/")).token == reader_token("token-of-here")


def test_an_endpoint_that_is_none_and_a_missing_token_are_errors(
    tmp_path: Path, listener: str
) -> None:
    with pytest.raises(UsageError, match="--endpoint"):
        find(Where(tmp_path, endpoint="localhost:80"))
    (make_run(tmp_path, "a", listener) / "token").unlink()
    with pytest.raises(TokenError, match="cannot read the token file"):
        find(Where(tmp_path))


def test_a_damaged_endpoint_file_is_no_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "a", "http://127.0.0.1:1")
    for content in (b"", b"{", b'{"run_id":"a"}', b'{"run_id":"a","url":"x","pid":1,"started":1}'):
        (folder / "endpoint.json").write_bytes(content)
        with pytest.raises(ClusterError, match="no job of this user"):
            find(Where(tmp_path))


def test_every_command_means_the_same_run(tmp_path: Path, listener: str) -> None:
    """The one named, else the only one that runs, else the newest by its event log."""
    assert run_folder(tmp_path, None) is None
    for name, age in (("old", 200), ("newer", 100)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text("")
        os.utime(tmp_path / name / "events.jsonl", (1e9 - age, 1e9 - age))
    (tmp_path / "old" / "journal.db").write_text("")  # touched later: `explain` took this run
    assert run_folder(tmp_path, None) == tmp_path / "newer"
    assert file_of_run(None, "journal.db", "a journal", tmp_path, None).parent.name == "newer"
    make_run(tmp_path, "runs", listener)
    assert run_folder(tmp_path, None) == tmp_path / "runs"
    assert run_folder(tmp_path, "old") == tmp_path / "old"
    make_run(tmp_path, "too", listener)
    with pytest.raises(UsageError, match="2 jobs are running"):
        run_folder(tmp_path, None)
    with pytest.raises(UsageError, match="no name of a run"):
        run_folder(tmp_path, "../old")
