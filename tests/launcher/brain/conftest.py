"""Both kinds of database, empty for each test."""

from tests.support.databases import address, in_file, in_postgres, server

__all__ = ["address", "in_file", "in_postgres", "server"]
