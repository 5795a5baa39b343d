"""A job's trace reaches a collector over HTTP, and no collector harms a job."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.ports import free_port

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from elastic_driver.features.telemetry.companion import (
    LAST_S,
    telemetry_settings,
)
from tests.runtime.jobs import JobUnderTest, StartJob
from tests.runtime.waiting import until
from tests.support.collector import Collector, attributes, collector

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(autouse=True)
def no_other_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def kept() -> Iterator[Collector]:
    with collector() as kept:
        yield kept


def ask_for(monkeypatch: pytest.MonkeyPatch, url: str, **others: str) -> dict[str, str]:
    """Set OpenTelemetry's variables as a user does; return all variables."""
    wanted = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "50", **others}
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    assert telemetry_settings(os.environ) is not None
    return dict(os.environ)


@pytest.mark.parametrize(
    ("url", "is_sent"),
    [
        ("http://collector:4318", False),
        ("http://10.0.0.1:4318", False),
        ("https://collector:4318", True),
        ("http://127.0.0.1:4318", True),
        ("http://localhost:4318", True),
    ],
)
def test_a_key_in_headers_leaves_this_machine_over_tls_only(url: str, is_sent: bool) -> None:
    environ = {ENDPOINT: url}
    plain: Any = telemetry_settings(environ)
    assert plain.problem == "", "the user's own URL says so, and nothing secret is sent"
    for name in ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"):
        found: Any = telemetry_settings({**environ, name: "api-key=secret"})
        if is_sent:
            assert found.problem == ""
        else:
            assert found.problem == f"{name} would go to {url} in plain text; write https://"


def trained_after_a_loss(job: JobUnderTest) -> None:
    """Two workers train, one is killed, and the other one goes on."""
    cluster = job.cluster
    cluster.until_workers("a.0.1", "a.1.1")
    cluster.ready("a.0.1", "a.1.1")
    cluster.world(1)
    cluster.stepped("a.0.1", 1)
    cluster.exits("a.1.1", -9)
    cluster.ready("a.0.1", left=1)
    cluster.world(2)


def over(job: JobUnderTest) -> float:
    """End the job; the seconds that its end takes. Nothing is sent any more."""
    job.driver.request_stop("the test is over", 143)
    began = time.monotonic()
    job.outcome()
    seconds = time.monotonic() - began
    until(lambda: not job.driver.companions[0].busy, "the thread ends")
    return seconds


def test_a_job_is_one_trace_with_a_span_for_each_round(
    start_job: StartJob, kept: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"OTEL_RESOURCE_ATTRIBUTES": "team=vision", "OTEL_EXPORTER_OTLP_HEADERS": "key=secret"}
    job = start_job(environ=ask_for(monkeypatch, kept.url, **named))
    trained_after_a_loss(job)
    over(job)
    rounds, (whole,) = kept.spans("round"), kept.spans("job")
    assert [attributes(span)["elastic.round"] for span in rounds] == [1, 2]
    first, second = rounds
    ready = ["worker_ready", "worker_ready"]
    assert [e.name for e in first.events][:4] == ["round_opened", *ready, "round_completed"]
    assert second.events[0].name == "worker_exited"
    assert [e.name for e in second.events].count("worker_ready") == 1
    assert attributes(second)["elastic.losses"] == 1
    lost = next(e for e in job.logged() if e["event"] == "worker_exited")["t"]
    assert second.start_time_unix_nano == pytest.approx(lost * 1e9, abs=1e4)
    assert {span.trace_id for span in rounds} == {whole.trace_id}
    assert {span.parent_span_id for span in rounds} == {whole.span_id}
    assert whole.status.code == 2, "the job was stopped"
    about = {"service.name": "elasticrun", "service.instance.id": "run", "team": "vision"}
    assert all(about.items() <= each.items() for each in kept.resources())
    assert all(headers["key"] == "secret" for _, _, headers in kept.requests)
    assert job.stderr.getvalue().count("OpenTelemetry") == 0


def lines(job: JobUnderTest) -> list[str]:
    return [line for line in job.stderr.getvalue().splitlines() if "OpenTelemetry" in line]


def test_a_collector_that_is_away_costs_a_job_one_line(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = f"http://user:secret@127.0.0.1:{free_port()}"
    job = start_job(environ=ask_for(monkeypatch, away, OTEL_EXPORTER_OTLP_TIMEOUT="1"))
    trained_after_a_loss(job)
    until(lambda: lines(job), "the user hears of it")
    assert over(job) < LAST_S
    (line,) = lines(job)
    assert "does not answer; the job goes on" in line
    assert "secret" not in job.stderr.getvalue()


def test_a_collector_that_refuses_is_quoted(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector(status=401) as kept:
        job = start_job(environ=ask_for(monkeypatch, kept.url))
        trained_after_a_loss(job)
        until(lambda: lines(job), "the user hears of it")
        over(job)
        assert [f"{kept.url} has answered 401" in line for line in lines(job)] == [True]


def test_a_collector_that_never_answers_does_not_hold_up_the_end(
    start_job: StartJob, kept: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.silent = True
    job = start_job(environ=ask_for(monkeypatch, kept.url, OTEL_EXPORTER_OTLP_TIMEOUT="60"))
    trained_after_a_loss(job)
    until(lambda: kept.requests, "a request waits for its answer")
    job.driver.request_stop("the test is over", 143)
    began = time.monotonic()
    job.outcome()
    assert time.monotonic() - began < LAST_S + 5.0
    assert len(lines(job)) == 1
    kept.over.set()
    until(lambda: not job.driver.companions[0].busy, "the thread ends")


def test_a_missing_package_is_one_clear_line(
    start_job: StartJob, kept: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "elastic_driver.features.telemetry.exporter", None)
    job = start_job(environ=ask_for(monkeypatch, kept.url))
    trained_after_a_loss(job)
    over(job)
    (line,) = lines(job)
    assert "pip install 'elastic-driver[otel]'" in line
    assert kept.requests == []


def test_a_value_that_the_exporters_refuse_is_one_line(
    start_job: StartJob, kept: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job(environ=ask_for(monkeypatch, kept.url, OTEL_BSP_MAX_QUEUE_SIZE="-1"))
    trained_after_a_loss(job)
    over(job)
    (line,) = lines(job)
    assert "nothing is sent" in line


@pytest.mark.parametrize(
    ("environ", "is_on"),
    [
        ({}, False),
        ({ENDPOINT: ""}, False),
        ({ENDPOINT: "http://c:4318"}, True),
        ({ENDPOINT: "http://c:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({ENDPOINT: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318/v1/metrics"}, False),
    ],
)
def test_it_is_on_only_if_a_variable_names_a_collector_of_traces(
    environ: dict[str, str], is_on: bool
) -> None:
    assert (telemetry_settings(environ) is not None) == is_on


def test_what_may_be_secret_in_a_url_is_not_shown() -> None:
    found: Any = telemetry_settings({ENDPOINT: "https://u:p@c:1/x?key=1"})
    assert found.endpoint == "https://c:1"


def test_another_protocol_is_not_spoken() -> None:
    found: Any = telemetry_settings({ENDPOINT: "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert "grpc" in found.problem
