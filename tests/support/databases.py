"""Both kinds of database, empty for each test; a conftest.py imports the fixtures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.brain.store.address import Address, read_address
from tests.support.postgres import Postgres, postgres, why_not

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[Postgres]:
    """A PostgreSQL for all tests."""
    if reason := why_not():
        pytest.skip(reason)
    with postgres() as running:
        yield running


@pytest.fixture
def in_postgres(server: Postgres) -> Address:
    """An empty database of PostgreSQL."""
    import psycopg

    name = f"test{next(_numbers)}"
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return read_address(server.url(name))


@pytest.fixture
def in_file(tmp_path: Path) -> Address:
    return Address(file=str(tmp_path / "statistics.db"))


@pytest.fixture(params=["sqlite", "postgres"])
def address(request: pytest.FixtureRequest) -> Address:
    """An empty database of either kind."""
    found: Address = request.getfixturevalue(
        "in_file" if request.param == "sqlite" else "in_postgres"
    )
    return found
