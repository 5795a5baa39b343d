"""Requests to a job's driver, as `elasticctl` needs them: one at a time, and a stream of events.

What the driver refuses becomes a `UsageError` with its own words, what does not work a
`ClusterError`. Never uses a proxy. Times are seconds.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import msgspec

from elastic_driver.errors import ClusterError, UsageError
from launcher.control.find import Target
from rendezvous.auth import AUTHORIZATION, bearer
from rendezvous.calls import REQUEST_ID_HEADER, new_request_id, parse_url, raise_for
from rendezvous.wire import decode_error

TIMEOUT_S = 10.0
SILENCE_S = 60.0  # in a stream; the driver says every 15 s that it is still there
MAX_BODY_BYTES = 256 << 20
MAX_LINE_BYTES = 4 << 20


class Connection:
    """Talks to one job."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get(self, path: str) -> bytes:
        """The body of the answer to a GET."""
        return self._call("GET", path, None)

    def post(self, path: str, body: msgspec.Struct | dict[str, object]) -> bytes:
        """The body of the answer to a POST of this document."""
        return self._call("POST", path, msgspec.json.encode(body))

    def follow(self, path: str) -> Iterator[bytes]:
        """The data of a stream of server-sent events, until the driver closes it."""
        connection = self._open(SILENCE_S)
        try:
            response = self._send(connection, "GET", path, None, Accept="text/event-stream")
            while line := response.readline(MAX_LINE_BYTES):
                if line.startswith(b"data: "):
                    yield line[len(b"data: ") :].rstrip(b"\n")
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from error
        finally:
            connection.close()

    def _call(self, method: str, path: str, body: bytes | None) -> bytes:
        connection = self._open(TIMEOUT_S)
        try:
            return self._send(connection, method, path, body).read(MAX_BODY_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from error
        finally:
            connection.close()

    def _open(self, timeout: float) -> http.client.HTTPConnection:
        parts = parse_url(self.target.url)
        return http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=timeout)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        **headers: str,
    ) -> http.client.HTTPResponse:
        always = {
            AUTHORIZATION: bearer(self.target.token),
            REQUEST_ID_HEADER: new_request_id(),
            "Content-Type": "application/json",
        }
        connection.request(method, path, body, {**always, **headers})
        response = connection.getresponse()
        if response.status >= 400:
            self._refused(response.status, response.read(MAX_BODY_BYTES))
        return response

    def _refused(self, status: int, body: bytes) -> None:
        """Raise what an answer that is no success stands for."""
        try:
            detail = decode_error(body).error
        except msgspec.DecodeError:
            detail = None
        if detail is None or status == 401:
            raise_for(status, body, self.target.url)
            return
        text = f"{detail.message}; {detail.hint}" if detail.hint else detail.message
        raise UsageError(text) if status < 500 else ClusterError(text)

    def _gone(self, error: Exception) -> ClusterError:
        target = self.target
        return ClusterError(
            f"run {target.run_id} does not answer at {target.url} ({error or type(error).__name__})"
            "; has it just ended, and can this host reach that address?"
        )
