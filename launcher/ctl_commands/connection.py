"""Requests of `elasticctl` to a job's driver: one at a time, and a stream of events.

A request that the driver refuses becomes a `UsageError` with the driver's own words; one without
an answer becomes a `ClusterError`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from elastic_driver.errors import ClusterError, UsageError
from launcher.ctl_commands.find import Target
from rendezvous.client import RendezvousClient
from rendezvous.errors import RequestError, UnreachableError

TIMEOUT_S = 10.0
SILENCE_S = 60.0  # in a stream; the driver sends a comment every 15 s


class JobConnection:
    """Sends requests to the driver of one job; each is tried once."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._client = RendezvousClient(target.url, target.token, TIMEOUT_S, repeats=False)

    def get(self, path: str) -> bytes:
        """GET a path; return the answer's body."""
        with self._errors_for_people():
            return self._client.get_bytes(path)

    def post(self, path: str, body: msgspec.Struct | dict[str, object]) -> bytes:
        """POST this document; return the answer's body."""
        with self._errors_for_people():
            return self._client.post_json(path, msgspec.json.encode(body))

    def follow(self, path: str) -> Iterator[bytes]:
        """Yield the data of a stream of server-sent events, until the driver closes it."""
        with self._errors_for_people():
            yield from self._client.follow(path, SILENCE_S)

    @contextlib.contextmanager
    def _errors_for_people(self) -> Iterator[None]:
        try:
            yield
        except RequestError as error:
            if error.code == "http_error":  # not an answer of a driver
                raise
            text = f"{error.message}; {error.hint}" if error.hint else error.message
            raise (UsageError if error.status < 500 else ClusterError)(text) from error
        except UnreachableError as error:
            target = self.target
            raise ClusterError(
                f"run {target.run_id} does not answer at {target.url} ({error.cause}); has it "
                "just ended, and can this host reach that address?"
            ) from error
