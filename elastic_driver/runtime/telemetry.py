"""OpenTelemetry: a job's trace and metrics, sent to a collector while the job runs.

It is on if OTEL_EXPORTER_OTLP_ENDPOINT, or that of one signal, is set, and needs the extra `otel`.
A thread of its own reads the event log and the status; nothing of the job waits for it, and the
queues are bounded. If the collector is away, the user sees one line. `runtime.otlp` knows
OpenTelemetry, and is imported by this thread only. Times are seconds.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from prometheus_client.core import Metric

from elastic_driver.policies.round_spans import RoundSpans
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.words.log_lines import read_line
from rendezvous.client_connections import is_loopback

if TYPE_CHECKING:
    from elastic_driver.runtime.otlp import Exporter

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"  # often with a key
SIGNALS = ("traces", "metrics")
INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"  # milliseconds
INTERVAL_S = 60.0
SOON_S = 0.5  # events often come together
STATUS_S = 5.0  # for the driver to answer with its status
LAST_S = 5.0  # for the collector to take what is left when the job is over


class TelemetrySettings(NamedTuple):
    """The signals that are sent, and where; the exporters read the other variables themselves."""

    endpoints: dict[str, str]  # by signal; scheme, host and port, to be shown
    interval: float = INTERVAL_S
    problem: str = ""  # why nothing is sent


def telemetry_settings(environ: Mapping[str, str]) -> TelemetrySettings | None:
    """Return what OpenTelemetry's variables ask for; None if they ask for nothing."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    endpoints = {}
    for signal in SIGNALS:
        own = environ.get(_of(signal, "ENDPOINT"))
        url = own or environ.get(ENDPOINT, "")
        if url and environ.get(f"OTEL_{signal.upper()}_EXPORTER", "otlp") != "none":
            endpoints[signal] = _shown(url)
    if not endpoints:
        return None
    problem, protocol = "", environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    if protocol != "http/protobuf":
        problem = f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}, and only http/protobuf is spoken"
    for signal, url in endpoints.items():
        secret = [name for name in (HEADERS, _of(signal, "HEADERS")) if environ.get(name)]
        if secret and _is_plain(url):
            problem = f"{secret[0]} would go to {url} in plain text; write https://"
    return TelemetrySettings(endpoints, _interval(environ.get(INTERVAL, "")), problem)


def _of(signal: str, what: str) -> str:
    return f"OTEL_EXPORTER_OTLP_{signal.upper()}_{what}"


def _is_plain(url: str) -> bool:
    """Return whether others on the way could read what is sent to a URL."""
    parts = urlsplit(url)
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")


def _shown(url: str) -> str:
    """Return a URL without what may be secret in it."""
    try:
        parts = urlsplit(url)
        port = "" if parts.port is None else f":{parts.port}"
        return f"{parts.scheme}://{parts.hostname}{port}"
    except ValueError:
        return "the collector"


def _interval(text: str) -> float:
    return float(text) / 1000 if text.isascii() and text.isdecimal() and int(text) else INTERVAL_S


class Telemetry:
    """The thread of one driver that sends; `close` ends it.

    Args:
        began: the beginning of the run, unix seconds.
        ask_status: has its argument called soon with the status document.
        families: returns the metrics of a status document.
        say: shows a line to the user; any thread may call it.
    """

    def __init__(
        self,
        settings: TelemetrySettings,
        *,
        run_id: str,
        began: float,
        log: EventLog,
        ask_status: Callable[[Callable[[bytes], None]], None],
        families: Callable[[bytes], Iterable[Metric]],
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._run_id, self._began = settings, run_id, began
        self._log, self._ask_status, self._families = log, ask_status, families
        self._say = say
        self._spans, self._last = RoundSpans(run_id, began), 0
        self._news, self._over = threading.Event(), threading.Event()
        self._last_status: bytes | None = None
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._failed = False  # the collector has not taken something; that was said
        self._exporter: Exporter | None = None

    def start(self) -> None:
        """Start the thread, or say why nothing is sent."""
        if self._settings.problem:
            self._say(f"OpenTelemetry: {self._settings.problem}; nothing is sent")
        else:
            self._thread.start()

    @property
    def busy(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def close(self, status: bytes | None) -> None:
        """Send what is left, with the metrics of this last status; wait for at most `LAST_S`."""
        if not self._thread.is_alive():
            return
        self._last_status = status
        self._over.set()
        self._news.set()
        self._thread.join(0.0 if self._failed else LAST_S)
        if self._thread.is_alive() and self._exporter is not None:
            self._not_taken(next(iter(self._settings.endpoints)), "does not answer")
            self._exporter.stop()

    def _run(self) -> None:
        try:
            from elastic_driver.runtime.otlp import Exporter  # noqa: PLC0415 - the extra `otel`
        except ImportError:
            self._say(
                "OpenTelemetry: the package is not installed, so nothing is sent; "
                f"pip install 'elastic-driver[otel]', or unset {ENDPOINT}"
            )
            return
        try:
            exporter = self._exporter = Exporter(
                self._settings.endpoints, self._run_id, self._began, self._not_taken
            )
        except Exception as error:  # a variable has a value that the exporters refuse
            self._say(f"OpenTelemetry: {type(error).__name__} in its variables; nothing is sent")
            return
        with self._log.listening(self._news.set):
            self._send_until_over(exporter)
        self._send_spans(exporter)
        if self._last_status is not None:
            exporter.send_metrics(self._families(self._last_status))
        exporter.finish()

    def _send_until_over(self, exporter: "Exporter") -> None:
        due = time.monotonic() + self._settings.interval
        while not self._over.is_set():
            self._news.wait(max(0.0, due - time.monotonic()))
            self._news.clear()
            self._send_spans(exporter)
            if time.monotonic() >= due:
                self._send_metrics(exporter)
                due = time.monotonic() + self._settings.interval
            self._over.wait(SOON_S)

    def _send_spans(self, exporter: "Exporter") -> None:
        for logged in self._log.since(self._last):
            self._last = logged.n
            if (line := read_line(logged.line)) is not None:
                for span in self._spans.feed(line):
                    exporter.send_span(span)

    def _send_metrics(self, exporter: "Exporter") -> None:
        answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._ask_status(answers.put)
        try:
            status = answers.get(timeout=STATUS_S)
        except queue.Empty:  # the driver has too much to do, or ends
            return
        exporter.send_metrics(self._families(status))

    def _not_taken(self, signal: str, answer: str) -> None:
        """Tell once that the collector does not take something; exporters' threads call it."""
        said, self._failed = self._failed, True
        if not said:
            where = self._settings.endpoints[signal]
            self._say(
                f"OpenTelemetry: {where} {answer}; the job goes on, and what fails is dropped"
            )
