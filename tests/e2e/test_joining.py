"""Nodes that start by themselves: in any order, leaving and coming back, server restarts included.

Every node here is a process of its own on this machine, as it would be on a machine of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from elastic_driver.words.joining import HelloAnswer
from launcher.join.driver_search import derive
from launcher.network import own_name
from rendezvous.auth import make_nonce, write_token_file
from tests.support.job import JOBS, RunningJob, assert_no_step_lost_or_repeated, eventually
from tests.support.nodes import Nodes
from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = str(JOBS / "train.py")
SECRET = "a-secret-of-so-many-characters"
FAST = ("--heartbeat-timeout", "3")


@pytest.fixture
def temporary() -> Iterator[str]:
    """The nodes' own folder for temporary files, with a short name as such folders have."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield folder


def left_in(folder: str) -> set[str]:
    return {path.name for path in Path(folder).glob("elastic-join-*")}


def all_beyond(job: RunningJob, step: int) -> bool:
    """Whether all live workers have finished more steps than this."""
    return min(record.step for record in job.live().values()) > step


def answer_all(hostile: socket.socket, heard: list[bytes]) -> None:
    """Answer whoever connects, until the socket is closed, as a server of the job would."""
    answer = HelloAnswer(make_nonce(), (make_nonce(),))
    body = msgspec.json.encode(answer)
    with contextlib.suppress(OSError):
        while True:
            connection, _ = hostile.accept()
            with contextlib.suppress(OSError), connection:
                while got := connection.recv(65536):
                    heard.append(got)
                    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
                    connection.sendall(head.encode() + body)


def test_a_node_comes_before_the_server_and_another_leaves_and_comes_back(
    tmp_path: Path, temporary: str
) -> None:
    hostile, heard = socket.create_server(("127.0.0.1", 0)), list[bytes]()
    at = f"127.0.0.1:{hostile.getsockname()[1]}"
    listening = threading.Thread(target=answer_all, args=(hostile, heard), daemon=True)
    listening.start()
    with Nodes(tmp_path, STEPS="100000", TMPDIR=temporary) as nodes:
        join = ("--join", at, "--nproc-per-node", "1", "--run-id", nodes.mark)
        first = nodes.start(*join)
        first.said(
            f"the program at {at} speaks no TLS; if it is the server and was given --insecure"
        )
        first.said(f"waiting for the server at {at}, 600 s at most")
        hostile.shutdown(socket.SHUT_RDWR)
        hostile.close()
        listening.join(30)
        for secret in (derive(nodes.mark), nodes.mark, own_name(), "/v1/nodes/proof", "Bearer"):
            assert secret.encode() not in b"".join(heard)
        job = nodes.serve("--serve", "--nnodes", "1:2", "--rdzv-endpoint", at, *FAST, TRAIN)
        job.until_size(1, 90)
        first.said(f"joined run {nodes.mark} at {at}")
        second = nodes.start(*join)
        job.until_size(2, 90)
        second.signal(signal.SIGTERM)
        assert second.wait() == 143, second.context()
        job.until_size(1, 90)
        assert not job.events("agent_lost", "worker_lost", "host_blacklisted")
        again = nodes.start(*join)
        job.until_size(2, 90)
        hosts = [e["host"] for e in job.events("host_discovered")]
        assert hosts[1] == hosts[2]  # it has its name again
        assert_no_step_lost_or_repeated(job, max(r.step for r in job.steps()) - 1)
        job.process.send_signal(signal.SIGINT)
        assert [n.wait() for n in (first, again)] == [130, 130], first.context()
        assert job.wait() == 130
        assert "the job has ended with exit status 130: interrupted by Ctrl-C" in first.stderr
        job.assert_nothing_left()
    assert not left_in(temporary)


def test_a_node_names_the_address_of_its_workers(tmp_path: Path) -> None:
    at = f"127.0.0.1:{free_port()}"
    with Nodes(tmp_path) as nodes:
        join = ("--join", at, "--nproc-per-node", "1", "--run-id", nodes.mark)
        node = nodes.start(*join, "--local-addr", "127.0.0.9", "--role", "trainer")
        show = ("sh", "-c", "echo at $MASTER_ADDR")
        job = nodes.serve("--serve", "--nnodes", "1", "--rdzv-endpoint", at, *FAST, *show)
        assert [job.wait(), node.wait()] == [0, 0], node.context()
        assert "[0]<stdout>:at 127.0.0.9" in node.stdout.splitlines()
        assert "--role is ignored: all workers have the same role" in node.stderr


