"""An OpenTelemetry collector: it takes OTLP over HTTP, and keeps what was sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """The spans that were sent, as their messages have them."""

    def __init__(self, status: int) -> None:
        self.status = status  # of every answer
        self.silent = False  # nothing is answered until the end
        self.over = threading.Event()
        self.requests: list[tuple[str, bytes, dict[str, str]]] = []  # path, body, headers
        self.url = ""

    def _messages(self, path: str, message: type[Any]) -> list[Any]:
        return [message.FromString(body) for at, body, _ in list(self.requests) if at == path]

    def spans(self, name: str) -> list[Any]:
        """The spans of this name, by their beginning."""
        found = [
            span
            for sent in self._messages("/v1/traces", ExportTraceServiceRequest)
            for resource in sent.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
            if span.name == name
        ]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def resources(self) -> list[dict[str, str]]:
        """The attributes of what has sent the spans."""
        return [
            attributes(resource.resource)
            for sent in self._messages("/v1/traces", ExportTraceServiceRequest)
            for resource in sent.resource_spans
        ]


def attributes(of: Any) -> dict[str, Any]:
    """The attributes of a message."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in of.attributes}


@contextmanager
def collector(status: int = 200) -> Iterator[Collector]:
    """Serve a collector on a free port of this machine."""
    kept = Collector(status)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            kept.requests.append((self.path, body, dict(self.headers)))
            if kept.silent:
                kept.over.wait(60.0)
                return
            self.send_response(kept.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        kept.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield kept
        finally:
            kept.over.set()
            server.shutdown()
            thread.join(10.0)
