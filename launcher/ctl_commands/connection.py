"""Requests to a job's driver, as `elasticctl` needs them: one at a time, and a stream of events.

What the driver refuses becomes a `UsageError` with its own words, what does not work a
`ClusterError`. Never uses a proxy. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import requests

from elastic_driver.errors import ClusterError, UsageError
from launcher.ctl_commands.find import Target
from rendezvous.auth import AUTHORIZATION, bearer
from rendezvous.calls import REQUEST_ID_HEADER, new_request_id, raise_for
from rendezvous.wire import decode_error

TIMEOUT_S = 10.0
SILENCE_S = 60.0  # in a stream; the driver says every 15 s that it is still there


class Connection:
    """Talks to one job."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._session = requests.Session()
        self._session.trust_env = False  # neither a proxy nor ~/.netrc is to see the token
        self._session.headers[AUTHORIZATION] = bearer(target.token)

    def get(self, path: str) -> bytes:
        """The body of the answer to a GET."""
        with self._send("GET", path) as response:
            return response.content

    def post(self, path: str, body: msgspec.Struct | dict[str, object]) -> bytes:
        """The body of the answer to a POST of this document."""
        with self._send("POST", path, msgspec.json.encode(body)) as response:
            return response.content

    def follow(self, path: str) -> Iterator[bytes]:
        """The data of a stream of server-sent events, until the driver closes it."""
        with self._send("GET", path, accept="text/event-stream", timeout=SILENCE_S) as response:
            try:
                for line in response.iter_lines(chunk_size=None):
                    if line.startswith(b"data: "):
                        yield line[len(b"data: ") :]
            except requests.RequestException as error:
                raise self._gone(error) from error

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        accept: str = "application/json",
        timeout: float = TIMEOUT_S,
    ) -> requests.Response:
        headers = {
            REQUEST_ID_HEADER: new_request_id(),
            "Accept": accept,
            "Content-Type": "application/json",
        }
        streams = accept == "text/event-stream"
        try:
            response = self._session.request(
                method,
                self.target.url + path,
                data=body,
                headers=headers,
                timeout=timeout,
                stream=streams,
                allow_redirects=False,
            )
        except requests.RequestException as error:
            raise self._gone(error) from error
        if response.status_code >= 400:
            self._refused(response.status_code, response.content)
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
