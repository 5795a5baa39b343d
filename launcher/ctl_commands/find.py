"""Finds the running job that `elasticctl` talks to, and the least token that does.

A driver writes its address to its run's folder; while that address answers, the job runs. Another
program may have its port by now: it is known by its certificate, and gets no token. The job
is found by `--run-id`, by `--endpoint`, or as the only one that runs below the state directory. If
its journal is in etcd, a driver on another host may have the job, and etcd says which. Nothing is
started, changed or removed.
"""

import contextlib
import os
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.runtime.run_dir import (
    EVENTS_FILE,
    JOURNAL_FILE,
    Endpoint,
    RunDir,
    default_state_dir,
    read_endpoint,
)
from rendezvous.auth import Role, operator_token, read_credentials, reader_token
from rendezvous.client import RendezvousClient
from rendezvous.client_connections import is_loopback, parse_url
from rendezvous.errors import TokenError
from rendezvous.tls import ServerIdentity, WrongServerError

PROBE_S = 2.0  # for a driver to accept a connection, and to end a handshake


@dataclass(frozen=True)
class Where:
    """The options that choose a job."""

    state_dir: Path
    run_id: str | None = None
    endpoint: str | None = None
    token_file: Path | None = None
    journal: str | None = None  # etcd://HOST:PORT…
    role: Role = Role.READER  # that the token needs, or OPERATOR


class Target(NamedTuple):
    """A job to talk to."""

    run_id: str
    url: str
    token: str
    fingerprint: str = ""  # see `auth.Credentials`

    def client(self, timeout: float) -> RendezvousClient:
        """Return a client of the job's driver that tries each call once, for `timeout` seconds."""
        known_by = self.fingerprint
        return RendezvousClient(self.url, self.token, timeout, repeats=False, fingerprint=known_by)


def find(where: Where) -> Target:
    """Return the chosen job.

    Raises UsageError if the choice is not clear (several jobs run, no such name), ClusterError if
    no job runs, TokenError for a token that cannot be read.
    """
    if where.endpoint is not None:
        return _at(where, where.endpoint)
    if where.journal is not None and where.run_id is None:
        raise UsageError("--journal needs --run-id: the job's name in etcd")
    if where.journal is not None and where.run_id is not None:
        from launcher.ctl_commands.elsewhere import driver_in  # noqa: PLC0415 - see `_moved`

        return _least(Target(where.run_id, *driver_in(where.journal, where.run_id)), where.role)
    if where.run_id is not None and (moved := _moved(where.state_dir, where.run_id)) is not None:
        return _least(moved, where.role)
    chosen = _only_one(where.state_dir) if where.run_id is None else _named(where, where.run_id)
    if isinstance(chosen, Target):
        return _least(chosen, where.role)
    return _with_token(where, chosen, chosen.url)


def _with_token(where: Where, run: Endpoint, url: str) -> Target:
    """Return a run of the state directory with the token given, or the least one of its folder."""
    if where.token_file is not None:
        return Target(run.run_id, url, *read_credentials(where.token_file))
    folder = where.state_dir / run.run_id
    with contextlib.suppress(TokenError):  # of an older version: made of the driver's, below
        return Target(run.run_id, url, *read_credentials(folder / f"token-{where.role.value}"))
    return _least(Target(run.run_id, url, *read_credentials(folder / "token")), where.role)


def _least(target: Target, role: Role) -> Target:
    """Return a target with the token of this role in place of the driver's."""
    derived = operator_token if role is Role.OPERATOR else reader_token
    return target._replace(token=derived(target.token))


def _at(where: Where, url: str) -> Target:
    try:
        parse_url(url)
    except ValueError as error:
        raise UsageError(f"--endpoint: {error}") from None
    if where.token_file is not None:
        return Target(where.run_id or url, url, *read_credentials(where.token_file))
    for run in _runs(where.state_dir):
        if run.url == url.rstrip("/"):
            return _with_token(where, run, url)
    raise UsageError(
        f"no run in {where.state_dir} listens at {url}; name its token with --token-file"
    )


def _moved(state_dir: Path, run_id: str) -> Target | None:
    """Return the driver on another host that has taken over a run of this folder, if etcd knows it.

    The address in the folder does not answer then.
    """
    folder = state_dir / run_id
    if Path(run_id).name != run_id or not folder.is_dir():
        return None
    here = read_endpoint(folder)
    if (here is not None and _answers(here, folder)) or not RunDir(state_dir, run_id).unfinished:
        return None
    from launcher.ctl_commands.elsewhere import driver_in, journal_of  # noqa: PLC0415 - takes 0.2 s

    journal = journal_of(folder)
    return None if journal is None else Target(run_id, *driver_in(journal, run_id))


def _named(where: Where, run_id: str) -> Endpoint:
    folder = where.state_dir / run_id
    if Path(run_id).name != run_id or not folder.is_dir():
        raise UsageError(
            f"there is no run {run_id!r} in {where.state_dir}; is it in another --state-dir?"
        )
    run = read_endpoint(folder)
    log = folder / EVENTS_FILE
    if run is None and RunDir(where.state_dir, run_id).unfinished:  # its agents have given up
        raise ClusterError(_unfinished(run_id, where.state_dir, "its driver"))
    if run is None:
        told = f"; how it went: elasticctl report {shlex.quote(str(folder))}"
        raise ClusterError(f"run {run_id} is over{told * log.exists()}")
    if not _answers(run, folder):
        raise ClusterError(_silent(run, where.state_dir))
    return run


