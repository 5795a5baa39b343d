"""What the subcommands of `elasticbrain` do.

`serve` runs a Brain, `status` and `forget` ask the one of a folder, `monitor` brings the load of
machines into the statistics database, and `replay` plays recorded jobs through two algorithms.
"""

import argparse
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from elastic_driver.brain.algorithm import GROUP, Algorithm, HostView, Plan, View
from elastic_driver.brain.monitoring import Monitor, MonitorOptions
from elastic_driver.console import say
from elastic_driver.contract import STATUS_PATH
from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.options import whole
from elastic_driver.runtime.discovery import parse_hosts
from elastic_driver.words import printable
from launcher.backends.base import MONITORS, load
from launcher.brain import statistics_reader as statistics
from launcher.brain.setup import FORGET_PATH, BrainFolder, folder_of, setup_of
from launcher.ctl_commands.job_text import table
from launcher.edge import handled
from rendezvous.auth import read_credentials, reader_token
from rendezvous.client import RendezvousClient
from rendezvous.errors import RequestError, UnreachableError

ANSWER_S = 5.0
_EXITS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}


# ---- serve, status and forget --------------------------------------------------------------


def run_serve(given: argparse.Namespace) -> int:
    """Run a Brain until a signal; return the exit status."""
    from launcher.brain.brain_service import BrainService  # noqa: PLC0415 - only now aiohttp is needed

    setup = setup_of(given, _say)
    try:
        service = BrainService(setup)
        with handled(_EXITS, lambda number: service.stop(_EXITS[signal.Signals(number)])):
            return service.run()
    finally:
        setup.folder.close()


def run_status(given: argparse.Namespace) -> int:
    """Print the status of the Brain of a folder; raises ClusterError if none runs there."""
    document = ask(folder_of(given))
    print(document.decode() if given.json else render(msgspec.json.decode(document)))
    return os.EX_OK


def ask(folder: BrainFolder) -> bytes:
    """Return the status document of the Brain; raises ClusterError if none runs there."""
    with _client(folder, reader_token) as client:
        return client.get_bytes(STATUS_PATH)


def run_forget(given: argparse.Namespace) -> int:
    """Have the Brain free the slots of a silent job; raises UsageError if it has no such job."""
    with _client(folder_of(given), str) as client:
        try:
            client.post_json(FORGET_PATH.format(job=quote(given.job, safe="")), b"{}")
        except RequestError as error:
            if error.status not in (404, 409):
                raise
            raise UsageError(f"{error.message}; {error.hint}") from error
    return os.EX_OK


def _say(line: str) -> None:
    say(f"elasticbrain: {line}")


@contextlib.contextmanager
def _client(folder: BrainFolder, derived: Callable[[str], str]) -> Iterator[RendezvousClient]:
    """Return a client of the Brain of a folder, with a token derived from the administrator's.

    Raises ClusterError if it does not answer.
    """
    if (url := folder.read_endpoint()) is None:
        raise ClusterError(
            f"no Brain runs in {folder.path}; start it (elasticbrain serve), or give its "
            "--state-dir"
        )
    found = read_credentials(folder.admin_token_file)
    token, known_by = derived(found.token), found.fingerprint
    with RendezvousClient(url, token, ANSWER_S, repeats=False, fingerprint=known_by) as client:
        try:
            yield client
        except UnreachableError as error:
            raise ClusterError(
                f"the Brain at {url} does not answer ({error.cause}); start it again with the "
                f"same folder: elasticbrain serve --state-dir {folder.path}"
            ) from error


def render(document: dict[str, Any]) -> str:
    """Return the document as two tables; nothing in them controls a terminal."""
    hosts = [(h["host"], str(h["slots"]), str(h["granted"])) for h in document["hosts"]]
    jobs = [
        (
            job["job"],
            job["state"],
            f"{job['weight']:g}",
            _limits(job),
            str(sum(job["granted"].values())),
            " ".join(f"{host}:{slots}" for host, slots in job["granted"].items()) or "waits",
            _step_times(job["speeds"]),
            job["reason"],
        )
        for job in document["jobs"]
    ]
    parts = [table(("HOST", "SLOTS", "GRANTED"), hosts)]
    head = ("JOB", "STATE", "WEIGHT", "LIMITS", "SLOTS", "WHERE", "STEP TIMES", "WHY")
    return printable("\n\n".join([*parts, table(head, jobs)]))


def _limits(job: dict[str, Any]) -> str:
    """Return the numbers of workers that a job may have: "2 to 8", "2 or more", "4 (held)"."""
    if job["held"] is not None:
        return f"{job['held']} (held)"
    return f"{job['min']} or more" if job["max"] is None else f"{job['min']} to {job['max']}"


