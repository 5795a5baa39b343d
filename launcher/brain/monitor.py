"""`elasticbrain monitor`: brings the load of machines into the statistics database."""

import argparse
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic_driver.brain.monitoring import Monitor, MonitorOptions
from elastic_driver.console import say
from elastic_driver.errors import UsageError
from elastic_driver.options import whole
from elastic_driver.runtime.discovery import parse_hosts
from launcher.backends.base import MONITORS, load
from launcher.brain import database as given_database
from launcher.edge import handled

INTERVAL_S = 5.0
MOST_PORT = 65535
_DESCRIPTION = """\
Write how busy machines are into the statistics database, every 5 seconds until Ctrl-C.

sources:
  agents      the machine that this runs on: start it on each host
  prometheus  the node_exporter of each host that -H names
  slurm       the nodes of Slurm, by sinfo
Other packages may bring more.
"""
_EXAMPLE = """\
example:
  elasticbrain monitor --source prometheus -H n1:4,n2:4 --tls-ca ca.pem \\
      --stats-db 'postgresql://ann@head/stats?sslrootcert=ca.pem'
"""
_EXITS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}


def add_parser(commands: Any) -> None:
    """Add the subcommand to those of `elasticbrain`."""
    monitor = commands.add_parser(
        "monitor",
        help="write how busy machines are into the statistics",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    monitor.set_defaults(act=run)
    monitor.add_argument(
        "--source", metavar="NAME", required=True, help="agents, prometheus, slurm, or another one"
    )
    monitor.add_argument("--stats-db", metavar="URL", required=True, help=given_database.HELP)
    monitor.add_argument(
        "-H", "--hosts", metavar="h1:4,h2:4", help="the hosts with their slots (default: all)"
    )
    monitor.add_argument(
        "--slots-per-host", metavar="N", help="slots of a host (default: its processors)"
    )
    monitor.add_argument(
        "--port", metavar="N", help="where a node_exporter listens (default: 9100)"
    )
    monitor.add_argument(
        "--tls-ca",
        metavar="FILE",
        default="",
        help="the CA of the node_exporters' certificates (default: those of the system)",
    )
    monitor.add_argument(
        "--insecure",
        action="store_true",
        help="ask the node_exporters of other machines in plain, too",
    )


def run(given: argparse.Namespace) -> int:
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
    address = given_database.address_of(given.stats_db, new=True)
    from elastic_driver.brain.store.database import Database  # noqa: PLC0415 - the extra

    watch = Watch(monitor, Database(address), lambda line: say(f"elasticbrain: {line}"))
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