def _only_one(state_dir: Path) -> Endpoint | Target:
    runs = _runs(state_dir)
    running: list[Endpoint | Target] = [
        run for run in runs if _answers(run, state_dir / run.run_id)
    ]
    if not running:
        with contextlib.suppress(ClusterError):  # etcd is away, or names no driver
            running = [at for run in runs if (at := _moved(state_dir, run.run_id)) is not None]
    if len(running) == 1:
        return running[0]
    if running:
        listed = "".join(f"\n  {run.run_id}  {run.url}" for run in running)
        raise UsageError(f"{len(running)} jobs are running; choose one with --run-id:{listed}")
    left = "".join(f"\n  {_silent(run, state_dir)}" for run in runs)
    raise ClusterError(
        f"no job of this user is running below {state_dir}; was it started with another "
        f"--state-dir?{left}"
    )


def _answers(run: Endpoint, folder: Path) -> bool:
    """Return whether the run's driver accepts connections at its address now."""
    return _who(run, folder) == "driver"


def _who(run: Endpoint, folder: Path) -> Literal["driver", "other", "nobody"]:
    """Return who is at the run's address: its driver, another program or nobody.

    Nothing is sent but a handshake. A driver that is stopped, or very busy, does not end it; where
    its process is gone, another program does not.
    """
    parts = parse_url(run.url)
    identity = None
    with contextlib.suppress(TokenError, ValueError):  # told when the token is needed
        known_by = read_credentials(folder / "token").fingerprint
        identity = ServerIdentity(known_by) if known_by else None
    try:
        connection = socket.create_connection((str(parts.hostname), int(parts.port or 0)), PROBE_S)
    except OSError:
        return "nobody"
    with connection:
        try:
            if identity is not None:
                with identity.wrap(connection) as met:
                    identity.shake_hands(met)
        except WrongServerError:
            return "other"
        except OSError:
            gone = is_loopback(str(parts.hostname)) and not Path(f"/proc/{run.pid}").exists()
            return "other" if gone else "driver"
    return "driver"


def _silent(run: Endpoint, state_dir: Path) -> str:
    """Return why a run does not answer at its address."""
    is_other = _who(run, state_dir / run.run_id) == "other"
    other = ", where another program listens now" * is_other
    if Path(f"/proc/{run.pid}").exists():
        return (
            f"run {run.run_id} does not answer at {run.url}{other}; its driver would be process "
            f"{run.pid}: is it stopped, or on another machine?"
        )
    gone = f"its driver (process {run.pid}, {run.url}{other})"
    if RunDir(state_dir, run.run_id).unfinished:
        return _unfinished(run.run_id, state_dir, gone)
    return (
        f"run {run.run_id} is over: {gone} ended without cleaning up; "
        f"{state_dir / run.run_id / 'endpoint.json'} may be removed"
    )


def _unfinished(run_id: str, state_dir: Path, driver: str) -> str:
    with contextlib.suppress(OSError):
        holder = RunDir(state_dir, run_id).lock.holder
        if holder is not None and holder.lives:
            return (
                f"another driver of run {run_id} (process {holder.pid}) is starting; try again soon"
            )
    where = "" if state_dir == default_state_dir(os.environ) else f"--state-dir {state_dir} "
    again = f"elasticrun --resume {where}--run-id {run_id}"
    from launcher.launch.resume import nobody_lives  # noqa: PLC0415 - see `_moved`

    if nobody_lives(RunDir(state_dir, run_id)):
        return (
            f"run {run_id} has no driver: {driver} has died, and its agents and workers have ended "
            f"since; begin again from its newest checkpoint: {again}"
        )
    return f"run {run_id} has no driver: {driver} has died; go on with the job: {again}"


def _runs(state_dir: Path) -> list[Endpoint]:
    """Return every run below the state directory that has an address, by name."""
    try:
        names = sorted(os.listdir(state_dir))
    except OSError:
        return []
    return [run for run in (read_endpoint(state_dir / name) for name in names) if run is not None]


def run_folder(state_dir: Path, run_id: str | None) -> Path | None:
    """Return the folder of the run that is meant: the one named, else the only one that runs.

    If none runs, the newest, by its event log; None if there is none. Raises UsageError if several
    run, or for a name that is none.
    """
    if run_id is not None:
        if Path(run_id).name != run_id:
            raise UsageError(f"{run_id!r} is no name of a run")
        return state_dir / run_id
    with contextlib.suppress(ClusterError):
        return state_dir / _only_one(state_dir).run_id
    written: dict[Path, float] = {}
    for name in (JOURNAL_FILE, EVENTS_FILE):  # a run without events is as old as its journal
        written |= {file.parent: file.stat().st_mtime for file in state_dir.glob(f"*/{name}")}
    return max(written, key=written.__getitem__, default=None)


def file_of_run(
    given: Path | None, name: str, holds: str, state_dir: Path | None, run_id: str | None
) -> Path:
    """Return the file `name`: the one given, or that of the run that is meant (`run_folder`).

    Raises UsageError if there is none; `holds` says what the file is.
    """
    if given is not None:
        return given / name if given.is_dir() else given
    folder = (state_dir or default_state_dir(os.environ)).absolute()
    found = run_folder(folder, run_id)
    if found is None:
        raise UsageError(f"no run below {folder} has {holds}; is it in another --state-dir?")
    return found / name
