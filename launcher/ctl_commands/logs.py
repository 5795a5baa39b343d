"""`elasticctl logs`: the output of the workers, from the driver or from the folder of a run.

The driver of a job that runs is asked page by page. When it does not answer any more, or the job is
over, the files in the run's folder are read, from the same place on.
"""

import argparse
import collections
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import msgspec

from elastic_driver import contract
from elastic_driver.errors import ClusterError
from elastic_driver.runtime.run_dir import OUTPUT_FOLDER
from elastic_driver.runtime.worker_logs import LogLine, LogPage, LogQuery, read_page
from launcher.ctl_commands import show
from launcher.ctl_commands.find import run_folder
from rendezvous.client import RendezvousClient
from rendezvous.errors import RequestError, UnreachableError

POLL_S = 0.5  # between two questions for new lines
Fetch = Callable[[LogQuery], LogPage]
_decode = msgspec.json.Decoder(LogPage).decode


def of_job(given: argparse.Namespace, job: RendezvousClient) -> None:
    """Print the lines of a job that runs; with -f until it is over."""

    def ask(query: LogQuery) -> LogPage:
        asked = {name: x for name, x in msgspec.structs.asdict(query).items() if x is not None}
        return _decode(job.get_bytes(f"{contract.LOGS_PATH}?{urlencode(asked)}"))

    folder = given.state_dir / given.run_id / OUTPUT_FOLDER
    _print(given, _lines(given, ask, folder))


def of_run(given: argparse.Namespace, reason: ClusterError) -> None:
    """Print the lines of a run that is over: that of --run-id, or the newest.

    Raises `reason`, for which there is no driver to ask, if there is no such run.
    """
    run = None if given.endpoint is not None else run_folder(given.state_dir, given.run_id)
    if run is None or not (output := run / OUTPUT_FOLDER).is_dir():
        raise reason
    given.follow = False
    _print(given, _lines(given, lambda query: read_page(output, query), output))


def _lines(given: argparse.Namespace, fetch: Fetch, folder: Path) -> Iterator[LogLine]:
    """Yield the wanted lines; those that come later too, with -f."""
    since = None if given.since is None else time.time() - given.since
    query = LogQuery(None, given.rank, given.worker, given.host, since)
    while True:
        try:
            page = fetch(query)
        except (RequestError, UnreachableError):
            if query.at is None:  # it has never answered
                raise
            given.follow, fetch = False, lambda query: read_page(folder, query)
            continue
        yield from page.lines
        query = msgspec.structs.replace(query, at=page.next)
        if not page.more:
            if not given.follow:
                return
            time.sleep(POLL_S)


def _print(given: argparse.Namespace, lines: Iterable[LogLine]) -> None:
    if given.tail is not None and not given.follow:
        lines = collections.deque(lines, maxlen=given.tail)
    count = 0
    for count, line in enumerate(lines, 1):  # noqa: B007 - the number of all lines
        print(_text(given, line), flush=given.follow)
    if not count:
        print("elasticctl: no worker has written such a line", file=sys.stderr)


def _text(given: argparse.Namespace, line: LogLine) -> str:
    """Return a line as elasticrun shows it; with the time and the worker if they are wanted."""
    if given.json:
        return msgspec.json.encode(line).decode()
    said = f"[{'-' if line.rank < 0 else line.rank}]<{line.stream}>:{show.cleaned(line.text)}"
    owner = line.worker or line.host
    return f"{show.clock(line.t)} {owner} {said}" if given.timestamps else said
