"""OpenTelemetry: a job's trace, sent to a collector while the job runs.

It is on if OTEL_EXPORTER_OTLP_ENDPOINT, or that of traces, is set, and needs the extra `otel`. A
thread of its own reads the event log; nothing of the job waits for it, and the queue is bounded. If
the collector is away, the user sees one line. `exporter` knows OpenTelemetry, and is imported
by this thread only. A collector has the metrics from `GET /metrics`. Times are seconds.
"""

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from elastic_driver.features.telemetry.spans import RoundSpans
from elastic_driver.runtime.driver_parts import Run
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.words.log_lines import read_line
from rendezvous.client_connections import is_loopback

if TYPE_CHECKING:
    from elastic_driver.features.telemetry.exporter import Exporter

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"  # often with a key
SOON_S = 0.5  # events often come together
IDLE_S = 60.0  # between two looks at a log that has nothing new
LAST_S = 5.0  # for the collector to take what is left when the job is over


class TelemetrySettings(NamedTuple):
    """Where spans are sent; the exporter reads the other variables itself."""

    endpoint: str  # scheme, host and port, to be shown
    problem: str = ""  # why nothing is sent


def telemetry_settings(environ: Mapping[str, str]) -> TelemetrySettings | None:
    """Return what OpenTelemetry's variables ask for; None if they ask for nothing."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    url = environ.get(_of_traces("ENDPOINT")) or environ.get(ENDPOINT, "")
    if not url or environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return None
    problem, protocol = "", environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    if protocol != "http/protobuf":
        problem = f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}, and only http/protobuf is spoken"
    shown = _shown(url)
    secret = [name for name in (HEADERS, _of_traces("HEADERS")) if environ.get(name)]
    if secret and _is_plain(shown):
        problem = f"{secret[0]} would go to {shown} in plain text; write https://"
    return TelemetrySettings(shown, problem)


def _of_traces(what: str) -> str:
    return f"OTEL_EXPORTER_OTLP_TRACES_{what}"


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


def begin(run: Run) -> "Telemetry | None":
    """Begin to send the trace of a run; None if its variables ask for nothing."""
    settings = telemetry_settings(run.environ)
    if settings is None:
        return None
    telemetry = Telemetry(settings, run_id=run.run_id, began=run.began, log=run.log, say=run.say)
    telemetry.start()
    return telemetry


class Telemetry:
    """The thread of one driver that sends; `close` ends it.

    Args:
        began: the beginning of the run, unix seconds.
        say: shows a line to the user; any thread may call it.
    """

    def __init__(
        self,
        settings: TelemetrySettings,
        *,
        run_id: str,
        began: float,
        log: EventLog,
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._run_id, self._began = settings, run_id, began
        self._log, self._say = log, say
        self._spans, self._last = RoundSpans(run_id, began), 0
        self._news, self._over = threading.Event(), threading.Event()
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

    def close(self) -> None:
        """Send what is left; wait for at most `LAST_S`."""
        if not self._thread.is_alive():
            return
        self._over.set()
        self._news.set()
        self._thread.join(0.0 if self._failed else LAST_S)
        if self._thread.is_alive() and self._exporter is not None:
            self._not_taken("does not answer")
            self._exporter.stop()

    def _run(self) -> None:
        try:
            from elastic_driver.features.telemetry.exporter import Exporter  # noqa: PLC0415 - the extra `otel`
        except ImportError:
            self._say(
                "OpenTelemetry: the package is not installed, so nothing is sent; "
                f"pip install 'elastic-driver[otel]', or unset {ENDPOINT}"
            )
            return
        try:
            exporter = self._exporter = Exporter(self._run_id, self._began, self._not_taken)
        except Exception as error:  # a variable has a value that the exporters refuse
            self._say(f"OpenTelemetry: {type(error).__name__} in its variables; nothing is sent")
            return
        with self._log.listening(self._news.set):
            while not self._over.is_set():
                self._news.wait(IDLE_S)
                self._news.clear()
                self._send_spans(exporter)
                self._over.wait(SOON_S)
        self._send_spans(exporter)
        exporter.finish()

    def _send_spans(self, exporter: "Exporter") -> None:
        for logged in self._log.since(self._last):
            self._last = logged.n
            if (line := read_line(logged.line)) is not None:
                for span in self._spans.feed(line):
                    exporter.send(span)

    def _not_taken(self, answer: str) -> None:
        """Tell once that the collector does not take something; exporters' threads call it."""
        said, self._failed = self._failed, True
        if not said:
            self._say(
                f"OpenTelemetry: {self._settings.endpoint} {answer}; "
                "the job goes on, and what fails is dropped"
            )
