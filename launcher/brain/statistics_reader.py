"""The statistics database of `--stats-db`, as the Brain and the other commands read it.

Two threads read it for the Brain: the figures of hosts, which `elasticbrain monitor` has written,
and what similar jobs say about new ones. A database that is away costs what it would say, and never
holds the Brain up: the next plan has what was not found yet. A figure that cannot be counts as not
known. Times are unix seconds.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from elastic_driver.brain.algorithm import HostView, View
from elastic_driver.brain.grants import MOST_HOSTS, Kind
from elastic_driver.brain.messages import HostsMeasured
from elastic_driver.brain.store.address import Address, read_address
from elastic_driver.brain.store.records import JOBS, Prior, prior_of, with_prior
from elastic_driver.errors import ClusterError, UsageError
from launcher.launch.checks import check_database, check_installed

if TYPE_CHECKING:
    from elastic_driver.brain.store.database import Database


def address_of(text: str, *, new: bool = False) -> Address:
    """Return the database that `--stats-db` names; `new`: a file may be made.

    Raises UsageError for one that cannot be used because of a mistake.
    """
    try:
        address = read_address(text) if "://" in text else Address(file=text)
    except ValueError as error:
        raise UsageError(f"--stats-db {error}") from None
    if address.file and not new and not Path(address.file).is_file():
        raise UsageError(f"--stats-db {address.file}: there is no such file; name an existing one")
    check_installed(address)
    check_database(address)
    return address


@contextlib.contextmanager
def reading(address: Address) -> Iterator["Database"]:
    """Return a database to read from; raises ClusterError if it fails meanwhile."""
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 - the extra, which is there

    from elastic_driver.brain.store.database import Database, described  # noqa: PLC0415

    database = Database(address)
    try:
        yield database
    except (SQLAlchemyError, OSError) as error:
        why = described(error)
        raise ClusterError(f"--stats-db {address} cannot be read: {why}; try again") from error
    finally:
        database.close()


LOOK_S = 5.0  # between two looks into the database
AGAIN_S = 5.0  # after a look for similar jobs that failed
MOST_COUNT = 2**53  # slots or bytes


class _Reader:
    """A thread that reads the database; what fails is told once, and tried again.

    `say` is called in this thread. Nothing runs before `start`.
    """

    name = ""  # of the thread

    def __init__(self, database: Any, say: Callable[[str], None]) -> None:
        self._database, self._say = database, say
        self._stopping = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread, and wait for it up to `timeout` seconds."""
        self._stopping.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        self._read_on()
        self._database.close()

    def _read_on(self) -> None:
        """Read until the thread is to end."""
        raise NotImplementedError

    def _fail(self, error: Exception, otherwise: str) -> None:
        """Say what has failed, and what follows from it, unless that was said."""
        from elastic_driver.brain.store.database import described  # noqa: PLC0415 - the extra

        if not self._failing:
            self._failing = True
            self._say(f"--stats-db cannot be read ({described(error)}); {otherwise}")


class HostFigures(_Reader):
    """Reads the newest figures again and again, and posts them."""

    name = "host-figures"

    def __init__(
        self, database: Any, post: Callable[[HostsMeasured], None], say: Callable[[str], None]
    ) -> None:
        """See `_Reader`; `post` is called in this thread, too."""
        super().__init__(database, say)
        self._post = post

    def _read_on(self) -> None:
        while not self._stopping.is_set():
            self._post(HostsMeasured(self._read()))
            self._stopping.wait(LOOK_S)

    def _read(self) -> tuple[HostView, ...]:
        try:
            nodes = self._database.nodes(time.time())
        except Exception as error:  # of any kind of database: it may come back
            self._fail(error, "it is tried again")
            return ()
        if self._failing:
            self._failing = False
            self._say("--stats-db is read again")
        return tuple(map(host_view, nodes[:MOST_HOSTS]))


def host_view(node: Any) -> HostView:
    """Return what is known of a machine, by its `Node`."""
    cpu = node.cpu
    return HostView(
        name=node.name,
        slots=_count(node.slots) or 0,
        cpu=cpu if isinstance(cpu, float) and 0.0 <= cpu <= 1.0 else None,
        memory_free=_count(node.memory_free),
        idle=_count(node.idle),
    )


def _count(found: Any) -> int | None:
    return found if isinstance(found, int) and 0 <= found <= MOST_COUNT else None


class Priors(_Reader):
    """Looks up similar jobs."""

    name = "priors"

    def __init__(self, database: Any, say: Callable[[str], None]) -> None:
        super().__init__(database, say)
        self._asked: dict[str, Kind] = {}  # of the caller's thread
        self._found: dict[str, Prior | None] = {}  # each entry is replaced as a whole
        self._wanted: queue.SimpleQueue[tuple[str, Kind] | None] = queue.SimpleQueue()

    def stop(self, timeout: float = 5.0) -> None:
        """See `_Reader.stop`."""
        self._wanted.put(None)
        super().stop(timeout)

    def ask(self, job: str, kind: Kind) -> None:
        """Have similar jobs looked for, unless this job was of this kind the last time."""
        if self._asked.get(job) != kind:
            self._asked[job] = kind
            self._wanted.put((job, kind))

    def forget(self, job: str) -> None:
        """Forget a job that is over."""
        self._asked.pop(job, None)
        self._found.pop(job, None)

    def into(self, view: View) -> View:
        """Return a view in which each job has what similar jobs say, where it knows less."""
        jobs = tuple(with_prior(job, self._found.get(job.name)) for job in view.jobs)
        return replace(view, jobs=jobs)

    def _read_on(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            while not self._look(*wanted) and not self._stopping.wait(AGAIN_S):
                pass

    def _look(self, job: str, kind: Kind) -> bool:
        """Look for similar jobs; return whether that is done."""
        try:
            found = self._found[job] = prior_of(self._database.similar(kind, JOBS))
        except Exception as error:  # of any kind of database: it may come back
            self._fail(error, "no job is compared with others")
            return False
        self._failing = False
        if found is not None:
            self._say(f"{job}: finished jobs like this one: {found.jobs}")
        return True
