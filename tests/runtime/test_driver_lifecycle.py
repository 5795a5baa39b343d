"""How a driver starts and stops: bounded, clean, and with an error of one line when it cannot."""

from __future__ import annotations

import io
import json
import queue
import socket
import threading
import time
from pathlib import Path

import pytest

from elastic_driver.errors import ClusterError, ExitCode, UsageError
from elastic_driver.runtime import loop
from elastic_driver.runtime.discovery import FixedDiscovery
from elastic_driver.runtime.driver import ElasticDriver
from elastic_driver.runtime.mailbox import JobBegins, Message
from elastic_driver.runtime.reporter import Reporter
from elastic_driver.runtime.resources import DriverSetup
from elastic_driver.runtime.run_dir import RunDir
from elastic_driver.settings import DriverOptions, Settings
from elastic_driver.words.orders import JobSpec, ShutdownOrder
from elastic_driver.words.wire_events import AgentReady
from tests.runtime.cluster import Cluster
from tests.runtime.jobs import StartJob

A0, A1 = "a.0.1", "a.1.1"


# ---- stopping ----------------------------------------------------------------------------


def test_asked_to_stop_it_shuts_agents_down_and_returns_the_given_status(
    start_job: StartJob,
) -> None:
    job = start_job()
    job.cluster.until_workers(A0, A1)
    job.driver.request_stop("interrupted by SIGINT", 130)
    outcome = job.outcome()
    assert (outcome.exit_code, outcome.reason) == (130, "interrupted by SIGINT")
    orders = job.cluster.agents["a", 1].orders
    assert isinstance(orders[-1], ShutdownOrder)
    assert orders[-1].grace == 1.0
    late = [e for e in job.logged() if e["event"] == "worker_exited"]
    assert {e["worker"] for e in late} == {A0, A1}
    assert all(e["expected"] for e in late)
    assert job.stderr.getvalue().splitlines()[-1] == (
        "elasticrun: job stopped: interrupted by SIGINT"
    )


def test_an_event_that_comes_before_the_job_has_begun_is_refused_and_sent_again(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop knows no job before `JobBegins`: it would lose an event in front of that."""
    taken: list[bool] = []
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    opened = ElasticDriver.open

    def open_with_an_early_event(driver: ElasticDriver) -> None:
        opened(driver)
        put = driver._mailbox.put

        def put_behind_an_event(message: Message) -> None:
            if isinstance(message, JobBegins):
                driver.ask_status(answers.put)
                event = AgentReady("a", 1, 1, "127.0.0.1", (20000,))
                taken.append(driver.deliver(event, lambda: None))
            put(message)

        driver._mailbox.put = put_behind_an_event

    monkeypatch.setattr(ElasticDriver, "open", open_with_an_early_event)
    job = start_job()
    job.cluster.until_workers(A0, A1)
    assert taken == [False]
    status = json.loads(answers.get(timeout=10))
    assert (status["run_id"], status["state"]) == (job.driver._setup.spec.run_id, "starting")


def test_asked_twice_it_waits_for_nobody(start_job: StartJob) -> None:
    cluster = Cluster()
    cluster.heeds_shutdown = False
    job = start_job(cluster=cluster, stop_grace=60.0)
    cluster.until_workers(A0, A1)
    began = time.monotonic()
    job.driver.request_stop("interrupted by SIGINT", 130)
    job.driver.request_stop("interrupted by SIGINT", 130)
    assert job.outcome().exit_code == 130
    assert time.monotonic() - began < 10.0


def test_agents_that_do_not_heed_their_shutdown_are_waited_for_with_a_bound(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "AGENT_EXIT_S", 0.2)
    cluster = Cluster()
    cluster.heeds_shutdown = False
    job = start_job(cluster=cluster, stop_grace=0.1)
    cluster.until_workers(A0, A1)
    job.driver.request_stop("enough", 143)
    assert job.outcome(within=15.0).exit_code == 143


def test_a_driver_can_be_stopped_before_it_has_any_host(start_job: StartJob) -> None:
    job = start_job((), start_np=1)
    job.driver.stop()
    job.driver.stop()
    assert job.outcome().exit_code == ExitCode.TERMINATED


# ---- starting ----------------------------------------------------------------------------


def make_driver(run_dir: RunDir, options: DriverOptions, starter: object = None) -> ElasticDriver:
    return ElasticDriver(
        DriverSetup(
            settings=Settings(),
            spec=JobSpec("run", ("true",), "/", {}, 30.0, 3),
            discovery=FixedDiscovery(()),
            starter=starter or Cluster(),  # type: ignore[arg-type]
            run_dir=run_dir,
            reporter=Reporter(io.StringIO()),
            options=options,
        )
    )


def test_a_constructor_starts_and_creates_nothing(tmp_path: Path) -> None:
    threads = threading.active_count()
    make_driver(RunDir(tmp_path / "state", "run"), DriverOptions())
    assert threading.active_count() == threads
    assert not (tmp_path / "state").exists()


def test_a_port_in_use_is_one_line_with_75_and_nothing_is_left(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "other", "run")
    threads = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as other:
        options = DriverOptions(bind_port=other.getsockname()[1])
        with pytest.raises(ClusterError, match="cannot listen") as caught:
            make_driver(run_dir, options).run()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
    assert set(threading.enumerate()) - threads == set()
    assert not run_dir.token_file.exists()
    assert not run_dir.endpoint_file.exists()


def test_a_state_folder_that_is_a_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(UsageError, match="--state-dir"):
        make_driver(RunDir(tmp_path / "state", "run"), DriverOptions()).run()


def test_the_token_is_private_and_in_no_log(start_job: StartJob) -> None:
    job = start_job()
    job.cluster.until_workers(A0, A1)
    assert job.run_dir.token_file.stat().st_mode & 0o777 == 0o600
    endpoint = json.loads(job.run_dir.endpoint_file.read_text())
    assert endpoint["url"] == job.driver.endpoint
    for text in (job.run_dir.events_file.read_text(), json.dumps(endpoint)):
        assert job.cluster.token not in text
    assert job.cluster.token not in job.stderr.getvalue()