def _step_times(speeds: list[dict[str, Any]]) -> str:
    """Return the measured seconds of a step with each number of workers: "2: 0.51, 4: 0.3 s".

    A number that was measured on different numbers of hosts has them, too.
    """
    sizes = [each["size"] for each in speeds]
    where = [f" on {e['hosts']}" if sizes.count(e["size"]) > 1 else "" for e in speeds]
    times = [f"{e['size']}{on}: {e['step_time']:.3g}" for e, on in zip(speeds, where, strict=True)]
    return f"{', '.join(times)} s" if times else "-"


# ---- monitor -------------------------------------------------------------------------------

INTERVAL_S = 5.0
MOST_PORT = 65535


def run_monitor(given: argparse.Namespace) -> int:
    """Look and write until a signal; return the exit status."""
    port = _whole("--port", given.port)
    if port is not None and port > MOST_PORT:
        raise UsageError(f"--port {port} is no port; name one up to {MOST_PORT}")
    options = MonitorOptions(
        hosts=parse_hosts(given.hosts) if given.hosts is not None else (),
        slots=_whole("--slots-per-host", given.slots_per_host),
        port=port,
        ca=given.tls_ca,
        insecure=given.insecure,
    )
    monitor: Monitor = load(MONITORS, given.source)(options)
    address = statistics.address_of(given.stats_db, new=True)
    from elastic_driver.brain.store.database import Database  # noqa: PLC0415 - the extra

    watch = Watch(monitor, Database(address), _say)
    with handled(_EXITS, lambda number: watch.stop(_EXITS[signal.Signals(number)])):
        return watch.run()


def _whole(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return whole(least=1).read(text)
    except ValueError as error:
        raise UsageError(f"{option} {error}") from None


class Watch:
    """Looks and writes, again and again; what fails is told once, and tried again."""

    def __init__(self, monitor: Monitor, database: Any, tell: Callable[[str], None]) -> None:
        self._monitor, self._database, self._tell = monitor, database, tell
        self._over = threading.Event()
        self._status = 0
        self._failing = ""

    def stop(self, status: int) -> None:
        """End soon, with this exit status; a signal handler may call it."""
        self._status = status
        self._over.set()

    def run(self) -> int:
        """Look and write until `stop`; return the exit status."""
        while not self._over.is_set():
            began = time.monotonic()
            self._look()
            self._over.wait(max(0.0, INTERVAL_S - (time.monotonic() - began)))
        self._database.close()
        return self._status

    def _look(self) -> None:
        from elastic_driver.brain.store.database import described  # noqa: PLC0415 - the extra

        try:
            self._database.put_nodes(self._monitor.look(time.time()))
        except Exception as error:  # of the source or the database: both may come back
            if not self._failing:
                self._tell(f"nothing could be measured: {described(error)}; it is tried again")
            self._failing = described(error)
            return
        if self._failing:
            self._tell("the machines are measured again")
            self._failing = ""


# ---- replay --------------------------------------------------------------------------------


def run_replay(given: argparse.Namespace) -> int:
    """Print the comparison; raises UsageError for what cannot be played."""
    # Loads SQLAlchemy and SciPy.
    from elastic_driver.brain.recorded_jobs import comparison, play, recorded_jobs  # noqa: PLC0415

    names = list(dict.fromkeys((given.algorithm, given.against)))
    algorithms = {name: _named(name, load(GROUP, name)) for name in names}
    address = statistics.address_of(given.stats_db)
    with statistics.reading(address) as database:
        hosts = _hosts(given.hosts, database.known_nodes())
        jobs, left_out = recorded_jobs(database)
    if not jobs:
        raise UsageError(f"{address} has no job that has ended and was measured; name another")
    outcomes = {name: play(jobs, hosts, algorithm) for name, algorithm in algorithms.items()}
    print(comparison(jobs, left_out, hosts, outcomes), end="")
    return os.EX_OK


def _named(name: str, algorithm: Algorithm) -> Algorithm:
    """Return an algorithm whose errors tell its name."""

    def named(view: View) -> Plan:
        try:
            plan = algorithm(view)
        except Exception as error:  # another package's code may raise anything
            what = f"{type(error).__name__}: {error}"
            raise UsageError(f"the algorithm {name} raised {what}; mend it") from error
        if not isinstance(plan, Plan):
            raise UsageError(f"the algorithm {name} returned no Plan; mend it")
        return plan

    return named


def _hosts(text: str | None, nodes: Sequence[Any]) -> tuple[HostView, ...]:
    if text is not None:
        return tuple(HostView(name=name, slots=slots) for name, slots in parse_hosts(text))
    found = tuple(HostView(name=each.name, slots=each.slots) for each in nodes if each.slots)
    if not found:
        raise UsageError("the database knows no hosts; name them with -H")
    return found
