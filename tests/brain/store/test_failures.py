"""What the failures of a database mean, and how they are told."""

from __future__ import annotations

import pytest

pytest.importorskip("psycopg")

import psycopg
from sqlalchemy.exc import OperationalError

from elastic_driver.brain.store.database import described, is_mistake

REFUSED = """connection failed: connection to server at "127.0.0.1" failed: Connection refused
\tIs the server running on that host and accepting TCP/IP connections?"""


def failed(text: str) -> OperationalError:
    return OperationalError("SELECT 1", {}, psycopg.OperationalError(text))


def test_the_cause_is_told_and_not_the_question_behind_it() -> None:
    assert described(failed(REFUSED)) == REFUSED.splitlines()[0]
    assert not is_mistake(failed(REFUSED))


def test_a_name_server_that_is_away_is_no_mistake() -> None:
    resolving = "failed to resolve host 'db': [Errno {}]"
    assert is_mistake(failed(resolving.format("-2] Name or service not known")))
    assert not is_mistake(failed(resolving.format("-3] Temporary failure in name resolution")))
