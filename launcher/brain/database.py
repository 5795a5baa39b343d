"""The statistics database that a command of `elasticbrain` names with `--stats-db`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_driver.brain.store.address import Address, read_address
from elastic_driver.errors import ClusterError, UsageError
from launcher.launch.checks import check_database, check_installed

if TYPE_CHECKING:
    from elastic_driver.brain.store.database import Database

HELP = "the statistics: postgresql://USER@HOST/DATABASE, sqlite:///FILE, or FILE"


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

    from elastic_driver.brain.store.database import Database  # noqa: PLC0415
    from elastic_driver.brain.store.failures import described  # noqa: PLC0415

    database = Database(address)
    try:
        yield database
    except (SQLAlchemyError, OSError) as error:
        why = described(error)
        raise ClusterError(f"--stats-db {address} cannot be read: {why}; try again") from error
    finally:
        database.close()
