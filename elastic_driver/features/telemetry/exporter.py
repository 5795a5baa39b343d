"""Spans as OpenTelemetry's exporter sends them, by OTLP over HTTP.

A run has one trace, whichever of its drivers sends a part of it. Needs the extra `otel`.
"""

import hashlib
import logging
import secrets
from collections.abc import Callable
from typing import Any

import requests
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace.status import Status, StatusCode

from elastic_driver.features.telemetry.spans import Span

NAME = "elasticrun"
NotTaken = Callable[[str], None]  # called with what the collector has answered


class Exporter:
    """The exporter of one driver; `stop` may be called by any thread, the rest by one.

    Args:
        began: unix seconds; with the run's name it is the number of the trace.
        not_taken: called when the collector does not take something.
    """

    def __init__(self, run_id: str, began: float, not_taken: NotTaken) -> None:
        # The user hears of the collector in one line of ours.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        ours = {"service.name": NAME, "service.instance.id": run_id}
        given = OTELResourceDetector().detect().attributes
        resource = Resource.create({**ours, **given})
        self._not_taken, self._answer = not_taken, ""
        exporter = OTLPSpanExporter(session=self._session())
        self._spans = _Spans(_Telling(exporter, self._tell), resource, f"{run_id} {began:.3f}")

    def send(self, span: Span) -> None:
        """Put a span into the queue."""
        self._spans.send(span)

    def finish(self) -> None:
        """Send the spans in the queue, and nothing more."""
        self._spans.provider.shutdown()

    def stop(self) -> None:
        """End what is being sent; it is tried no more."""
        self._spans.exporter.shutdown()

    def _session(self) -> requests.Session:
        """Return a session that notes how the collector has answered."""
        session = requests.Session()

        def note(response: requests.Response, **_options: object) -> None:
            self._answer = f"has answered {response.status_code}"

        session.hooks["response"].append(note)
        return session

    def _tell(self) -> None:
        answer, self._answer = self._answer, ""
        self._not_taken(answer or "does not answer")


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
