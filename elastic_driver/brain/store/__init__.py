"""The statistics of jobs in a database: SQLite in the run's folder, or PostgreSQL.

`writer` is the thread that a driver hands its measurements to; `database` has every statement, and
is the only module besides `migrations` and `tables` that loads SQLAlchemy. docs/statistics.md tells
users about it.
"""
