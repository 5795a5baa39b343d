"""Spans and metrics as OpenTelemetry's exporters send them, by OTLP over HTTP.

The metrics are those of `GET /metrics`: a counter is a monotonic sum, and a histogram keeps its
buckets. A run has one trace, whichever of its drivers sends a part of it. Needs the extra `otel`.
"""

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import requests
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace.status import Status, StatusCode
from prometheus_client.core import Metric

from elastic_driver.policies.round_spans import Span

NAME = "elasticrun"
# Called with the signal, and what the collector has answered.
NotTaken = Callable[[str, str], None]


class Exporter:
    """The exporters of one driver; `stop` may be called by any thread, the rest by one.

    Args:
        signals: those to be sent.
        began: unix seconds; with the run's name it is the number of the trace.
        not_taken: called when the collector does not take something.
    """

    def __init__(
        self, signals: Iterable[str], run_id: str, began: float, not_taken: NotTaken
    ) -> None:
        # The user hears of the collector in one line of ours.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        ours = {"service.name": NAME, "service.instance.id": run_id}
        given = OTELResourceDetector().detect().attributes
        self._resource = Resource.create({**ours, **given})
        self._start, self._not_taken = time.time_ns(), not_taken
        self._spans: _Spans | None = None
        self._metrics: Any = None
        self._answers: dict[str, str] = {}
        if "traces" in signals:
            exporter = OTLPSpanExporter(session=self._session("traces"))
            told = _Telling(exporter, lambda: self._tell("traces"))
            self._spans = _Spans(told, self._resource, f"{run_id} {began:.3f}")
        if "metrics" in signals:
            self._metrics = OTLPMetricExporter(session=self._session("metrics"))

    def send_span(self, span: Span) -> None:
        """Put a span into the queue."""
        if self._spans is not None:
            self._spans.send(span)

    def send_metrics(self, families: Iterable[Metric]) -> None:
        """Send metrics now; takes as long as the exporter's timeout if nobody takes them."""
        if self._metrics is None:
            return
        metrics = [each for family in families for each in _converted(family, self._start)]
        scope = sdk.ScopeMetrics(InstrumentationScope(NAME), metrics, "")
        data = sdk.MetricsData([sdk.ResourceMetrics(self._resource, [scope], "")])
        if self._metrics.export(data) is not sdk.MetricExportResult.SUCCESS:
            self._tell("metrics")

    def finish(self) -> None:
        """Send the spans in the queue, and nothing more."""
        if self._spans is not None:
            self._spans.provider.shutdown()
        if self._metrics is not None:
            self._metrics.shutdown()

    def stop(self) -> None:
        """End what is being sent; it is tried no more."""
        if self._metrics is not None:
            self._metrics.shutdown()
        if self._spans is not None:
            self._spans.exporter.shutdown()

    def _session(self, signal: str) -> requests.Session:
        """Return a session that notes how the collector has answered."""
        session = requests.Session()

        def note(response: requests.Response, **_options: object) -> None:
            self._answers[signal] = f"has answered {response.status_code}"

        session.hooks["response"].append(note)
        return session

    def _tell(self, signal: str) -> None:
        self._not_taken(signal, self._answers.pop(signal, "does not answer"))


class _Telling:
    """An exporter of spans that tells of each batch that was not taken."""

    def __init__(self, exporter: Any, not_taken: Callable[[], None]) -> None:
        self._exporter, self._not_taken = exporter, not_taken
        self.force_flush = exporter.force_flush
        self.shutdown = exporter.shutdown

    def export(self, spans: Any) -> Any:
        """Send a batch."""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._not_taken()
        return result


class _Ids:
    """Numbers of spans: the job's own for the span of the job, random ones for its rounds."""

    def __init__(self, run: str) -> None:
        digest = int(hashlib.blake2b(run.encode(), digest_size=24).hexdigest(), 16)
        self.trace_id, self.job_id = digest >> 64, digest % (1 << 64)
        self.of_job = False  # the next span is that of the job

    def generate_trace_id(self) -> int:
        """Return the number of the run's trace."""
        return self.trace_id

    def generate_span_id(self) -> int:
        """Return the number of the next span."""
        return self.job_id if self.of_job else secrets.randbits(64) or 1

    def is_trace_id_random(self) -> bool:
        """Return whether the number has as many random bits as the standard asks for."""
        return True


class _Spans:
    """The trace of one run, in a bounded queue with a thread that sends it."""

    def __init__(self, exporter: _Telling, resource: Any, run: str) -> None:
        self._ids, self.exporter = _Ids(run), exporter
        self.provider = TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self.provider.get_tracer(NAME)
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        job = trace.SpanContext(self._ids.trace_id, self._ids.job_id, True, flags)
        self._below_job = trace.set_span_in_context(trace.NonRecordingSpan(job))

    def send(self, span: Span) -> None:
        """Put a span into the queue; a full one drops its oldest."""
        self._ids.of_job = span.name == "job"
        sent = self._tracer.start_span(
            span.name,
            context=None if self._ids.of_job else self._below_job,
            attributes=span.attributes,
            start_time=_ns(span.t),
        )
        for event in span.events:
            sent.add_event(event.name, event.attributes, _ns(event.t))
        if span.failed:
            sent.set_status(Status(StatusCode.ERROR))
        sent.end(_ns(span.end))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _converted(family: Metric, start: int) -> Iterator[Any]:
    """Yield a family of Prometheus as OpenTelemetry's metric; of an empty one, nothing."""
    if not family.samples:
        return
    now, cumulative = time.time_ns(), sdk.AggregationTemporality.CUMULATIVE
    name, data = family.name, None
    if family.type == "histogram":
        data = sdk.Histogram(list(_histograms(family, start, now)), cumulative)
    else:
        points = [
            sdk.NumberDataPoint(sample.labels, start, now, sample.value)
            for sample in family.samples
        ]
        counter = family.type == "counter"
        data = sdk.Sum(points, cumulative, True) if counter else sdk.Gauge(points)
        name = family.name if counter else family.samples[0].name
    yield sdk.Metric(name, family.documentation, "", data)


def _histograms(family: Metric, start: int, now: int) -> Iterator[Any]:
    """Yield a point for each set of labels, from Prometheus' cumulative buckets."""
    found: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = sample.labels.get("le") or sample.name.removeprefix(f"{family.name}_")
        found.setdefault(tuple(labels.items()), {})[key] = sample.value
    for labels_of, values in found.items():
        yield _histogram(dict(labels_of), values, start, now)


def _histogram(labels: Mapping[str, str], values: dict[str, float], start: int, now: int) -> Any:
    bounds = [bound for bound in values if bound not in ("count", "sum", "+Inf")]
    totals = [int(values[bound]) for bound in (*bounds, "+Inf")]
    counts = [total - before for total, before in zip(totals, [0, *totals], strict=False)]
    return sdk.HistogramDataPoint(
        attributes=labels,
        start_time_unix_nano=start,
        time_unix_nano=now,
        count=totals[-1],
        sum=values.get("sum", 0.0),
        bucket_counts=counts,
        explicit_bounds=[float(bound) for bound in bounds],
        min=None,
        max=None,
    )
