"""Finds the running job that `elasticctl` talks to, and its token; sends requests to its driver.

A driver writes its address to its run's folder; while that address answers, the job runs. The job
is found by `--run-id`, by `--endpoint`, or as the only one that runs below the state directory.
Nothing is started or changed; what a dead driver has left is never removed.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.runtime.run_dir import Endpoint
from rendezvous.auth import read_token_file
from rendezvous.client import RendezvousClient, parse_url
from rendezvous.errors import RequestError, UnreachableError

PROBE_S = 2.0  # for a driver to take a connection
TIMEOUT_S = 10.0
SILENCE_S = 60.0  # in a stream; the driver sends a comment every 15 s


@dataclass(frozen=True)
class Where:
    """The options that say which job is meant."""

    state_dir: Path
    run_id: str | None = None
    endpoint: str | None = None
    token_file: Path | None = None


@dataclass(frozen=True)
class Target:
    """A job to talk to."""

    run_id: str
    url: str
    token: str


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, with the address of its driver."""

    folder: Path
    endpoint: Endpoint

    @property
    def answers(self) -> bool:
        """Return whether a process accepts connections at that address now."""
        parts = parse_url(self.endpoint.url)
        address = (str(parts.hostname), int(parts.port or 0))
        try:
            socket.create_connection(address, timeout=PROBE_S).close()
        except OSError:
            return False
        return True


def find(where: Where) -> Target:
    """Return the job that is meant.

    Raises UsageError if that is not clear (several run, no such name), ClusterError if none
    runs, TokenError for a token that cannot be read.
    """
    if where.endpoint is not None:
        return _at(where, where.endpoint)
    run = _only_one(where) if where.run_id is None else _named(where, where.run_id)
    return Target(
        run.endpoint.run_id,
        run.endpoint.url,
        read_token_file(where.token_file or run.folder / "token"),
    )


def _at(where: Where, url: str) -> Target:
    try:
        parse_url(url)
    except ValueError as error:
        raise UsageError(f"--endpoint: {error}") from None
    if where.token_file is not None:
        return Target(where.run_id or url, url, read_token_file(where.token_file))
    for run in _runs(where.state_dir):
        if run.endpoint.url == url.rstrip("/"):
            return Target(run.endpoint.run_id, url, read_token_file(run.folder / "token"))
    raise UsageError(
        f"no run in {where.state_dir} listens at {url}; name its token with --token-file"
    )


def _named(where: Where, run_id: str) -> RunFolder:
    folder = where.state_dir / run_id
    if Path(run_id).name != run_id or not folder.is_dir():
        raise UsageError(
            f"there is no run {run_id!r} in {where.state_dir}; is it another --state-dir?"
        )
    run = _read(folder)
    if run is None:
        log = folder / "events.jsonl"
        told = f"; what happened stands in {log}" if log.exists() else ""
        raise ClusterError(f"run {run_id} is over{told}")
    if not run.answers:
        raise ClusterError(_silent(run))
    return run


def _only_one(where: Where) -> RunFolder:
    runs = _runs(where.state_dir)
    running = [run for run in runs if run.answers]
    if len(running) == 1:
        return running[0]
    if running:
        listed = "".join(f"\n  {r.endpoint.run_id}  {r.endpoint.url}" for r in running)
        raise UsageError(f"{len(running)} jobs are running; choose one with --run-id:{listed}")
    left = "".join(f"\n  {_silent(run)}" for run in runs)
    raise ClusterError(
        f"no job of this user is running below {where.state_dir}; was it started with another "
        f"--state-dir?{left}"
    )


def _silent(run: RunFolder) -> str:
    """Return why a run does not answer at the address it names."""
    found = run.endpoint
    if Path(f"/proc/{found.pid}").exists():
        return (
            f"run {found.run_id} does not answer at {found.url}; its driver would be process "
            f"{found.pid}: is it stopped, or on another machine?"
        )
    return (
        f"run {found.run_id} is over: its driver (process {found.pid}, {found.url}) ended without "
        f"cleaning up; {run.folder / 'endpoint.json'} may be removed"
    )


def _runs(state_dir: Path) -> list[RunFolder]:
    """Return every run below the state directory that names an address, by name."""
    try:
        names = sorted(os.listdir(state_dir))
    except OSError:
        return []
    found = (_read(state_dir / name) for name in names)
    return [run for run in found if run is not None]


def _read(folder: Path) -> RunFolder | None:
    """Return the run in this folder; None if it names no usable address."""
    try:
        content = (folder / "endpoint.json").read_bytes()
        endpoint = msgspec.json.decode(content, type=Endpoint)
        parse_url(endpoint.url)
    except (OSError, msgspec.DecodeError, ValueError):
        return None
    return RunFolder(folder, endpoint)


# ---- requests ----------------------------------------------------------------------------


class JobConnection:
    """Sends requests to the driver of one job; each is tried once.

    A request that the driver refuses becomes a `UsageError` with the driver's own words, one
    without an answer a `ClusterError`.
    """

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
