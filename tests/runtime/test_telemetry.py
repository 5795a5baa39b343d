"""A job's trace and metrics reach a collector over HTTP, and no collector harms a job."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.ports import free_port

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from elastic_driver.runtime.telemetry import (
    LAST_S,
    TelemetrySettings,
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


def ask_for(monkeypatch: pytest.MonkeyPatch, url: str, **others: str) -> TelemetrySettings:
    """Set OpenTelemetry's variables as a user does; what they ask for."""
    wanted = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "50", **others}
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    settings = telemetry_settings(os.environ)
    assert settings is not None
    return settings


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
    until(lambda: not job.driver.sends_telemetry, "the thread ends")
    return seconds


def number(point: Any) -> float:
    return float(getattr(point, point.WhichOneof("value")))


def test_a_job_is_one_trace_with_a_span_for_each_round(
    start_job: StartJob, kept: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"OTEL_RESOURCE_ATTRIBUTES": "team=vision", "OTEL_EXPORTER_OTLP_HEADERS": "key=secret"}
    job = start_job(telemetry=ask_for(monkeypatch, kept.url, **named))
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


def test_the_metrics_are_those_of_the_scrape(
    start_job: StartJob, kept: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = {"OTEL_METRIC_EXPORT_INTERVAL": "100"}
    job = start_job(telemetry=ask_for(monkeypatch, kept.url, **often))
    trained_after_a_loss(job)
    text = job.cluster.client.get_bytes("/metrics").decode()
    scraped = {f.name: f for f in text_string_to_metric_families(text) if f.samples}
    seen = len([at for at, _, _ in kept.requests if at == "/v1/metrics"])
    until(
        lambda: len([at for at, _, _ in list(kept.requests) if at == "/v1/metrics"]) > seen + 1,
        "metrics are sent again and again",
    )
    sent = kept.metrics()
    assert set(sent) == set(scraped)
    for name, family in scraped.items():
        if family.type == "counter":
            assert sent[name].sum.is_monotonic
            assert sent[name].sum.aggregation_temporality == 2, "cumulative"
        assert sent[name].description == family.documentation
    exited = {attributes(p)["event"]: p for p in sent["elastic_events"].sum.data_points}
    assert number(exited["worker_exited"]) == 1.0
    assert number(sent["elastic_world_size"].gauge.data_points[0]) == 1.0
    histogram = sent["elastic_round_duration_seconds"].histogram.data_points[0]
    buckets = [s for s in scraped["elastic_round_duration_seconds"].samples if "le" in s.labels]
    assert histogram.count == sum(histogram.bucket_counts) == 2
    assert [*map(float, histogram.explicit_bounds), float("inf")] == [
        float(s.labels["le"]) for s in buckets
    ]
    assert histogram.bucket_counts[0] == buckets[0].value
    over(job)


def test_the_last_metrics_are_sent_when_the_job_is_over(
    start_job: StartJob, kept: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job(telemetry=ask_for(monkeypatch, kept.url))
    trained_after_a_loss(job)
    assert kept.metrics() == {}, "the interval is a minute"
    over(job)
    failures = kept.metrics()["elastic_worker_failures"].sum.data_points[0]
    assert number(failures) == 1.0


def lines(job: JobUnderTest) -> list[str]:
    return [line for line in job.stderr.getvalue().splitlines() if "OpenTelemetry" in line]


def test_a_collector_that_is_away_costs_a_job_one_line(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = f"http://user:secret@127.0.0.1:{free_port()}"
    short = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1", "OTEL_METRIC_EXPORT_INTERVAL": "50"}
    job = start_job(telemetry=ask_for(monkeypatch, away, **short))
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
        job = start_job(telemetry=ask_for(monkeypatch, kept.url))
        trained_after_a_loss(job)
        until(lambda: lines(job), "the user hears of it")
        over(job)
        assert [f"{kept.url} has answered 401" in line for line in lines(job)] == [True]


def test_a_collector_that_never_answers_does_not_hold_up_the_end(
    start_job: StartJob, kept: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.silent = True
    job = start_job(telemetry=ask_for(monkeypatch, kept.url, OTEL_EXPORTER_OTLP_TIMEOUT="60"))
    trained_after_a_loss(job)
    until(lambda: kept.requests, "a request waits for its answer")
    job.driver.request_stop("the test is over", 143)
    began = time.monotonic()
    job.outcome()
    assert time.monotonic() - began < LAST_S + 5.0
    assert len(lines(job)) == 1
    kept.over.set()
    until(lambda: not job.driver.sends_telemetry, "the thread ends")


def test_a_missing_package_is_one_clear_line(
    start_job: StartJob, kept: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "elastic_driver.runtime.otlp", None)
    job = start_job(telemetry=ask_for(monkeypatch, kept.url))
    trained_after_a_loss(job)
    over(job)
    (line,) = lines(job)
    assert "pip install 'elastic-driver[otel]'" in line
    assert kept.requests == []


def test_a_value_that_the_exporters_refuse_is_one_line(
    start_job: StartJob, kept: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job(telemetry=ask_for(monkeypatch, kept.url, OTEL_BSP_MAX_QUEUE_SIZE="-1"))
    trained_after_a_loss(job)
    over(job)
    (line,) = lines(job)
    assert "nothing is sent" in line


@pytest.mark.parametrize(
    ("environ", "signals"),
    [
        ({}, None),
        ({ENDPOINT: ""}, None),
        ({ENDPOINT: "http://c:4318"}, ["traces", "metrics"]),
        ({ENDPOINT: "http://c:4318", "OTEL_SDK_DISABLED": "true"}, None),
        ({ENDPOINT: "http://c:4318", "OTEL_METRICS_EXPORTER": "none"}, ["traces"]),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318/v1/metrics"}, ["metrics"]),
    ],
)
def test_it_is_on_only_if_a_variable_names_a_collector(
    environ: dict[str, str], signals: list[str] | None
) -> None:
    found = telemetry_settings(environ)
    assert (None if found is None else list(found.endpoints)) == signals


@pytest.mark.parametrize(("text", "seconds"), [("500", 0.5), ("", 60.0), ("x", 60.0), ("0", 60.0)])
def test_the_interval_of_metrics_is_that_of_the_variable(text: str, seconds: float) -> None:
    environ = {ENDPOINT: "https://u:p@c:1/x?key=1", "OTEL_METRIC_EXPORT_INTERVAL": text}
    found: Any = telemetry_settings(environ)
    assert found.interval == seconds
    assert set(found.endpoints.values()) == {"https://c:1"}, "secrets are not shown"


def test_another_protocol_is_not_spoken() -> None:
    found: Any = telemetry_settings({ENDPOINT: "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert "grpc" in found.problem
