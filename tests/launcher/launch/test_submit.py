"""A plan becomes a driver and its parts, and nothing is left behind."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from elastic_driver.errors import UsageError
from launcher.launch.checks import make_discovery, numeric_address
from launcher.launch.host_source import DiscoveredHosts, FixedHosts
from tests.support.job import elasticrun


def test_each_source_of_hosts_becomes_its_discovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "find.sh"
    script.write_text("#!/bin/sh\necho localhost\n")
    script.chmod(0o755)
    (tmp_path / "hosts").write_text("localhost slots=3\n")
    sources = (
        FixedHosts((("localhost", 2),), "--hosts"),
        DiscoveredHosts("hostfile", "hosts", 1, 30.0, ()),
        DiscoveredHosts("script", "./find.sh", 4, 30.0),
    )
    found = [make_discovery(source).find() for source in sources]
    assert found == [(("localhost", 2),), (("localhost", 3),), (("localhost", 4),)]


def test_names_of_the_rendezvous_are_looked_up_here_and_once() -> None:
    assert numeric_address("127.0.0.1") == "127.0.0.1"
    assert numeric_address("localhost") in ("127.0.0.1", "::1")
    with pytest.raises(
        UsageError, match=r"--rdzv-endpoint: the name nosuch\.invalid has no address"
    ):
        numeric_address("nosuch.invalid")


# ---- whole jobs --------------------------------------------------------------------------


def test_a_port_in_use_is_75_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with elasticrun("-np", "1", "--rdzv-endpoint", f"127.0.0.1:{port}", "true") as job:
            assert job.wait() == 75
            assert "Address already in use" in job.stderr
            assert len(job.stderr.splitlines()) == 1


def test_the_rendezvous_listens_where_it_is_told() -> None:
    command = ("sh", "-c", "echo at $ELASTIC_RENDEZVOUS")
    with elasticrun("--rdzv-endpoint", "localhost", *command) as job:
        assert job.wait() == 0, job.describe()
        assert "at http://127.0.0.1:" in job.stdout


def test_variables_and_the_working_folder_reach_the_workers(tmp_path: Path) -> None:
    args = ("--env", "GREETING=hello world", "-np", "2", "sh", "-c", 'echo "$GREETING from $PWD"')
    with elasticrun(*args, cwd=tmp_path) as job:
        assert job.wait() == 0, job.describe()
        assert job.stdout.count(f"hello world from {tmp_path}") == 2


def test_a_hostfile_that_grows_makes_the_job_grow(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1\n")
    args = ("--hostfile", str(hosts), "--discovery-interval", "0.1", "sleep", "60")
    with elasticrun(*args) as job:
        job.until(lambda: len(job.events("worker_started")) == 1, "one worker runs")
        hosts.write_text("localhost slots=1\n127.0.0.2 slots=1\n")
        job.until(lambda: job.rounds()[-1:] == [2], "two workers run")


def test_the_terminal_shows_less_when_quiet_and_json_when_asked() -> None:
    with elasticrun("-q", "sh", "-c", "true") as job:
        assert job.wait() == 0
        assert job.stderr == ""
    with elasticrun("-v", "--log-format", "json", "sh", "-c", "true") as job:
        assert job.wait() == 0
        assert all(line.startswith("{") for line in job.stderr.splitlines())
        assert "job_succeeded" in job.stderr
    with elasticrun("--log-format", "json", "--", "/no/such/program") as job:
        assert job.wait() == 64
        (line,) = job.stderr.splitlines()
        error = json.loads(line)
        assert error["event"] == "error"
        assert "/no/such/program" in error["text"]
        assert abs(error["t"] - time.time()) < 3600
