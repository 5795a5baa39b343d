"""A plan becomes a driver and its parts; signals become requests, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from elastic_driver.core.driver_events import JobLeaving
from elastic_driver.errors import UsageError
from elastic_driver.runtime.driver import ElasticDriver
from launcher.launch.bind_address import numeric_address
from launcher.launch.checks import make_discovery
from launcher.launch.hosts import DiscoveredHosts, FixedHosts
from launcher.launch.submit import announce_end, stop_on_signals
from tests.support.job import elasticrun


class Asked:
    """Takes the place of a driver that is asked to stop."""

    def __init__(self, *, takes: bool = True) -> None:
        self.requests: list[tuple[str, int]] = []
        self.takes = takes

    def request_stop(self, reason: str, exit_code: int) -> None:
        self.requests.append((reason, exit_code))

    def post(self, event: JobLeaving) -> bool:
        if self.takes:
            self.requests.append((event.reason, int(event.deadline)))
        return self.takes


@contextlib.contextmanager
def handling(driver: Asked, notice: float = 0.0) -> Iterator[None]:
    with stop_on_signals(cast("ElasticDriver", driver), notice=notice):
        yield


# ---- signals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGUSR1, 143)],
)
def test_a_signal_asks_for_the_end_with_its_status(number: signal.Signals, code: int) -> None:
    driver = Asked()
    before = signal.getsignal(number)
    with handling(driver):
        signal.raise_signal(number)
        signal.raise_signal(number)
    assert [exit_code for _, exit_code in driver.requests] == [code, code]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_notice_gives_the_job_the_grace_period(number: signal.Signals) -> None:
    driver = Asked()
    with handling(driver, notice=40.0):
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
    told = f"told by {number.name} that its time is over"
    assert driver.requests == [(told, 40), ("told to stop by SIGTERM", 143)]


@pytest.mark.parametrize(
    ("notice", "takes", "asked"), [(30, True, 30), (0, True, 143), (30, False, 143)]
)
def test_the_end_of_an_allocation_is_a_notice_if_there_is_time_and_the_driver_takes_it(
    notice: float, takes: bool, asked: int
) -> None:
    driver = Asked(takes=takes)
    announce_end(cast("ElasticDriver", driver), "Slurm job 1 is over", notice)
    assert driver.requests == [("Slurm job 1 is over", asked)]


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    driver = Asked()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with handling(driver):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert driver.requests == []


def test_a_second_interrupt_does_not_wait_for_a_stubborn_worker(tmp_path: Path) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    with elasticrun("-np", "1", "--stop-grace", "500", str(script)) as job:
        job.until(lambda: "up" in job.stdout, "the worker ignores SIGTERM")
        job.process.send_signal(signal.SIGINT)
        # Of another kind, for two equal signals that come together are one to the kernel.
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 130
        job.assert_nothing_left()


# ---- parts -------------------------------------------------------------------------------


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