def test_the_same_command_on_every_node(tmp_path: Path) -> None:
    with Nodes(tmp_path, STEPS="30") as nodes:
        command = (
            *("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
            *("--rdzv-id", nodes.mark, "--rdzv-endpoint", f"localhost:{free_port()}"),
            *("--state-dir", str(tmp_path / "state"), *FAST, TRAIN),
        )
        both = [nodes.start(*command), nodes.start(*command)]  # at once: either may be quicker
        assert [n.wait() for n in both] == [0, 0], both[0].context() + both[1].context()
        lines = [sorted(n.stdout.splitlines()) for n in both]
        # Each node shows its own workers, and all have trained together.
        assert sorted(line[:12] for shown in lines for line in shown) == [
            f"[{rank}]<stdout>:" for rank in range(4)
        ]
        assert [len(shown) for shown in lines] == [2, 2]
        assert len({line[12:] for shown in lines for line in shown}) == 1
        nodes.job(both[0]).assert_nothing_left()


def test_nodes_with_numbers_share_the_jobs_failure(tmp_path: Path) -> None:
    with Nodes(tmp_path) as nodes:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        args = ("--rdzv-id", nodes.mark, "--state-dir", str(tmp_path / "state"), *FAST)
        command = (*args, "sh", "-c", "echo went wrong >&2; exit 7")
        zero = nodes.start(*command, RANK="0", **where)
        one = nodes.start(*command, RANK="1", **where)
        assert [zero.wait(), one.wait()] == [7, 7], zero.context() + one.context()
        assert "the job has ended with exit status 7: rank " in one.stderr
        nodes.job(zero).assert_nothing_left()


def test_the_server_restarts_and_its_nodes_join_the_new_run(tmp_path: Path) -> None:
    at = f"127.0.0.1:{free_port()}"
    secret = ("--token-file", str(write_token_file(tmp_path / "secret", SECRET)))
    with Nodes(tmp_path, STEPS="100000") as nodes:
        # Nodes do not wait for the next driver of this run, and nobody holds its state then.
        ends = ("--driver-timeout", "0", "--restart-from-scratch")
        serve = ("--serve", "--nnodes", "2", "--rdzv-endpoint", at, *secret, *FAST, *ends, TRAIN)
        job = nodes.serve(*serve)
        both = [nodes.start("--join", at, *secret) for _ in range(2)]
        old = job.until_size(2, 90)
        job.process.kill()
        job.process.wait(10)
        eventually(
            lambda: not set(old) & {p.pid for p in job.processes()},
            within=30,
            what="workers of the dead server's job end",
            context=both[0].context,
        )
        newest = max(r.round for r in job.steps())
        (tmp_path / "steps").rename(tmp_path / "old-steps")
        (tmp_path / "steps").mkdir()
        job = nodes.serve(*serve)
        job.until_size(2, 90)
        assert newest >= 1
        for each in both:
            assert each.stderr.count("joined run") == 2
        job.process.send_signal(signal.SIGTERM)
        assert [n.wait() for n in both] == [143, 143]
        job.wait()
        job.assert_nothing_left()


def have_returned(job: RunningJob, agents: int, times: int) -> bool:
    """Whether so many agents have come back to a next driver so many times."""
    return len(job.events("agent_returned")) == agents * times


def test_the_server_dies_and_the_next_one_has_its_nodes_again(tmp_path: Path) -> None:
    at = f"127.0.0.1:{free_port()}"
    secret = ("--token-file", str(write_token_file(tmp_path / "secret", SECRET)))
    with Nodes(tmp_path, STEPS="100000") as nodes:
        serve = ("--serve", "--nnodes", "1:2", "--rdzv-endpoint", at, *secret, *FAST, TRAIN)
        job = nodes.serve(*serve)
        both = [nodes.start("--join", at, *secret) for _ in range(2)]
        workers = job.until_size(2, 90)
        began = max(r.round for r in job.steps())
        for number in (1, 2):
            job.kill_driver()
            before = max(r.step for r in job.steps())
            job.until_without_driver(partial(all_beyond, job, before + 20), "they train on")
            job = nodes.serve(*serve)  # the same command again
            job.until(partial(have_returned, job, 2, number), "both nodes have returned", 90)
            job.until_size(2, 90)
        assert set(job.live()) == set(workers), "the same workers"
        assert max(r.round for r in job.steps()) == began, "in the same world"
        job.kill_driver()
        both[1].signal(signal.SIGTERM)  # it leaves in good order without a driver, too
        assert both[1].wait() == 143, both[1].context()
        job = nodes.serve(*serve)
        job.until_size(1, 90)
        both.append(nodes.start("--join", at, *secret))
        job.until_size(2, 90)
        assert [each.stderr.count("joined run") for each in both] == [1, 1, 1]
        job.process.send_signal(signal.SIGTERM)
        assert [n.wait() for n in (both[0], both[2])] == [143, 143]
        job.wait()
        job.assert_nothing_left()


def test_a_node_that_is_killed_takes_its_workers_along_and_the_others_train_on(
    tmp_path: Path, temporary: str
) -> None:
    at = f"127.0.0.1:{free_port()}"
    with Nodes(tmp_path, STEPS="100000", TMPDIR=temporary) as nodes:
        join = ("--join", at, "--run-id", nodes.mark)
        job = nodes.serve("--serve", "--nnodes", "1:2", "--rdzv-endpoint", at, *FAST, TRAIN)
        both = [nodes.start(*join), nodes.start(*join)]
        trained = job.until_size(2, 90)
        both[1].process.kill()
        left = job.until_size(1, 90)
        job.killed |= dict.fromkeys(trained.keys() - left, time.time())
        eventually(
            lambda: len({p.pid for p in job.processes()} & set(job.agents())) == 1,
            within=30,
            what="the agent of the killed node is gone",
            context=job.describe,
        )
        still = left_in(temporary)
        assert len(still) == 1, f"the killed node's folder went with its agent: {still}"
        job.until(lambda: job.steps()[-1].step >= 5, "the others have trained on")
        assert_no_step_lost_or_repeated(job, 5)
        both[0].signal(signal.SIGINT)
        both[0].said("Ctrl-C makes this node leave at once")
        both[0].signal(signal.SIGINT)
        assert both[0].wait(60) == 130
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130
        job.assert_nothing_left()
        assert not left_in(temporary)


def test_a_node_without_a_secret_is_told_in_a_line(tmp_path: Path) -> None:
    at = f"127.0.0.1:{free_port()}"
    with Nodes(tmp_path) as nodes:
        job = nodes.serve("--serve", "--nnodes", "1", "--rdzv-endpoint", at, "true")
        stranger = nodes.start("--join", at, "--state-dir", str(tmp_path / "elsewhere"))
        assert stranger.wait() == 64, stranger.context()
        (line,) = [x for x in stranger.stderr.splitlines() if "waiting for" not in x]
        assert "this node has no secret to join it: give the same --run-id" in line
        assert not job.events("host_discovered")


def test_a_node_with_another_secret_is_told_so_and_waits_and_the_server_names_it_once(
    tmp_path: Path,
) -> None:
    at = f"127.0.0.1:{free_port()}"
    with Nodes(tmp_path) as nodes:
        job = nodes.serve("--serve", "--nnodes", "1", "--rdzv-endpoint", at, "true")
        job.until(lambda: job.events("round_opened"), "the server is up")
        names = ("--run-id", "another", "--state-dir", str(tmp_path / "elsewhere"))
        stranger = nodes.start("--join", at, *names, "--start-timeout", "3")
        assert stranger.wait() == 64, stranger.context()
        lines = [x for x in stranger.stderr.splitlines() if "waiting for" not in x]
        assert len(lines) == 2, "when it is found, and when the time is over"
        for line in lines:
            assert (
                f"the server at {at} does not know this node's secret; another program or" in line
            )
        assert not job.events("host_discovered")
        who = f"a program at localhost (user {os.getuid()})"
        told = f"{who} asked to join and did not prove that it knows this job's"
        job.until(lambda: told in job.stderr, "the server names it")
        assert job.stderr.count(told) == 1


def test_a_server_that_never_comes_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with Nodes(tmp_path) as nodes:
        at = f"127.0.0.1:{free_port()}"
        lost = nodes.start("--join", at, "--run-id", "x", "--start-timeout", "1")
        assert lost.wait() == 75
        assert f"no server at {at} within 1 s (--start-timeout): " in lost.stderr
