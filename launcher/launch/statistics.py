"""The database of a job's statistics, looked at before the job begins.

SQLAlchemy is an extra, and loading it takes a moment: it is loaded here only for a job whose user
has named a database. A job without SQLAlchemy simply keeps no statistics.
"""

from importlib.util import find_spec

from elastic_driver.brain.store.address import Address
from elastic_driver.errors import UsageError
from elastic_driver.runtime.run_dir import RunDir


def default_database(run_dir: RunDir) -> Address | None:
    """Return the database in the run's folder; None if it cannot be written here."""
    return Address(file=str(run_dir.statistics_file)) if find_spec("sqlalchemy") else None


def check_installed(address: Address | None) -> None:
    """Raise UsageError if a database that the user has named needs packages that are missing."""
    for package, extra in (("sqlalchemy", "brain"), ("psycopg", "postgres")):
        needed = address is not None and (extra == "brain" or address.url)
        if needed and find_spec(package) is None:
            hint = f"pip install 'elastic-driver[{extra}]' where elasticrun runs"
            raise UsageError(f"--stats-db needs {package}, which is not installed; {hint}")


def check_database(address: Address) -> None:
    """Open a database that the user has named; raises UsageError for what the user must mend.

    One that is away, locked or corrupt is no reason to begin no job: its driver tries again.
    """
    from elastic_driver.brain.store.database import (  # noqa: PLC0415 - see above
        Database,
        described,
        is_mistake,
    )

    database = Database(address)
    try:
        database.open()
    except Exception as error:
        if is_mistake(error):
            raise UsageError(
                f"--stats-db {address}: {described(error)}; mend the address"
            ) from error
    finally:
        database.close()
